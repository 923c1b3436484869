"""The short causal convolution over ragged rows, and the state it leaves.

Owns: these kernels.
Does not know: how state pages are allocated.
Invariants: products and sums one by one, oldest tap first: a token's bits depend neither on other rows nor on how its
sequence is cut. States are gathered before any is written. Page 0 stays zero.
"""

import triton
import triton.language as tl

from aengine.kernels.triton.device.search import find_row


@triton.jit
def _input(x_ptr, pages_ptr, page, page_stride, first, index, d, inside, TAPS: tl.constexpr, D: tl.constexpr):
    """A row's input number `index`; negative ones are its state's."""
    own = tl.load(x_ptr + (first + index).to(tl.int64) * D + d, mask=inside & (index >= 0), other=0.0)
    before = index + (TAPS - 1)
    kept = tl.load(pages_ptr + page * page_stride + before * D + d, mask=inside & (index < 0), other=0.0)
    return tl.where(index >= 0, own, kept.to(own.dtype))


@triton.jit(do_not_specialize=["rows"])
def short_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, pages_ptr, table_ptr, offsets_ptr, rows, page_stride,
    TAPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token, BLOCK channels."""
    token = tl.program_id(0)
    row = find_row(offsets_ptr, token, rows, 1, 0)
    first = tl.load(offsets_ptr + row)
    if token < tl.load(offsets_ptr + row + 1):
        d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = d < D
        page = tl.load(table_ptr + 2 * row).to(tl.int64)
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(TAPS):
            index = token - first - (TAPS - 1) + tap
            x = _input(x_ptr, pages_ptr, page, page_stride, first, index, d, inside, TAPS, D).to(tl.float32)
            product = x * tl.load(weight_ptr + tap * D + d, mask=inside, other=0.0)
            total = product if tap == 0 else total + product
        if bias_ptr is not None:
            total += tl.load(bias_ptr + d, mask=inside, other=0.0)
        tl.store(out_ptr + token.to(tl.int64) * D + d, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gather_state_kernel(
    x_ptr, after_ptr, pages_ptr, table_ptr, offsets_ptr, page_stride,
    TAPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last TAPS - 1 inputs of one row -> after [rows, TAPS - 1, D]."""
    row = tl.program_id(0)
    first = tl.load(offsets_ptr + row)
    count = tl.load(offsets_ptr + row + 1) - first
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < D
    page = tl.load(table_ptr + 2 * row).to(tl.int64)
    for place in tl.static_range(TAPS - 1):
        index = count - (TAPS - 1) + place
        x = _input(x_ptr, pages_ptr, page, page_stride, first, index, d, inside, TAPS, D)
        tl.store(after_ptr + (row.to(tl.int64) * (TAPS - 1) + place) * D + d, x, mask=inside)


@triton.jit
def store_state_kernel(after_ptr, pages_ptr, table_ptr, page_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Each row's new state [SIZE] into the page it writes."""
    row = tl.program_id(0)
    page = tl.load(table_ptr + 2 * row + 1).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < SIZE) & (page > 0)
    x = tl.load(after_ptr + row.to(tl.int64) * SIZE + at, mask=inside, other=0.0)
    tl.store(pages_ptr + page * page_stride + at, x.to(pages_ptr.dtype.element_ty), mask=inside)
