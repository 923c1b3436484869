"""Weights of 4 and 8 bits as the kernels read them, and the linears over them.

Owns: the layout on the device, which quantised weights have it, block shapes.
Does not know: checkpoints, models.
Invariants: every value comes back exactly (`embed`): scale and minimum become fp16 only where that is exact for the
whole part. Outputs are the fastest dimension, padded to 16, so that loads are aligned.

    codes    4 bits  uint8 [in padded to 32, / 2; out]   octet 16 u + r: input 32 u + r low, 32 u + 16 + r high
             8 bits  int8  [in, out]
    scale, minimum   fp16 or fp32 [in / group, out]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.quantised import Quantised
from aengine.kernels.triton.device.linear import packed_linear_kernel
from aengine.kernels.triton.device.rows import embed_packed_kernel
from aengine.kernels.triton.launch import dense_last, power_of_two, widened

_ALIGN = 16
_UNIT = 32  # inputs of 4 bits that share 16 octets
_EMBED_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Some rows of a weight [out, in]; tensors as the module says, `out` of them padded to `stride`."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None
    group: int
    bits: int
    out_features: int
    in_features: int

    @property
    def stride(self) -> int:
        return int(self.codes.shape[1])

    @property
    def step(self) -> int:
        """Inputs multiplied at a time: as many as 16 runs of inputs, each of one group, may be."""
        if self.group == self.in_features or self.group % 64 == 0:
            return 64
        return 32 if self.bits == 4 or self.group % 32 == 0 else 16


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight of packed parts, first rows first; bias fp32 [out] or None. `order` int32 [in]: the input that each
    column of the parts belongs to; None: columns are inputs."""

    parts: tuple[PackedPart, ...]
    bias: Tensor | None
    order: Tensor | None = None


def packable(parts: Sequence[Quantised]) -> bool:
    """Whether runs of 16 inputs never cross a group."""
    return all(part.group % 16 == 0 or part.group == part.shape[1] for part in parts)


def pack(parts: Sequence[Quantised], bias: Tensor | None, device: torch.device) -> PackedWeight:
    held = tuple(_pack_part(part, device) for part in _joined(parts))
    order = None if parts[0].order is None else parts[0].order.to(device)
    return PackedWeight(held, None if bias is None else bias.to(device, torch.float32).contiguous(), order)


def _joined(parts: Sequence[Quantised]) -> list[Quantised]:
    """Neighbours of one format as one part: one launch instead of several."""
    runs: list[list[Quantised]] = []
    for part in parts:
        if runs and _format(runs[-1][0]) == _format(part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [run[0] if len(run) == 1 else _concatenated(run) for run in runs]


def _format(part: Quantised) -> tuple[int, int, bool]:
    return part.bits, part.group, part.minimum is None


def _concatenated(run: Sequence[Quantised]) -> Quantised:
    minima = [part.minimum for part in run if part.minimum is not None]
    codes, scale = torch.cat([part.codes for part in run]), torch.cat([part.scale for part in run])
    return Quantised(codes, scale, torch.cat(minima) if minima else None, run[0].group, run[0].bits)


def _pack_part(part: Quantised, device: torch.device) -> PackedPart:
    out, size_in = part.shape
    codes = part.codes.to(device)
    if part.bits == 4:
        units = F.pad(codes, (0, -size_in % _UNIT)).view(out, -1, 2, _UNIT // 2)
        codes = (units[:, :, 0] | units[:, :, 1] << 4).flatten(1)
    exact = all(_is_half(value) for value in (part.scale, part.minimum) if value is not None)
    kind = torch.float16 if exact else torch.float32
    minimum = None if part.minimum is None else _columns(part.minimum.to(device, kind))
    return PackedPart(
        _columns(codes), _columns(part.scale.to(device, kind)), minimum, part.group, part.bits, out, size_in
    )


def _is_half(value: Tensor) -> bool:
    return torch.equal(value.half().float(), value)


def _columns(x: Tensor) -> Tensor:
    """[out, n] -> [n, out padded]."""
    return F.pad(x.t(), (0, -len(x) % _ALIGN)).contiguous()


def linear(x: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """x [T, in] -> [T, out] of `dtype`. The number of rows chooses the block, so bits may depend on it."""
    x = dense_last(x) if weight.order is None else x.index_select(1, weight.order)
    rows, outputs = len(x), sum(part.out_features for part in weight.parts)
    y = x.new_empty((rows, outputs), dtype=dtype)
    first = 0
    for part in weight.parts if rows else ():
        if x.shape[1] != part.in_features:
            raise ValueError(f"x has {x.shape[1]} features, the weight takes {part.in_features}")
        block_m, block_n, warps = block_of(rows, part.out_features)
        grid = (-(-rows // block_m), -(-part.out_features // block_n))
        packed_linear_kernel[grid](
            x, part.codes, part.scale, part.minimum, None if weight.bias is None else weight.bias[first:],
            y[:, first:], rows, part.out_features, x.stride(0), outputs, part.stride,
            K=part.in_features, GROUP=part.group, BITS=part.bits, BM=block_m, BN=block_n, BK=part.step,
            UP=widened(x.dtype), num_warps=warps, num_stages=3,
        )  # fmt: skip
        first += part.out_features
    return y


def block_of(rows: int, outputs: int) -> tuple[int, int, int]:
    """(rows, outputs, warps) of one program. Few rows: narrow blocks, so that every core reads weights."""
    if rows <= 16:
        return 16, 32 if outputs < 8192 else 64, 4
    return (32, 64, 4) if rows <= 32 else (64, 128, 8)


def embed(weight: PackedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """ids int32 [T], all within the weight -> its rows [T, in], exact but for one rounding to `dtype`."""
    size_in = weight.parts[0].in_features
    out = torch.empty((len(ids), size_in), dtype=dtype, device=weight.parts[0].codes.device)
    block = min(power_of_two(size_in), _EMBED_BLOCK)
    first = 0
    for part in weight.parts if len(ids) else ():
        embed_packed_kernel[(len(ids), -(-size_in // block))](
            ids, part.codes, part.scale, part.minimum, out, first, part.out_features, part.stride,
            D=size_in, GROUP=part.group, BITS=part.bits, BLOCK=block, enable_fp_fusion=False,
        )  # fmt: skip
        first += part.out_features
    return out
