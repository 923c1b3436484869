"""Weights as the native kernels read them: dense or quantised, in panels of the instruction set.

Owns: `PackedLinear`, the packing of dense and quantised weights, which quantised formats there are.
Does not know: how kernels compute, checkpoints, activations.
Invariants: nothing of the unpacked weight is kept; every value can be had back exactly (`NativeOps.embed`): scale and
minimum become fp16 only where that is exact for the whole part.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.errors import NotSupported
from aengine.kernels.native.library import (
    PACK_ARGS,
    PACK_QUANTISED_ARGS,
    QUANTISED,
    SEGMENT,
    Block,
    Context,
    WeightMemory,
    check,
)
from aengine.kernels.ops import Linear
from aengine.kernels.quantised import Quantised

CODES = {torch.float32: 0, torch.bfloat16: 1}
_F32, _F16, _QUANTISED = 0, 3, 4
_UNIT = 32  # inputs that share a scale of activations
_LINE = 64


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in panels of its instruction set; `block` begins with them, or with the list of quantised segments.

    `bias` fp32 [out] or None; `bias_address` 0 for none. `order` int32 [in]: the input that each column of the panels
    belongs to; None: columns are inputs.
    """

    block: Block
    dtype: int
    in_features: int
    out_features: int
    bias: Tensor | None
    bias_address: int
    order: Tensor | None = None


class Packer:
    """Packs weights for one context into memory of its own."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._memory = WeightMemory(context.library)
        self._pack, self._pack_quantised = context.operation("pack"), context.operation("pack_quantised")

    def pack(self, linear: Linear) -> Linear:
        """The result's `weight` is a meta tensor that keeps only shape and dtype."""
        out_features, in_features = linear.weight.shape
        if linear.parts:
            block, dtype = self._quantised(linear, out_features, in_features), _QUANTISED
        else:
            block, dtype = self._dense(linear.weight)
        bias = None if linear.bias is None else linear.bias.to(torch.float32).contiguous()
        address = 0 if bias is None else bias.data_ptr()
        packed = PackedLinear(block, dtype, in_features, out_features, bias, address, linear.order)
        weight = torch.empty(linear.weight.shape, dtype=linear.weight.dtype, device="meta")  # empty_like imports sympy
        return Linear(weight, linear.bias, packed=packed)

    def _dense(self, weight: Tensor) -> tuple[Block, int]:
        if weight.dtype not in CODES:
            weight = weight.to(torch.float32)
        if weight.stride(-1) != 1:
            weight = weight.contiguous()
        out_features, in_features = weight.shape
        code = CODES[weight.dtype]
        block = self._memory.take(self._context.packed_bytes(code, in_features, out_features))
        args = PACK_ARGS.pack(weight.data_ptr(), code, weight.stride(0), block.address, in_features, out_features)
        check(self._pack(args), "pack")
        return block, code

    def _quantised(self, linear: Linear, out_features: int, in_features: int) -> Block:
        shapes = [part.shape for part in linear.parts]
        if sum(out for out, _ in shapes) != out_features or any(size != in_features for _, size in shapes):
            raise ValueError(f"parts of shapes {shapes} do not make up a weight of {out_features} x {in_features}")
        segments = [_Segment.of(part) for part in linear.parts]
        head = QUANTISED.size + len(segments) * SEGMENT.size
        sizes = [segment.array_bytes(self._context) for segment in segments]
        block = self._memory.take(_lines(head) + sum(_lines(size) for three in sizes for size in three))
        at, first = block.address + _lines(head), block.address + QUANTISED.size
        ctypes.memmove(block.address, QUANTISED.pack(len(segments), first), QUANTISED.size)
        for index, (segment, three) in enumerate(zip(segments, sizes, strict=True)):
            arrays = []
            for size in three:
                arrays.append(at if size else 0)
                at += _lines(size)
            where = first + index * SEGMENT.size
            ctypes.memmove(where, segment.record(arrays), SEGMENT.size)
            check(self._pack_quantised(segment.pack_args(where)), "pack_quantised")
        return block


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part as the kernels take it: whole lines of codes, a group the kernels know, scale and minimum of one type."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None
    group: int
    bits: int

    @staticmethod
    def of(part: Quantised) -> _Segment:
        size_in, group, repeat = part.shape[1], part.group, 1
        if group == size_in:
            group = -(-size_in // _UNIT) * _UNIT
        elif group % _UNIT:
            if group % 16:
                raise NotSupported(
                    f"groups of {group} in rows of {size_in}: native kernels take multiples of 16 or rows"
                )
            group, repeat = 16, group // 16
        values = [part.scale] if part.minimum is None else [part.scale, part.minimum]
        if repeat > 1:
            values = [value.repeat_interleave(repeat, 1) for value in values]
        if all(_fits_half(value) for value in values):
            values = [value.half() for value in values]
        values = [value.contiguous() for value in values]
        codes = part.codes if part.codes.stride(1) == 1 else part.codes.contiguous()
        minimum = values[1] if len(values) == 2 else None
        return _Segment(codes, values[0], minimum, group, 5 if part.fits_five else part.bits)

    @property
    def scale_dtype(self) -> int:
        return _F16 if self.scale.dtype is torch.float16 else _F32

    def array_bytes(self, context: Context) -> tuple[int, int, int]:
        """Of codes, scale, minimum."""
        out_features, in_features = self.codes.shape
        scale = context.scale_bytes(self.bits, self.group, self.scale_dtype, in_features, out_features)
        codes = context.codes_bytes(self.bits, in_features, out_features)
        return codes, scale, 0 if self.minimum is None else scale

    def record(self, arrays: Sequence[int]) -> bytes:
        return SEGMENT.pack(*arrays, self.bits, self.group, self.scale_dtype, self.codes.shape[0])

    def pack_args(self, segment: int) -> bytes:
        minimum = 0 if self.minimum is None else self.minimum.data_ptr()
        stride, in_features = self.codes.stride(0), self.codes.shape[1]
        return PACK_QUANTISED_ARGS.pack(
            self.codes.data_ptr(), self.scale.data_ptr(), minimum, segment, stride, in_features
        )


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _fits_half(value: Tensor) -> bool:
    """Whether all of it is finite and comes back from fp16. What is not finite has a difference of NaN, which `max`
    keeps; `torch.equal` takes twice as long as all of this."""
    return float(value.half().float().sub_(value).abs_().max()) == 0.0
