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
    """read, write int64 [R]: pages. On the host: runs of neighbouring rows of one token as (first row, first token,
    rows), each computed at once; longer rows as (row, first token, end)."""

    read: Tensor
    write: Tensor
    single: tuple[tuple[int, int, int], ...]
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
        for row, first, count in at.single:
            rows, tokens = slice(row, row + count), slice(first, first + count)
            inputs = torch.cat((before[rows], x[tokens].unsqueeze(1)), 1)
            out[tokens] = _convolve(inputs, weight, bias)[:, 0].to(x.dtype)
            after[rows] = inputs[:, 1:]
        for row, first, end in at.longer:
            inputs = torch.cat((before[row], x[first:end])).unsqueeze(0)
            out[first:end] = _convolve(inputs, weight, bias)[0].to(x.dtype)
            after[row] = inputs[0, end - first :]
        kept = torch.where((at.write > 0).view(-1, 1, 1), after, 0.0)  # a row that writes page 0 leaves no state
        pages.index_copy_(0, at.write, kept.to(pages.dtype))
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
    single: list[tuple[int, int, int]] = []
    longer: list[tuple[int, int, int]] = []
    first = 0
    for row, count in enumerate(batch.host_counts):
        if count == 1 and single and single[-1][0] + single[-1][2] == row:
            single[-1] = (*single[-1][:2], single[-1][2] + 1)
        elif count == 1:
            single.append((row, first, 1))
        else:
            longer.append((row, first, first + count))
        first += count
    return _Layout(table[:, 0].long(), table[:, 1].long(), tuple(single), tuple(longer))
