"""Sequences in pages, and attention by definition.

Owns: building StepBatches over strided, permuted, poisoned pages; a dense fp64 oracle.
Does not know: any backend.
Invariants: every page slot no test wrote holds NaN (of int8 pages, its scale), so that a kernel that reads one shows
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aengine.kernels.ops import AttentionSpec, LayerKV, RopeTable, StepBatch
from aengine.kernels.reference import ReferenceOps
from aengine.kernels.reference_attention import quantise


@dataclass(frozen=True)
class Sequence_:
    """q [L, heads, D], k and v [L, kv_heads, D] of one sequence, all positions."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def length(self) -> int:
        return int(self.q.shape[0])


def random_sequence(length: int, spec: AttentionSpec, dtype: torch.dtype, seed: int) -> Sequence_:
    g = torch.Generator().manual_seed(seed)
    shape = (length, spec.kv_heads, spec.head_dim)
    q = torch.randn((length, spec.heads, spec.head_dim), generator=g)
    return Sequence_(q.to(dtype), torch.randn(shape, generator=g).to(dtype), torch.randn(shape, generator=g).to(dtype))


def make_spec(
    heads: int, kv_heads: int, head_dim: int, *, window: int = 0, chunk: int = 0, softcap: float = 0.0
) -> AttentionSpec:
    return AttentionSpec(0, 0, heads, kv_heads, head_dim, head_dim**-0.5, window, chunk, softcap)


class Pages:
    """Pages of one layer, given to sequences in a shuffled order. Pages are `pad` elements apart beyond their size."""

    def __init__(
        self,
        lengths: Sequence[int],
        spec: AttentionSpec,
        dtype: torch.dtype,
        *,
        page_tokens: int,
        seed: int,
        pad: int = 64,
    ) -> None:
        counts = [-(-length // page_tokens) for length in lengths]
        total = sum(counts) + 1  # page 0 is the null page
        size = page_tokens * spec.kv_heads * spec.head_dim
        pitch = 2 * size + pad
        memory = torch.full((total * pitch,), 0.0 if dtype is torch.int8 else float("nan")).to(dtype)
        shape = (total, page_tokens, spec.kv_heads, spec.head_dim)
        strides = (pitch, spec.kv_heads * spec.head_dim, spec.head_dim, 1)
        scales = torch.full((2, total, page_tokens + 1, spec.kv_heads), float("nan"))[:, :, :page_tokens]
        k_scale, v_scale = scales if dtype is torch.int8 else (None, None)
        self.kv = LayerKV(memory.as_strided(shape, strides), memory.as_strided(shape, strides, size), k_scale, v_scale)
        order = (torch.randperm(total - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
        self.tables = torch.zeros((len(lengths), max(counts) + 3), dtype=torch.int32)
        for row, count in enumerate(counts):
            self.tables[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)

    def fill(self, row: int, sequence: Sequence_, upto: int) -> None:
        """Write positions 0 .. upto - 1 of a sequence without any kernel."""
        positions = torch.arange(upto)
        at = self.tables[row, positions // self.kv.page_tokens].long(), positions % self.kv.page_tokens
        for pages, scale, x in ((self.kv.k, self.kv.k_scale, sequence.k), (self.kv.v, self.kv.v_scale, sequence.v)):
            if scale is None:
                pages[at] = x[:upto].to(pages.dtype)
            else:
                pages[at], scale[at] = quantise(x[:upto])

    def share(self, row: int, other: int, tokens: int) -> None:
        """Let `row` name the pages of `other` for its first `tokens` positions (whole pages of them)."""
        columns = tokens // self.kv.page_tokens
        self.tables[row, :columns] = self.tables[other, :columns]


def held(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What pages of `dtype` give back of x, fp64."""
    if dtype is not torch.int8:
        return x.to(dtype).double()
    values, scale = quantise(x)
    return values.double() * scale.double().unsqueeze(-1)


def rotated(sequences: list[Sequence_], half: int) -> tuple[list[Sequence_], RopeTable]:
    """The sequences with q and k rotated, and by what."""
    angles = torch.rand(max(sequence.length for sequence in sequences), half) * 6
    table, reference = RopeTable(angles.cos(), angles.sin()), ReferenceOps()
    turned = []
    for one in sequences:
        positions = torch.arange(one.length, dtype=torch.int32)
        q, k = (reference.rope(x, positions, table) for x in (one.q, one.k))
        turned.append(replace(one, q=q, k=k))
    return turned, table


def make_batch(pages: Pages, rows: Sequence[tuple[int, int, int]]) -> StepBatch:
    """rows: (table row, start, count)."""
    offsets = [0]
    for _, _, count in rows:
        offsets.append(offsets[-1] + count)
    positions = [start + i for _, start, count in rows for i in range(count)]
    context = [start + count for _, start, count in rows]
    return StepBatch(
        ids=torch.zeros(len(positions), dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        row_offsets=torch.tensor(offsets, dtype=torch.int32),
        context=torch.tensor(context, dtype=torch.int32),
        tables=(pages.tables[[row for row, _, _ in rows]].contiguous(),),
        kv=(pages.kv,),
        max_context=max(context),
        host_counts=tuple(count for _, _, count in rows),
        host_starts=tuple(start for _, start, _ in rows),
    )


def step_inputs(sequences: Sequence[Sequence_], rows: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of the step's tokens: rows of one qkv matrix, as a model has them."""
    parts = [
        torch.cat([x[start : start + count].flatten(1) for x in (s.q, s.k, s.v)], dim=1)
        for (row, start, count) in rows
        for s in (sequences[row],)
    ]
    qkv = torch.cat(parts)
    first = sequences[0]
    widths = [int(x.shape[1] * x.shape[2]) for x in (first.q, first.k, first.v)]
    q, k, v = qkv.split(widths, dim=1)
    dim = first.q.shape[2]
    return q.unflatten(1, (-1, dim)), k.unflatten(1, (-1, dim)), v.unflatten(1, (-1, dim))


def dense_attention(
    sequence: Sequence_, spec: AttentionSpec, kv_dtype: torch.dtype, sinks: Tensor | None = None, start: int = 0
) -> Tensor:
    """fp64 [L - start, heads * D] by definition, with keys and values as the pages hold them; sinks [heads]."""
    length, group = sequence.length, spec.heads // spec.kv_heads
    q = sequence.q[start:].double()
    k = held(sequence.k, kv_dtype).repeat_interleave(group, dim=1)
    v = held(sequence.v, kv_dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    query, key = torch.arange(start, length).unsqueeze(1), torch.arange(length)
    hidden = key > query
    if spec.window:
        hidden |= key < query - spec.window + 1
    if spec.chunk:
        hidden |= key < query - query % spec.chunk
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, length - start, 1)], dim=-1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
