"""What all launches share.

Owns: whether kernels run in Triton's interpreter, powers of two, small host values on their way to the device.
Does not know: kernels.
Invariants: nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from aengine.kernels.triton.device.search import find_row
from aengine.kernels.uploads import uploaded

# The interpreter multiplies bf16 matrices wrongly, so there (and only there) operands of products are widened first.
INTERPRETED = not isinstance(find_row, triton.runtime.JITFunction)


def widened(dtype: torch.dtype) -> bool:
    return INTERPRETED and dtype is not torch.float32


def power_of_two(value: int, least: int = 1) -> int:
    return max(least, 1 << (value - 1).bit_length())


def on_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host values as a tensor, without waiting for a stream."""
    return uploaded(torch.tensor(values, dtype=dtype), device)


def dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
