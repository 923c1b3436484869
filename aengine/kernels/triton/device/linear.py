"""Products with weights of 4 or 8 bits, or dense ones of many experts.

Owns: the kernel, the meaning of a packed weight's bytes.
Does not know: checkpoints, how weights were packed.
Invariants: codes become values of the activations' type in registers, products are summed in fp32 in steps of BK
inputs. A weight of four bits keeps inputs 32 u + r and 32 u + 16 + r (r < 16) in octet 16 u + r, the first in the low
half, so that both halves are contiguous runs of x.
"""

import triton
import triton.language as tl

from aengine.kernels.triton.device.search import find_row


@triton.jit
def _values(codes, scale_ptr, minimum_ptr, group, n, stride, inside, dtype: tl.constexpr):
    """Integer codes [k, n] of inputs in group `group` [k] or [1] -> values."""
    at = group.to(tl.int64)[:, None] * stride + n[None, :]
    value = codes.to(tl.float32) * tl.load(scale_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if minimum_ptr is not None:
        value += tl.load(minimum_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return value.to(dtype)


@triton.jit
def _inputs(x_ptr, row, k, there, K: tl.constexpr, dtype: tl.constexpr):
    return tl.load(x_ptr + row[:, None] + k[None, :], mask=there[:, None] & (k < K)[None, :], other=0.0).to(dtype)


@triton.jit
def _multiply(
    x_ptr, row, there, weight_ptr, scale_ptr, minimum_ptr, n, outputs, stride,
    K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Rows of x at offsets row [BM] by outputs n [BN] of one weight -> fp32 [BM, BN]."""
    acc = tl.zeros([BM, BN], tl.float32)
    inside = (n < outputs)[None, :]
    for first in range(0, K, BK):
        if BITS == 4:
            half = tl.arange(0, BK // 2)
            k = first + half // 16 * 32 + half % 16
            at = (first // 2 + half).to(tl.int64)[:, None] * stride + n[None, :]
            octets = tl.load(weight_ptr + at, mask=inside & (k < K)[:, None], other=0)
            group = (first + tl.arange(0, 1)) // GROUP
            w = _values(octets & 15, scale_ptr, minimum_ptr, group, n, stride, inside, dtype)
            acc = tl.dot(_inputs(x_ptr, row, k, there, K, dtype), w, acc, input_precision="ieee")
            group = tl.minimum(first + 16 + tl.arange(0, 1), K - 1) // GROUP
            w = _values(octets >> 4, scale_ptr, minimum_ptr, group, n, stride, inside, dtype)
            acc = tl.dot(_inputs(x_ptr, row, k + 16, there, K, dtype), w, acc, input_precision="ieee")
        else:
            k = first + tl.arange(0, BK)
            if BITS == 8:
                at = k.to(tl.int64)[:, None] * stride + n[None, :]
                codes = tl.load(weight_ptr + at, mask=inside & (k < K)[:, None], other=0)
                group = (first + tl.arange(0, 1)) // GROUP
                w = _values(codes, scale_ptr, minimum_ptr, group, n, stride, inside, dtype)
            else:
                at = n.to(tl.int64)[None, :] * K + k[:, None]
                w = tl.load(weight_ptr + at, mask=inside & (k < K)[:, None], other=0.0).to(dtype)
            acc = tl.dot(_inputs(x_ptr, row, k, there, K, dtype), w, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rows"])
def packed_linear_kernel(
    x_ptr, codes_ptr, scale_ptr, minimum_ptr, bias_ptr, y_ptr, rows, outputs, x_stride, y_stride, stride,
    K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    UP: tl.constexpr,
):  # fmt: skip
    """x [rows, K] by one part of a weight: y [rows, outputs], BM x BN of it."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    dtype: tl.constexpr = tl.float32 if UP else x_ptr.dtype.element_ty
    acc = _multiply(
        x_ptr, m.to(tl.int64) * x_stride, m < rows, codes_ptr, scale_ptr, minimum_ptr, n, outputs, stride,
        K, GROUP, BITS, BM, BN, BK, dtype,
    )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    at = y_ptr + m.to(tl.int64)[:, None] * y_stride + n[None, :]
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < outputs)[None, :])


@triton.jit
def grouped_linear_kernel(
    x_ptr, codes_ptrs, scale_ptrs, minimum_ptrs, bias_ptrs, y_ptr, offsets_ptr, outputs, stride,
    EXPERTS: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, WIDE_SCALE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """x [rows, K], sorted by expert, expert e from offsets[e] on; each row by its expert's weight. Addresses int64."""
    block = tl.program_id(0)
    expert = find_row(offsets_ptr, block, EXPERTS, BM, 1)
    first = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    begun = first + (block - first // BM - expert) * BM
    if begun < end:
        element: tl.constexpr = x_ptr.dtype.element_ty
        stored: tl.constexpr = element if BITS == 16 else (tl.uint8 if BITS == 4 else tl.int8)
        scaled: tl.constexpr = tl.float32 if WIDE_SCALE else tl.float16
        dtype: tl.constexpr = tl.float32 if UP else element
        m = begun + tl.arange(0, BM)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        acc = _multiply(
            x_ptr, m.to(tl.int64) * K, m < end,
            tl.multiple_of(tl.load(codes_ptrs + expert).to(tl.pointer_type(stored)), 16),
            None if BITS == 16 else tl.multiple_of(tl.load(scale_ptrs + expert).to(tl.pointer_type(scaled)), 16),
            None if minimum_ptrs is None
            else tl.multiple_of(tl.load(minimum_ptrs + expert).to(tl.pointer_type(scaled)), 16),
            n, outputs, stride, K, GROUP, BITS, BM, BN, BK, dtype,
        )  # fmt: skip
        if bias_ptrs is not None:
            bias = tl.load(bias_ptrs + expert).to(tl.pointer_type(tl.float32))
            acc += tl.load(bias + n, mask=n < outputs, other=0.0)[None, :]
        at = y_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
        tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=(m < end)[:, None] & (n < outputs)[None, :])
