"""Launches of attention: which kernel takes which rows, and in which blocks.

Owns: block shapes, split sizes, the partial results of splits, tables of media items.
Does not know: models, how pages are allocated.
Invariants: all K and V of a step are written before any is read. Which kernel takes a row depends on its number of
tokens alone, and splits have one size: rows do not change each other's bits. Shapes of launches depend on the number
of tokens and rows, `host_counts` and `max_context` only, so one recording serves every batch that agrees on them (or
has shorter contexts). Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.errors import NotSupported
from aengine.kernels.ops import AttentionSpec, CrossBatch, LayerKV, RopeTable, StepBatch
from aengine.kernels.triton.device.attention import decode_kernel, merge_kernel, prefill_kernel, write_kv_kernel
from aengine.kernels.triton.launch import dense_last, on_device, power_of_two, widened

SPLIT_TOKENS = 512  # keys of one program of the decode kernel
_BLOCK_ROWS = 16  # the least that a matrix product takes


@dataclass(frozen=True, slots=True)
class Tiles:
    """Query rows and keys of a tile, warps and pipeline stages of its program."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """What kernels of one attention are compiled for."""

    head_dim: int  # padded to a power of two, at least 16
    prefill: Tiles
    decode: Tiles
    short: int  # rows of at most so many tokens are the decode kernel's


def geometry(spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> Geometry:
    """Shapes whose programs keep everything in registers (tests/kernels/triton/compiled.py)."""
    dim, group = power_of_two(spec.head_dim, 16), spec.heads // spec.kv_heads
    if dim > 512:
        raise NotSupported(f"heads of {spec.head_dim} elements; the most is 512")
    wide = 2 if dtype is torch.float32 else 1
    if dim * wide <= 128:
        # To items, 128 rows by 64 keys spill on sm_80 with Triton 3.6, and are at its last register with 3.7.
        prefill, keys = Tiles(64, 32, 4, 2) if spec.cross else Tiles(128, 64, 8, 2), 64
    elif dim * wide <= 256:
        prefill, keys = Tiles(32, 32, 4, 2), 32  # 64 rows by 8 warps spill on sm_100 with Triton 3.6
    else:
        prefill, keys = Tiles(32, 16, 8, 1), 16
    if kv_dtype is torch.int8:
        prefill, keys = Tiles(min(prefill.rows, 64), min(keys, 32), prefill.warps, prefill.stages), min(keys, 32)
    least = power_of_two(group, _BLOCK_ROWS)
    warps = prefill.warps if least <= prefill.rows else 8
    rows = Tiles(max(prefill.rows, least), prefill.keys, warps, prefill.stages)
    return Geometry(dim, rows, Tiles(least, keys, 4, 2), least // group)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Ragged rows over tables of pages. `limit`: entries of each page that are seen, or None for positions."""

    offsets: Tensor
    context: Tensor
    table: Tensor
    limit: Tensor | None
    counts: tuple[int, ...]
    max_context: int


def write_kv(
    q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, spec: AttentionSpec, batch: StepBatch, rope: RopeTable | None
) -> Tensor:
    """k, v [T, kv_heads, head_dim] into the pages of their positions; by `rope` k is rotated on its way -> q, rotated
    likewise; q itself without rope."""
    if not len(k):
        return q
    k, v = dense_last(k), dense_last(v)
    table = batch.tables[spec.group]
    turned, half, cos, sin = None, 0, None, None
    if rope is not None:
        q, half = dense_last(q), rope.rotary_dim // 2
        turned = q.new_empty(q.shape)
        cos, sin = rope.cos.contiguous(), rope.sin.contiguous()
    write_kv_kernel[(len(k),)](
        q if turned is not None else None, turned, k, v, cos, sin, batch.positions, batch.row_offsets, batch.context,
        table, kv.k, kv.v, kv.k_scale, kv.v_scale,
        len(batch.context), q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        table.stride(0),
        *kv.k.stride()[:3], *kv.v.stride()[:3], *_scale_strides(kv),
        HEADS=spec.heads, KV_HEADS=spec.kv_heads, D=spec.head_dim, HALF=half, BQ=power_of_two(spec.heads),
        BH=power_of_two(spec.kv_heads), BD=power_of_two(spec.head_dim), PAGE=kv.page_tokens, enable_fp_fusion=False,
    )  # fmt: skip
    return q if turned is None else turned


def attend_positions(q: Tensor, spec: AttentionSpec, batch: StepBatch, sinks: Tensor | None) -> Tensor:
    """q [T, heads, head_dim] over the pages of each row -> [T, heads * head_dim]. Padding tokens get anything."""
    rows = _Rows(batch.row_offsets, batch.context, batch.tables[spec.group], None, batch.host_counts, batch.max_context)
    return _attend(q, batch.kv[spec.layer], spec, rows, sinks)


def _scale_strides(kv: LayerKV) -> tuple[int, ...]:
    if kv.k.dtype is not torch.int8:
        return 0, 0, 0
    if kv.k_scale is None or kv.v_scale is None or kv.k_scale.stride() != kv.v_scale.stride():
        raise ValueError("int8 pages need k_scale and v_scale of equal strides")
    return tuple(kv.k_scale.stride())


def splits_of(spec: AttentionSpec, max_context: int, short: int) -> int:
    """The most splits that a row of the decode kernel reaches into."""
    splits = -(-max(max_context, 1) // SPLIT_TOKENS)
    for reach in (spec.window, spec.chunk):
        if reach and not spec.cross:
            splits = min(splits, (reach + short - 2) // SPLIT_TOKENS + 2)
    return splits


def _attend(q: Tensor, kv: LayerKV, spec: AttentionSpec, rows: _Rows, sinks: Tensor | None) -> Tensor:
    q = dense_last(q)
    tokens, group = len(q), spec.heads // spec.kv_heads
    out = q.new_empty((tokens, spec.heads * spec.head_dim))
    shape = geometry(spec, q.dtype, kv.k.dtype)
    common = {
        "HEADS": spec.heads, "KV_HEADS": spec.kv_heads, "D": spec.head_dim, "BD": shape.head_dim,
        "WINDOW": spec.window, "CHUNK": spec.chunk, "CROSS": spec.cross, "SHORT": shape.short,
    }  # fmt: skip
    reading = common | {"PAGE": kv.page_tokens, "UP": widened(q.dtype)}
    pages = (kv.k, kv.v, kv.k_scale, kv.v_scale, rows.table, rows.limit, rows.offsets, rows.context, sinks)
    numbers = (spec.scale, spec.softcap or None, q.stride(0), q.stride(1), rows.table.stride(0))
    strides = (*kv.k.stride()[:3], *kv.v.stride()[:3], *_scale_strides(kv))
    if any(count > shape.short for count in rows.counts):
        tiles = shape.prefill
        grid = (tokens // (tiles.rows // group) + len(rows.counts), spec.kv_heads)
        prefill_kernel[grid](
            q, out, *pages, len(rows.counts), *numbers, *strides, **reading,
            BM=tiles.rows, BN=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    queries = max((count for count in rows.counts if count <= shape.short), default=0)
    if not queries:
        return out
    tiles, splits = shape.decode, splits_of(spec, rows.max_context, shape.short)
    direct = splits == 1
    partial = (len(rows.counts), spec.kv_heads, splits, queries * group) if not direct else (0,)
    most, total = (q.new_empty(partial, dtype=torch.float32) for _ in range(2))
    acc = q.new_empty((*partial, spec.head_dim), dtype=torch.float32)
    decode_kernel[(len(rows.counts), spec.kv_heads, splits)](
        q, out, acc, most, total, *pages, *numbers, *strides, queries, **reading,
        SPLIT=SPLIT_TOKENS, DIRECT=direct, BM=tiles.rows, BN=tiles.keys,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if not direct:
        merge_kernel[(len(rows.counts), spec.kv_heads)](
            out, acc, most, total, rows.offsets, rows.context, sinks, splits, queries, **common,
            SPLIT=SPLIT_TOKENS, BM=tiles.rows, num_warps=4,
        )  # fmt: skip
    return out


class CrossAttention:
    """Callable cross attention: the spans of a step are its rows. Keeps the tables of the latest batch."""

    def __init__(self) -> None:
        self._cross: CrossBatch | None = None
        self._rows: dict[int, _Rows] = {}

    def __call__(self, q: Tensor, spec: AttentionSpec, cross: CrossBatch, kv: LayerKV) -> Tensor:
        if cross is not self._cross:
            self._cross, self._rows = cross, {}
        if kv.page_tokens not in self._rows:
            self._rows[kv.page_tokens] = _span_rows(cross, kv.page_tokens)
        return _attend(q, kv, spec, self._rows[kv.page_tokens], None)


def _span_rows(cross: CrossBatch, page: int) -> _Rows:
    """Tables [spans, pages] and how many entries of each page are seen, int32 of the same shape."""
    device = cross.tokens.device
    counts = tuple(span.count for span in cross.spans)
    ends = [span.first + span.count for span in cross.spans]
    if [0, *ends[:-1]] != [span.first for span in cross.spans] or ends[-1] != len(cross.tokens):
        raise ValueError("the spans of a step must cover its tokens in order")
    lengths = [sum(len(item.pages) for item in span.items) for span in cross.spans]
    table = torch.zeros((len(counts), max(lengths)), dtype=torch.int32, device=device)
    limit = torch.zeros(table.shape, dtype=torch.int32, device=device)
    for row, span in enumerate(cross.spans):
        at = 0
        for item in span.items:
            place = slice(at, at + len(item.pages))
            table[row, place] = item.pages
            begun = torch.arange(0, len(item.pages) * page, page, dtype=torch.int32, device=device)
            limit[row, place] = (item.tokens - begun).clamp_(0, page)
            at += len(item.pages)
    context = [length * page for length in lengths]
    offsets = on_device([0, *ends], torch.int32, device)
    return _Rows(offsets, on_device(context, torch.int32, device), table, limit, counts, max(context))
