"""Recurrent state in plain torch: the short causal convolution.

Owns: reading each row's state, the convolution over ragged rows, writing the state behind each row's last token.
Does not know: models, requests, how state pages are allocated.
Invariants: all rows read before any row writes. Every element is made by the same multiplications and additions in the
same order, one at a time, so that a token's bits depend neither on the other rows nor on how a sequence is cut.

    row           0                  1
    joined        | h h | x x x      | h h | x
    taps of t     the K rows that end with t's own
    new state       the last K - 1 rows of each row's part
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.ops import StateSpec, StepBatch


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where things lie in `joined`: tokens int64 [T]; history, last int64 [R * (K - 1)]; pages int64 [R]."""

    tokens: Tensor
    history: Tensor
    last: Tensor
    read: Tensor
    write: Tensor


class ShortConv:
    """Callable short convolution. Keeps the layouts of the latest batch, so that all layers build them once."""

    def __init__(self) -> None:
        self._batch: StepBatch | None = None
        self._layouts: dict[tuple[int, int], _Layout] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: StateSpec, batch: StepBatch) -> Tensor:
        taps = weight.shape[0]
        pages = batch.states[spec.layer].parts[0]
        at = self._layout(spec.group, taps - 1, batch)
        joined = x.new_empty((len(at.tokens) + len(at.history), x.shape[1]), dtype=torch.float32)
        joined[at.history] = pages.index_select(0, at.read).flatten(0, 1).float()
        joined[at.tokens] = x.float()
        out = joined[at.tokens - (taps - 1)] * weight[0]
        for tap in range(1, taps):
            out += joined[at.tokens - (taps - 1) + tap] * weight[tap]
        if bias is not None:
            out += bias
        pages[at.write] = joined[at.last].view(len(at.write), taps - 1, -1).to(pages.dtype)
        return out.to(x.dtype)

    def _layout(self, group: int, history: int, batch: StepBatch) -> _Layout:
        if batch is not self._batch:
            self._batch, self._layouts = batch, {}
        key = (group, history)
        if key not in self._layouts:
            self._layouts[key] = _make_layout(batch, group, history)
        return self._layouts[key]


def _make_layout(batch: StepBatch, group: int, history: int) -> _Layout:
    table = batch.tables[group]
    device = table.device
    counts = torch.tensor(batch.host_counts, device=device)
    rows = torch.arange(len(counts), device=device)
    ends = counts.cumsum(0)
    steps = torch.arange(history, device=device)
    tokens = torch.arange(int(sum(batch.host_counts)), device=device)
    return _Layout(
        tokens=tokens + (rows.repeat_interleave(counts) + 1) * history,
        history=((ends - counts + rows * history).unsqueeze(1) + steps).flatten(),
        last=((ends + rows * history).unsqueeze(1) + steps).flatten(),
        read=table[:, 0].long(),
        write=table[:, 1].long(),
    )
