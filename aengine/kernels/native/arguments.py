"""Tensors as native kernels are told of them: type codes, dense forms, the arguments of a linear.

Owns: which dtypes there are and their codes; the layouts that kernels ask for.
Does not know: what kernels do, who calls them.
Invariants: a tensor that has the form asked for is returned as it is; a dtype without a code is refused by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.errors import NotSupported
from aengine.kernels.native.library import LINEAR_ARGS
from aengine.kernels.native.packed import CODES, PackedLinear
from aengine.kernels.ops import LayerKV, Linear

_INT8_KV = 2


def code_of(dtype: torch.dtype) -> int:
    try:
        return CODES[dtype]
    except KeyError:
        raise NotSupported(f"native kernels take float32 or bfloat16 tensors, not {dtype}") from None


def code(tensor: Tensor) -> int:
    return code_of(tensor.dtype)


def kv_code(kv: LayerKV) -> int:
    if kv.k.dtype is not torch.int8:
        return code(kv.k)
    if kv.k_scale is None or kv.v_scale is None or kv.k_scale.stride() != kv.v_scale.stride():
        raise ValueError("int8 pages need k_scale and v_scale of equal strides")
    return _INT8_KV


def dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def dense_int32(x: Tensor) -> Tensor:
    return x if x.dtype is torch.int32 and x.is_contiguous() else x.to(torch.int32).contiguous()


def packed_linear(w: Linear) -> PackedLinear:
    if not isinstance(w.packed, PackedLinear):
        raise TypeError("this weight was not prepared by NativeOps.prepare")
    return w.packed


def linear_args(
    w: Linear, x: int, x_dtype: torch.dtype, x_stride: int, y: int, y_dtype: torch.dtype, rows: int
) -> bytes:
    """Packed arguments of `ae_linear`: x, y are addresses; y's rows are dense."""
    packed = packed_linear(w)
    return LINEAR_ARGS.pack(
        x,
        code_of(x_dtype),
        x_stride,
        packed.block.address,
        packed.dtype,
        packed.bias_address,
        y,
        code_of(y_dtype),
        packed.out_features,
        rows,
        packed.in_features,
        packed.out_features,
    )
