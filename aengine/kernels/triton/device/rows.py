"""Norms, rotations, gates and embeddings: one program for a row or a piece of one.

Owns: these kernels.
Does not know: models, strides' reasons.
Invariants: fp32 inside, rounded once to the output's type; a row's sum has one order whatever the number of rows.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["inner"])
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, eps, inner, stride, stride_inner,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row r of x stands at (r // inner) * stride + (r % inner) * stride_inner; residual, out and total are dense."""
    row = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    inside = d < D
    x_at = x_ptr + (row // inner).to(tl.int64) * stride + (row % inner) * stride_inner + d
    at = row.to(tl.int64) * D + d
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rope_kernel(
    x_ptr, out_ptr, positions_ptr, cos_ptr, sin_ptr, stride, stride_head,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, BHALF: tl.constexpr,
    BREST: tl.constexpr,
):  # fmt: skip
    """One token, all heads; elements from 2 * HALF on are copied."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    head = tl.arange(0, BH)[:, None]
    h = tl.arange(0, BHALF)[None, :]
    inside = (head < HEADS) & (h < HALF)
    cos = tl.load(cos_ptr + position * HALF + h, mask=h < HALF, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + h, mask=h < HALF, other=0.0)
    x_at = x_ptr + token * stride + head * stride_head
    at = out_ptr + (token * HEADS + head) * D
    low = tl.load(x_at + h, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x_at + HALF + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(at + h, (low * cos - high * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(at + HALF + h, (high * cos + low * sin).to(out_ptr.dtype.element_ty), mask=inside)
    if BREST > 0:
        rest = 2 * HALF + tl.arange(0, BREST)[None, :]
        inside = (head < HEADS) & (rest < D)
        tl.store(at + rest, tl.load(x_at + rest, mask=inside), mask=inside)


@triton.jit
def glu_kernel(x_ptr, out_ptr, features, stride, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """x [T, 2F]: an activation of the first half times the second."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < features
    gate = tl.load(x_ptr + token * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride + features + at, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + token * features + at, (gate * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def relay_ids_kernel(ids_ptr, sources_ptr, relay_ptr, out_ptr, unusable_ptr, tokens, vocab, BLOCK: tl.constexpr):
    """sources[t] >= 0: the slot whose last sampled token is the id. Ids outside the vocabulary become 0, unusable."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tokens
    source = tl.load(sources_ptr + at, mask=inside, other=-1)
    given = tl.load(ids_ptr + at, mask=inside, other=0)
    token = tl.where(source >= 0, tl.load(relay_ptr + source, mask=inside & (source >= 0), other=0), given)
    unusable = (token < 0) | (token >= vocab)
    tl.store(out_ptr + at, tl.where(unusable, 0, token), mask=inside)
    tl.store(unusable_ptr + at, unusable, mask=inside)


@triton.jit(do_not_specialize=["first", "rows"])
def embed_packed_kernel(
    ids_ptr, codes_ptr, scale_ptr, minimum_ptr, out_ptr, first, rows, stride,
    D: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tokens whose ids are first .. first + rows - 1: a column of the packed weight each."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + token) - first
    if (row >= 0) & (row < rows):
        d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = d < D
        if BITS == 4:
            octet = tl.load(codes_ptr + (d // 32 * 16 + d % 16).to(tl.int64) * stride + row, mask=inside, other=0)
            code = tl.where(d % 32 < 16, octet & 15, octet >> 4).to(tl.float32)
        else:
            code = tl.load(codes_ptr + d.to(tl.int64) * stride + row, mask=inside, other=0).to(tl.float32)
        group = (d // GROUP).to(tl.int64) * stride + row
        value = code * tl.load(scale_ptr + group, mask=inside, other=0.0).to(tl.float32)
        if minimum_ptr is not None:
            value += tl.load(minimum_ptr + group, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * D + d, value.to(out_ptr.dtype.element_ty), mask=inside)
