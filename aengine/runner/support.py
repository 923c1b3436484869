"""Which tokens top-k, top-p and min-p leave: one threshold per row.

Owns: the cut of each row.
Does not know: noise, temperature, slots.
Invariants: tokens with equal logits stay or go together, so the support does not depend on the order of a sort. A row's
threshold does not depend on the other rows: sums run over the row's values in falling order, one after the other, in
fp64. The best token always stays.

The order is min-p, then top-k, then top-p of the mass that the first two left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.runner.rows import exp_sums, largest

# Values looked at first. A nucleus that does not fit is looked for again among 8 times as many, up to all.
FIRST_CANDIDATES = 1024
_GROWTH = 8
# Every threshold is at least this, so that masked tokens (minus infinity) are in no support.
_LEAST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Per row: top_k int64 [N] (0 = off), top_p and min_p fp64 [N] (1 and 0 = off)."""

    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]


def thresholds(z: Tensor, cuts: Cuts) -> Tensor:
    """z fp32 [N, V], each row's maximum 0 (masked: -inf) -> fp32 [N]: the support of row i is z[i] >= threshold[i]."""
    rows, vocab = z.shape
    result = np.zeros(rows, dtype=np.float32)
    floors = min_p_floors(cuts.min_p)
    top_k = np.where((cuts.top_k <= 0) | (cuts.top_k >= vocab), vocab, cuts.top_k)
    mass = _whole_mass(z, cuts, top_k)
    pending = np.arange(rows)
    k = FIRST_CANDIDATES
    while pending.size:
        values = largest(z if len(pending) == rows else z[torch.from_numpy(pending).to(z.device)], k).cpu().numpy()
        found = np.empty(len(pending), dtype=bool)
        for at, row in enumerate(pending):
            cut = _cut(values[at], floors[row], int(top_k[row]), float(cuts.top_p[row]), mass[row], vocab)
            found[at] = cut is not None
            result[row] = 0.0 if cut is None else cut
        pending = pending[~found]
        k *= _GROWTH
    return torch.from_numpy(result).to(z.device)


def min_p_floors(min_p: NDArray[np.float64]) -> NDArray[np.float32]:
    """A token stays if its probability is at least min_p of the best one's: z >= log(min_p)."""
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(min_p), _LEAST).astype(np.float32)


def _whole_mass(z: Tensor, cuts: Cuts, top_k: NDArray[np.int64]) -> NDArray[np.float64]:
    """Sum of exp(z) over the vocabulary, where top-p cuts it and neither of the others does before; else NaN."""
    mass = np.full(len(z), np.nan)
    whole = np.nonzero((cuts.top_p < 1.0) & (cuts.min_p <= 0.0) & (top_k == z.shape[1]))[0]
    if whole.size:
        chosen = z if len(whole) == len(z) else z[torch.from_numpy(whole).to(z.device)]
        mass[whole] = exp_sums(chosen).cpu().numpy()
    return mass


def _cut(
    values: NDArray[np.float32], floor: np.float32, top_k: int, top_p: float, whole: np.float64, vocab: int
) -> np.float32 | None:
    """Threshold of one row from its largest values, falling; None when the support may reach beyond them."""
    reach = len(values) if len(values) == vocab else len(values) - 1  # the last value may have unseen twins
    if top_k < vocab:
        if top_k > reach:
            return None
        floor = max(floor, values[top_k - 1])
    if top_p >= 1.0:
        return floor
    kept = int(np.searchsorted(-values, -floor, side="right"))
    inside = kept <= reach
    if not inside and np.isnan(whole):
        return None
    falling = np.cumsum(np.exp(values[:kept].astype(np.float64)))
    target = top_p * (float(falling[-1]) if np.isnan(whole) else float(whole))
    last = int(np.searchsorted(falling, target, side="left"))  # the first prefix that holds top_p of the mass
    if last >= kept:
        return floor if inside else None
    if last >= reach:
        return None
    return np.float32(max(floor, values[last]))
