"""Attention over paged KV: writing K and V, blocks of queries, splits of one row's keys, their merge.

Owns: the kernels of attention.
Does not know: models, how launches are sized.
Invariants: scores, softmax and sums are fp32. Tiles and splits of keys begin at fixed positions, and one that a query
does not see changes no bit of it: a result depends on its own row and on which kernel took the row, never on other
rows or page numbers. Bytes of a page that no query of the block sees are never loaded. 64-bit page offsets.

    keys      0      SPLIT     2 SPLIT    3 SPLIT   context
    decode    | split 0 | split 1  | split 2 | 3 |          one program each, then merged in this order
    prefill   |---------------- one program per block of queries ---|
"""

import triton
import triton.language as tl

from aengine.kernels.triton.device.search import find_row

LOG2_E = tl.constexpr(1.4426950408889634)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and taking it away rounds to an integer, ties to even
LEAST_E4M3 = tl.constexpr(0.015625)  # 2^-6; below it e4m3 has multiples of 2^-9
ROUND_E4M3 = tl.constexpr(24576.0)  # 1.5 * 2^14: rounds to those


@triton.jit(do_not_specialize=["rows"])
def write_kv_kernel(
    q_ptr, turned_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, positions_ptr, offsets_ptr, context_ptr, table_ptr,
    k_pages, v_pages, k_scale_ptr, v_scale_ptr,
    rows, q_stride, q_stride_head, k_stride, k_stride_head, v_stride, v_stride_head, table_stride,
    k_page, k_token, k_head, v_page, v_token, v_head, s_page, s_token, s_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BQ: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One token's K and V. A token behind the last row, or at or behind its row's context, is padding.

    With `turned`, q [HEADS, D] is rotated into it, and k on its way into the page; else cos and sin are None.
    """
    token = tl.program_id(0)
    d = tl.arange(0, BD)[None, :]
    position = tl.load(positions_ptr + token)
    cos_from = None if cos_ptr is None else cos_ptr + position.to(tl.int64) * HALF
    sin_from = None if sin_ptr is None else sin_ptr + position.to(tl.int64) * HALF
    if turned_ptr is not None:
        q_head = tl.arange(0, BQ)[:, None]
        q_inside = (q_head < HEADS) & (d < D)
        q_from = q_ptr + token.to(tl.int64) * q_stride + q_head * q_stride_head
        q = _turned(q_from, d, q_inside, cos_from, sin_from, HALF)
        tl.store(turned_ptr + (token.to(tl.int64) * HEADS + q_head) * D + d, q, mask=q_inside)
    row = find_row(offsets_ptr, token, rows, 1, 0)
    if (token < tl.load(offsets_ptr + row + 1)) & (position < tl.load(context_ptr + row)):
        page = tl.load(table_ptr + row.to(tl.int64) * table_stride + position // PAGE).to(tl.int64)
        place = position % PAGE
        head = tl.arange(0, BH)[:, None]
        inside = (head < KV_HEADS) & (d < D)
        k_from = k_ptr + token.to(tl.int64) * k_stride + head * k_stride_head
        v_from = v_ptr + token.to(tl.int64) * v_stride + head * v_stride_head
        if turned_ptr is not None:
            k = _turned(k_from, d, inside, cos_from, sin_from, HALF)
        else:
            k = tl.load(k_from + d, mask=inside, other=0.0)
        v = tl.load(v_from + d, mask=inside, other=0.0)
        k_at = k_pages + page * k_page + place * k_token + head * k_head + d
        v_at = v_pages + page * v_page + place * v_token + head * v_head + d
        if k_scale_ptr is None:
            tl.store(k_at, _held(k, k_pages.dtype.element_ty), mask=inside)
            tl.store(v_at, _held(v, v_pages.dtype.element_ty), mask=inside)
        else:
            s_at = page * s_page + place * s_token + tl.arange(0, BH) * s_head
            there = tl.arange(0, BH) < KV_HEADS
            codes, scale = _quantise(k)
            tl.store(k_at, codes, mask=inside)
            tl.store(k_scale_ptr + s_at, scale, mask=there)
            codes, scale = _quantise(v)
            tl.store(v_at, codes, mask=inside)
            tl.store(v_scale_ptr + s_at, scale, mask=there)


@triton.jit
def _held(x, dtype: tl.constexpr):
    """x as pages of `dtype` hold it. For e4m3 it is cut off at its greatest value and rounded here, ties to even, so
    that every conversion is exact (the interpreter's rounds ties up, and loses carries)."""
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0)
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < LEAST_E4M3, (x + ROUND_E4M3) - ROUND_E4M3, normal)
    return x.to(dtype)


@triton.jit
def _turned(x_ptr, d, inside, cos_ptr, sin_ptr, HALF: tl.constexpr):
    """Heads at x_ptr [heads, 1] + d, rotated: each element meets the one HALF away; those from 2 * HALF on stay."""
    rotated = d < 2 * HALF
    low = d < HALF
    x = tl.load(x_ptr + d, mask=inside, other=0.0)
    other = tl.load(x_ptr + tl.where(low, d + HALF, d - HALF), mask=inside & rotated, other=0.0).to(tl.float32)
    angle = tl.where(low, d, d - HALF)
    cos = tl.load(cos_ptr + angle, mask=rotated, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=rotated, other=0.0)
    wide = x.to(tl.float32)
    return tl.where(rotated, tl.where(low, wide * cos - other * sin, wide * cos + other * sin).to(x.dtype), x)


@triton.jit
def _quantise(x):
    """x [heads, D] -> int8 codes and fp32 scale [heads], as the reference rounds them."""
    x = x.to(tl.float32)
    most = tl.max(tl.abs(x), 1)
    usable = most > 1e-30
    top = tl.full(most.shape, 127.0, tl.float32)
    factor = tl.where(usable, tl.math.div_rn(top, tl.where(usable, most, 1.0)), 0.0)
    scaled = x * factor[:, None]
    return ((scaled + ROUND) - ROUND).to(tl.int8), tl.math.div_rn(most, top)


@triton.jit
def _sweep(
    q, low, last, begin, floor, end, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, limit_ptr,
    k_page, k_token, v_page, v_token, s_page, s_token, scale, softcap,
    D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Queries q [BM, BD], of which each sees keys low .. last [BM], over the keys floor .. end - 1, tiles from `begin`.

    -> (sum of weighted values [BM, BD], greatest score [BM] times log2(e), sum of weights [BM])
    """
    d = tl.arange(0, BD)
    most = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    for first in range(begin, end, BN):
        key = first + tl.arange(0, BN)
        there = (key >= floor) & (key < end)
        page = tl.load(table_ptr + key // PAGE, mask=there, other=0).to(tl.int64)
        place = key % PAGE
        if limit_ptr is not None:
            there = there & (place < tl.load(limit_ptr + key // PAGE, mask=there, other=0))
        k = tl.load(
            k_ptr + (page * k_page + place * k_token)[None, :] + d[:, None],
            mask=there[None, :] & (d < D)[:, None],
            other=0.0,
        )
        s = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if k_scale_ptr is not None:
            s = s * tl.load(k_scale_ptr + page * s_page + place * s_token, mask=there, other=0.0)[None, :]
        if softcap is not None:
            s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0))
        seen = there[None, :] & (key[None, :] >= low[:, None]) & (key[None, :] <= last[:, None])
        s = tl.where(seen, s * LOG2_E, -float("inf"))
        top = tl.maximum(most, tl.max(s, 1))
        base = tl.where(top == -float("inf"), 0.0, top)
        p = tl.exp2(s - base[:, None])
        turn = tl.exp2(most - base)
        total = total * turn + tl.sum(p, 1)
        acc = acc * turn[:, None]
        v = tl.load(
            v_ptr + (page * v_page + place * v_token)[:, None] + d[None, :],
            mask=there[:, None] & (d < D)[None, :],
            other=0.0,
        )
        if v_scale_ptr is not None:
            p = p * tl.load(v_scale_ptr + page * s_page + place * s_token, mask=there, other=0.0)[None, :]
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        most = top
    return acc, most, total


@triton.jit
def _finish(acc, most, total, sinks_ptr, head, inside):
    """Weights become shares; a sink takes its own. A query that sees nothing gets zeros."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=inside, other=0.0) * LOG2_E
        top = tl.maximum(most, sink)
        base = tl.where(top == -float("inf"), 0.0, top)
        turn = tl.exp2(most - base)
        total = total * turn + tl.exp2(sink - base)
        acc = acc * turn[:, None]
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    low = position * 0
    if WINDOW > 0:
        low = tl.maximum(low, position - (WINDOW - 1))
    if CHUNK > 0:
        low = tl.maximum(low, position - position % CHUNK)
    return low


@triton.jit(do_not_specialize=["rows"])
def prefill_kernel(
    q_ptr, out_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, limit_ptr, offsets_ptr, context_ptr, sinks_ptr,
    rows, scale, softcap, q_stride, q_stride_head, table_stride,
    k_page, k_token, k_head, v_page, v_token, v_head, s_page, s_token, s_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CROSS: tl.constexpr, SHORT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """A block of queries of one row, all heads of one KV head; of rows of more than SHORT tokens."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BQ: tl.constexpr = BM // GROUP
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = find_row(offsets_ptr, block, rows, BQ, 1)
    first = tl.load(offsets_ptr + row)
    count = tl.load(offsets_ptr + row + 1) - first
    begun = (block - first // BQ - row) * BQ
    if (count > SHORT) & (begun < count):
        context = tl.load(context_ptr + row)
        m = tl.arange(0, BM)
        index = begun + m // GROUP
        head = kv_head * GROUP + m % GROUP
        inside = (m < BQ * GROUP) & (index < count)
        d = tl.arange(0, BD)
        stored = inside[:, None] & (d < D)[None, :]
        token = (first + index).to(tl.int64)
        q = tl.load(q_ptr + (token * q_stride + head * q_stride_head)[:, None] + d[None, :], mask=stored, other=0.0)
        if UP:
            q = q.to(tl.float32)
        start = context - count
        end = context
        floor = start * 0
        low = index * 0
        last = index * 0 + context
        if not CROSS:
            last = start + index
            low = _first_seen(last, WINDOW, CHUNK)
            floor = _first_seen(start + begun, WINDOW, CHUNK)
            end = tl.minimum(context, start + begun + BQ)
        acc, most, total = _sweep(
            q, low, last, floor // BN * BN, floor, end,
            k_ptr + kv_head * k_head, v_ptr + kv_head * v_head,
            None if k_scale_ptr is None else k_scale_ptr + kv_head * s_head,
            None if v_scale_ptr is None else v_scale_ptr + kv_head * s_head,
            table_ptr + row.to(tl.int64) * table_stride,
            None if limit_ptr is None else limit_ptr + row.to(tl.int64) * table_stride,
            k_page, k_token, v_page, v_token, s_page, s_token, scale, softcap, D, BD, PAGE, BM, BN,
        )  # fmt: skip
        acc = _finish(acc, most, total, sinks_ptr, head, inside)
        at = out_ptr + (token * (HEADS * D) + head * D)[:, None] + d[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["queries"])
def decode_kernel(
    q_ptr, out_ptr, acc_ptr, most_ptr, total_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, limit_ptr,
    offsets_ptr, context_ptr, sinks_ptr, scale, softcap, q_stride, q_stride_head, table_stride,
    k_page, k_token, k_head, v_page, v_token, v_head, s_page, s_token, s_head, queries,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CROSS: tl.constexpr, SHORT: tl.constexpr, SPLIT: tl.constexpr,
    DIRECT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """All queries of a row of at most SHORT tokens over one split of its keys. DIRECT: the only split, so the result.

    Else acc fp32 [rows, kv_heads, splits, queries * group, D], most and total the same without D.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first = tl.load(offsets_ptr + row)
    count = tl.load(offsets_ptr + row + 1) - first
    context = tl.load(context_ptr + row)
    start = context - count
    floor = start * 0
    if not CROSS:
        floor = tl.maximum(_first_seen(start, WINDOW, CHUNK), 0)
    begin = (floor // SPLIT + split) * SPLIT
    end = tl.minimum(context, begin + SPLIT)
    begin = tl.maximum(begin, floor // BN * BN)
    if (count > 0) & (count <= SHORT) & ((begin < end) | DIRECT):
        m = tl.arange(0, BM)
        index = m // GROUP
        head = kv_head * GROUP + m % GROUP
        inside = (m < SHORT * GROUP) & (index < count)
        d = tl.arange(0, BD)
        stored = inside[:, None] & (d < D)[None, :]
        token = (first + index).to(tl.int64)
        q = tl.load(q_ptr + (token * q_stride + head * q_stride_head)[:, None] + d[None, :], mask=stored, other=0.0)
        if UP:
            q = q.to(tl.float32)
        low = index * 0
        last = index * 0 + context
        if not CROSS:
            last = start + index
            low = _first_seen(last, WINDOW, CHUNK)
        acc, most, total = _sweep(
            q, low, last, begin, floor, end,
            k_ptr + kv_head * k_head, v_ptr + kv_head * v_head,
            None if k_scale_ptr is None else k_scale_ptr + kv_head * s_head,
            None if v_scale_ptr is None else v_scale_ptr + kv_head * s_head,
            table_ptr + row.to(tl.int64) * table_stride,
            None if limit_ptr is None else limit_ptr + row.to(tl.int64) * table_stride,
            k_page, k_token, v_page, v_token, s_page, s_token, scale, softcap, D, BD, PAGE, BM, BN,
        )  # fmt: skip
        if DIRECT:
            acc = _finish(acc, most, total, sinks_ptr, head, inside)
            at = out_ptr + (token * (HEADS * D) + head * D)[:, None] + d[None, :]
            tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=stored)
        else:
            part = (row.to(tl.int64) * KV_HEADS + kv_head) * tl.num_programs(2) + split
            at = part * (queries * GROUP) + m
            tl.store(acc_ptr + (at * D)[:, None] + d[None, :], acc, mask=stored)
            tl.store(most_ptr + at, most, mask=inside)
            tl.store(total_ptr + at, total, mask=inside)


@triton.jit(do_not_specialize=["splits", "queries"])
def merge_kernel(
    out_ptr, acc_ptr, most_ptr, total_ptr, offsets_ptr, context_ptr, sinks_ptr, splits, queries,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CROSS: tl.constexpr, SHORT: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """The splits of one row and KV head become one, first to last."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    first = tl.load(offsets_ptr + row)
    count = tl.load(offsets_ptr + row + 1) - first
    if (count > 0) & (count <= SHORT):
        context = tl.load(context_ptr + row)
        floor = context * 0
        if not CROSS:
            floor = tl.maximum(_first_seen(context - count, WINDOW, CHUNK), 0)
        parts = tl.maximum((context + SPLIT - 1) // SPLIT - floor // SPLIT, 0)
        m = tl.arange(0, BM)
        index = m // GROUP
        head = kv_head * GROUP + m % GROUP
        inside = (m < SHORT * GROUP) & (index < count)
        d = tl.arange(0, BD)
        stored = inside[:, None] & (d < D)[None, :]
        base = (row.to(tl.int64) * KV_HEADS + kv_head) * splits
        most = tl.full([BM], -float("inf"), tl.float32)
        for part in range(0, parts):
            at = (base + part) * (queries * GROUP) + m
            most = tl.maximum(most, tl.load(most_ptr + at, mask=inside, other=-float("inf")))
        reference = tl.where(most == -float("inf"), 0.0, most)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BD], tl.float32)
        for part in range(0, parts):
            at = (base + part) * (queries * GROUP) + m
            weight = tl.exp2(tl.load(most_ptr + at, mask=inside, other=-float("inf")) - reference)
            total += weight * tl.load(total_ptr + at, mask=inside, other=0.0)
            acc += weight[:, None] * tl.load(acc_ptr + (at * D)[:, None] + d[None, :], mask=stored, other=0.0)
        acc = _finish(acc, most, total, sinks_ptr, head, inside)
        at = out_ptr + ((first + index).to(tl.int64) * (HEADS * D) + head * D)[:, None] + d[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=stored)
