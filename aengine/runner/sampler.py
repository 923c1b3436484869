"""Choosing tokens: from raw logits of some positions to one token each.

Owns: which rows take which path, and the order of operations: raw logits -> logprobs; mask, allowed ids, bias, bad
words, min_tokens, penalties; temperature; min-p, top-k, top-p; noise.
Does not know: models, plans, KV, drafts (a draft row is simply several positions of one slot).
Invariants: a position's token depends on its own logits, its slot's setup and its absolute position only. Rows pay for
what they use: a batch of plain greedy rows costs one argmax. A row that cannot be sampled fails alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.runner.logprobs import make_logprobs
from aengine.runner.masks import Masks, disallowed
from aengine.runner.noise import LEAST_TEMPERATURE, TokenNoise
from aengine.runner.rows import at_least, best
from aengine.runner.slots import OFF, SlotTable
from aengine.runner.support import thresholds
from aengine.types import Int32s, Int64s, Logprobs, SlotSetup


@dataclass(frozen=True, slots=True)
class Sampled:
    """Of N positions: tokens int64 [N] (0 where failed), logprobs of one position each, messages of failures."""

    tokens: Int64s
    logprobs: dict[int, Logprobs]
    failed: dict[int, str]

    def merge(self, at: Int64s, part: Sampled) -> None:
        """What `part` says of its positions is so of the positions `at`."""
        self.tokens[at] = part.tokens
        self.logprobs.update({int(at[point]): value for point, value in part.logprobs.items()})
        self.failed.update({int(at[point]): message for point, message in part.failed.items()})


@dataclass(frozen=True, slots=True)
class _Positions:
    """N positions to sample: slots [N], absolute positions of the sampled tokens [N], logits fp32 [N, V]."""

    slots: Int32s
    positions: Int64s
    logits: Tensor


class Sampler:
    """Sampling state of `slots` slots. Called in stream order, from one thread."""

    def __init__(self, slots: int, vocab_size: int, max_model_len: int, device: torch.device) -> None:
        self.slots = SlotTable(slots, vocab_size, max_model_len, device)
        self._noise = TokenNoise(vocab_size, device)

    def setup(self, setup: SlotSetup) -> None:
        """A request moves into a slot."""
        self.slots.setup(setup)

    def sample(self, logits: Tensor, slots: Int32s, positions: Int64s, masks: Masks | None = None) -> Sampled:
        """logits fp32 [N, V] (used up: rules change them in place), slots [N], positions [N] of the sampled tokens;
        `masks` of some of them."""
        at = _Positions(slots, positions, logits)
        wanted = np.nonzero(self.slots.logprobs[slots] != OFF)[0]
        raw = _take(logits, wanted) if wanted.size else None
        values, ids = best(logits)
        failed = dict(_unsound(values, "the model's logits"))
        self._apply_rules(at, values, ids, failed, masks)
        tokens = ids.cpu().numpy()
        self._choose_random(at, values, tokens, failed)
        tokens[list(failed)] = 0
        self._remember(at, tokens, failed)
        logprobs = {} if raw is None else self._logprobs(raw, wanted, at, tokens, failed)
        return Sampled(tokens, logprobs, failed)

    def score(self, logits: Tensor, targets: Int32s, slot: int) -> Logprobs:
        """Log-probabilities of prompt tokens int32 [N] by logits fp32 [N, V], as the request in `slot` wants them."""
        wanted = torch.from_numpy(targets.astype(np.int64)).to(logits.device)
        return make_logprobs(logits, wanted, max(0, int(self.slots.prompt_logprobs[slot])))

    def _apply_rules(
        self, at: _Positions, values: Tensor, ids: Tensor, failed: dict[int, str], masks: Masks | None
    ) -> None:
        """Shape the logits of masked and ruled rows and find their best tokens anew."""
        by_rule = self.slots.ruled(at.slots, at.positions)
        ruled_or_masked = by_rule.copy()
        if masks is not None:
            ruled_or_masked[masks.rows] = True
            for row, bits in zip(masks.rows.tolist(), torch.from_numpy(masks.bits), strict=True):
                gone = disallowed(bits.unsqueeze(0).to(at.logits.device), at.logits.shape[1])[0]
                at.logits[row].masked_fill_(gone, float("-inf"))
        ruled = [row for row in np.nonzero(ruled_or_masked)[0].tolist() if row not in failed]
        if not ruled:
            return
        for row in (row for row in ruled if by_rule[row]):
            rules = self.slots.rules[at.slots[row]]
            assert rules is not None, f"slot {at.slots[row]} is ruled but has no rules"
            rules.apply(at.logits[row], int(at.positions[row]))
        rows = torch.tensor(ruled, device=at.logits.device)
        values[rows], ids[rows] = best(at.logits[rows])
        for index, message in _unsound(values[rows], "the logits after masks and penalties"):
            failed[ruled[index]] = message

    def _choose_random(self, at: _Positions, values: Tensor, tokens: Int64s, failed: dict[int, str]) -> None:
        """Replace the best token by a drawn one in the rows with a temperature."""
        drawn = self.slots.temperature[at.slots] > 0.0
        drawn[list(failed)] = False
        if not drawn.any():
            return
        plain_here = at.logits.device.type == "cpu"  # elsewhere one ragged pass over whole rows is the faster one
        filtered = self.slots.filtered[at.slots] | (not plain_here)
        self._draw_plain(at, np.nonzero(drawn & ~filtered)[0], tokens)
        self._draw_filtered(at, np.nonzero(drawn & filtered)[0], values, tokens)

    def _draw_plain(self, at: _Positions, rows: Int64s, tokens: Int64s) -> None:
        """Row by row, so that each row's 200 KB of logits stay in the core's cache through all passes."""
        slots = at.slots[rows]
        keys = self.slots.keys(slots, at.positions[rows])
        temperatures = self.slots.temperature[slots].tolist()
        words = zip(rows.tolist(), temperatures, keys.k0, keys.k1, strict=True)
        for row, temperature, k0, k1 in words:
            tokens[row] = self._noise.choose(at.logits[row], int(tokens[row]), temperature, k0, k1)

    def _draw_filtered(self, at: _Positions, rows: Int64s, values: Tensor, tokens: Int64s) -> None:
        """All at once: noise is made for the tokens that top-k, top-p and min-p leave, often a few dozen a row."""
        if not rows.size:
            return
        slots = at.slots[rows]
        device = at.logits.device
        scale = torch.from_numpy(self.slots.temperature[slots].astype(np.float32)).to(device)
        z = _take(at.logits, rows)
        z.sub_(_take(values, rows).unsqueeze(1)).div_(scale.clamp_(min=LEAST_TEMPERATURE).unsqueeze(1))
        owner, ids = at_least(z, thresholds(z, self.slots.cuts(slots)))
        scores = z[owner, ids] + self._noise.gumbel(ids, owner, self.slots.keys(slots, at.positions[rows]))
        tokens[rows] = _ragged_best(scores, ids, owner, len(rows)).cpu().numpy()

    def _remember(self, at: _Positions, tokens: Int64s, failed: dict[int, str]) -> None:
        for row, slot in enumerate(at.slots.tolist()):
            rules = self.slots.rules[slot]
            if rules is not None and row not in failed:
                rules.append(int(tokens[row]), int(at.positions[row]))

    def _logprobs(
        self, raw: Tensor, wanted: Int64s, at: _Positions, tokens: Int64s, failed: dict[int, str]
    ) -> dict[int, Logprobs]:
        """Rows asking for equally many alternatives together, so that no row's result depends on the others' wish."""
        counts = self.slots.logprobs[at.slots[wanted]]
        result: dict[int, Logprobs] = {}
        for k in np.unique(counts).tolist():
            group = [i for i in np.nonzero(counts == k)[0].tolist() if wanted[i] not in failed]
            if not group:
                continue
            chosen = torch.from_numpy(tokens[wanted[group]]).to(raw.device)
            made = make_logprobs(raw[group], chosen, k)
            for index, i in enumerate(group):
                one = slice(index, index + 1)
                result[int(wanted[i])] = Logprobs(made.ids[one], made.values[one], made.ranks[one])
        return result


def _take(x: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """A copy of the rows; of all of them without an index."""
    if len(rows) == len(x):
        return x.clone()
    return x[torch.from_numpy(rows).to(x.device)]


def _unsound(values: Tensor, what: str) -> Iterable[tuple[int, str]]:
    """(index, message) of the greatest values that are no number to choose by."""
    host = values.cpu().numpy()
    for row in np.nonzero(~np.isfinite(host))[0].tolist():
        if np.isneginf(host[row]):
            yield row, f"all tokens are masked: {what} are minus infinity everywhere"
        else:
            yield row, f"{what} hold {'NaN' if np.isnan(host[row]) else 'infinity'}"


def _ragged_best(scores: Tensor, ids: Tensor, owner: Tensor, rows: int) -> Tensor:
    """scores, ids, owner [S] -> the id of each owner's best score int64 [rows]; of equal scores the lowest id."""
    top = scores.new_full((rows,), float("-inf")).scatter_reduce(0, owner, scores, "amax")
    none = torch.iinfo(torch.int64).max
    candidates = torch.where(scores == top[owner], ids, none)
    return ids.new_full((rows,), none).scatter_reduce(0, owner, candidates, "amin")
