"""What a forward takes on the device beside weights and pages, measured.

Owns: the largest step of each kind, made up: as many tokens as a step may have, and as many decode rows.
Does not know: how the bytes are shared out, sampling.
Invariants: at start-up only. All rows read and write one page of each group, which is thrown away afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aengine.kernels.ops import LayerKV, LayerState, Model, Ops, StepBatch, state_specs
from aengine.runner.cuda.api import DeviceApi


def forward_peak(
    api: DeviceApi, model: Model, ops: Ops, *, kv_dtype: torch.dtype, page_tokens: int, tokens: int, rows: int,
    points: int, context: int,
) -> int:  # fmt: skip
    """The most bytes that a forward of `tokens` tokens of one prompt, or of `rows` decode rows at `context`, holds at
    once, with the logits of `points` positions."""
    tokens, rows = min(tokens, context), max(1, min(rows, tokens))
    steps = [((tokens,), tokens, (0,)), ((1,) * rows, context, (context - 1,) * rows)]
    most = 0
    for counts, longest, starts in steps:
        batch = _batch(api.device, model, kv_dtype, page_tokens, counts, longest, starts)

        def work(batch: StepBatch = batch) -> None:
            with torch.inference_mode():
                hidden = model.forward(ops, batch)
                model.logits(ops, hidden[:points])

        work()  # compiles kernels and fills caches, which stay
        most = max(most, api.peak(work))
    return most


def _batch(
    device: torch.device, model: Model, kv_dtype: torch.dtype, page: int, counts: Sequence[int], longest: int,
    starts: tuple[int, ...],
) -> StepBatch:  # fmt: skip
    states = state_specs(model)
    recurrent = {spec.group for spec in states}
    groups = 1 + max(recurrent | {spec.group for spec in model.attention}, default=-1)
    columns = [2 if group in recurrent else -(-longest // page) for group in range(groups)]
    kv = []
    for spec in model.attention:
        k, v = torch.zeros((2, 1, page, spec.kv_heads, spec.head_dim), dtype=kv_dtype, device=device)
        scales = torch.zeros((2, 1, page, spec.kv_heads), device=device) if kv_dtype is torch.int8 else (None, None)
        kv.append(LayerKV(k, v, *scales))
    held = (tuple(torch.zeros((1, *part.shape), dtype=part.dtype, device=device) for part in s.parts) for s in states)
    offsets = torch.zeros(len(counts) + 1, dtype=torch.int32)
    offsets[1:] = torch.tensor(counts).cumsum(0)
    positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]).int()
    ends = torch.tensor([start + n for start, n in zip(starts, counts, strict=True)], dtype=torch.int32)
    return StepBatch(
        ids=torch.zeros(len(positions), dtype=torch.int32, device=device),
        positions=positions.to(device),
        row_offsets=offsets.to(device),
        context=ends.to(device),
        tables=tuple(torch.zeros((len(counts), width), dtype=torch.int32, device=device) for width in columns),
        kv=tuple(kv),
        states=tuple(LayerState(parts) for parts in held),
        max_context=longest,
        host_counts=tuple(counts),
        host_starts=starts,
    )
