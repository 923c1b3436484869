"""Recurrent state in plain torch: the short causal convolution.

Owns: reading each row's state, the convolution over ragged rows, writing the state behind each row's last token.
Does not know: models, requests, how state pages are allocated.
Invariants: all rows read before any row writes. Every element is made by the same multiplications and additions in the
same order, one at a time, so that a token's bits depend neither on the other rows nor on how a sequence is cut.

    one row       | K - 1 inputs before it | its own inputs |
    taps of t                  [ the K that end with t's own ]
    new state                              [ the last K - 1 ]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.ops import StateSpec, StepBatch


@dataclass(frozen=True, slots=True)
class _Layout:
    """read, write int64 [R]: pages; rows of one token as int64 (row, token of the step) columns, for all of them at
    once; longer rows as host (row, first token, end)."""

    read: Tensor
    write: Tensor
    single: tuple[Tensor, Tensor]
    longer: tuple[tuple[int, int, int], ...]


class ShortConv:
    """Callable short convolution. Keeps the layouts of the latest batch, so that all layers build them once."""

    def __init__(self) -> None:
        self._batch: StepBatch | None = None
        self._layouts: dict[int, _Layout] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: StateSpec, batch: StepBatch) -> Tensor:
        pages = batch.states[spec.layer].parts[0]
        at = self._layout(spec.group, batch)
        before = pages.index_select(0, at.read).to(x.dtype)
        after = torch.empty_like(before)
        out = torch.empty_like(x)
        rows, tokens = at.single
        if len(rows):
            inputs = torch.cat((before.index_select(0, rows), x.index_select(0, tokens).unsqueeze(1)), 1)
            out.index_copy_(0, tokens, _convolve(inputs, weight, bias)[:, 0].to(x.dtype))
            after.index_copy_(0, rows, inputs[:, 1:])
        for row, first, end in at.longer:
            inputs = torch.cat((before[row], x[first:end])).unsqueeze(0)
            out[first:end] = _convolve(inputs, weight, bias)[0].to(x.dtype)
            after[row] = inputs[0, end - first :]
        pages.index_copy_(0, at.write, after.to(pages.dtype))
        return out

    def _layout(self, group: int, batch: StepBatch) -> _Layout:
        if batch is not self._batch:
            self._batch, self._layouts = batch, {}
        if group not in self._layouts:
            self._layouts[group] = _make_layout(batch, group)
        return self._layouts[group]


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """inputs [B, K - 1 + n, D], weight [K, D] -> fp32 [B, n, D]; products and sums one by one, oldest tap first."""
    taps = weight.shape[0]
    count = inputs.shape[1] - taps + 1
    wide = inputs.float()
    out = wide[:, :count] * weight[0]
    for tap in range(1, taps):
        out += wide[:, tap : tap + count] * weight[tap]
    return out if bias is None else out.add_(bias)


def _make_layout(batch: StepBatch, group: int) -> _Layout:
    table = batch.tables[group]
    single: list[tuple[int, int]] = []
    longer: list[tuple[int, int, int]] = []
    first = 0
    for row, count in enumerate(batch.host_counts):
        if count == 1:
            single.append((row, first))
        else:
            longer.append((row, first, first + count))
        first += count
    columns = torch.tensor(single, dtype=torch.int64, device=table.device).view(-1, 2)
    return _Layout(table[:, 0].long(), table[:, 1].long(), (columns[:, 0], columns[:, 1]), tuple(longer))
