"""Which row of a ragged batch a program works for.

Owns: the search in row offsets.
Does not know: what rows are.
Invariants: no host value is needed but the number of rows, so that one launch serves any batch of that many rows.
"""

import triton
import triton.language as tl


@triton.jit
def find_row(offsets_ptr, value, rows, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """The last row r < rows with offsets[r] // BLOCK + r * STEP <= value; offsets rise from 0.

    BLOCK 1, STEP 0: the row that token `value` is in. BLOCK b, STEP 1: the row of block `value` where each row owns
    its blocks of b tokens and at most one more.
    """
    low = rows * 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        below = tl.load(offsets_ptr + middle) // BLOCK + middle * STEP <= value
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low
