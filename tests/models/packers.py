"""Quantised safetensors files made by the definitions of their formats, bit by bit and slowly.

Each packer takes float weights, quantises them by plain rounding, and returns (tensors of the module, the dense fp32
weight those tensors mean). Nothing here uses the package under test.
"""

from __future__ import annotations

import torch
from torch import Tensor

Module = tuple[dict[str, Tensor], Tensor]
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


def words_along(values: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned integers -> int32 words along `dim`; `order[i]`: which of a word's integers goes to field i."""
    per_word = 32 // bits
    values = values.movedim(dim, -1)
    short = -values.shape[-1] % per_word
    values = torch.nn.functional.pad(values.long(), (0, short))
    out = torch.zeros(*values.shape[:-1], values.shape[-1] // per_word, dtype=torch.int64)
    for field in range(per_word):
        which = order[field] if order else field
        out |= values[..., which::per_word] << (field * bits)
    signed = torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)
    return signed.movedim(-1, dim).contiguous()


def affine(weight: Tensor, bits: int, index: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [out, in], zeros [out, groups], fp16 scales [out, groups]); `index`: the group of each input."""
    out, groups, top = weight.shape[0], int(index.max()) + 1, 2**bits - 1
    zeros, scales = torch.zeros(out, groups, dtype=torch.long), torch.zeros(out, groups, dtype=torch.float16)
    for group in range(groups):
        part = weight[:, index == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        reach = 2 * torch.maximum(-low, high) if symmetric else high - low
        scales[:, group] = (reach / top).half().clamp(min=1e-3)
        centre = torch.full((out,), 2 ** (bits - 1)) if symmetric else (-low / scales[:, group].float()).round()
        zeros[:, group] = centre.clamp(1, top).long()
    codes = (weight / scales.float()[:, index] + zeros[:, index]).round().clamp(0, top).long()
    return codes, zeros, scales


def meant(codes: Tensor, zeros: Tensor, scales: Tensor, index: Tensor) -> Tensor:
    """In fp64, then rounded: the exact product."""
    return ((codes - zeros[:, index]).double() * scales.double()[:, index]).float()


def runs(size_in: int, group: int) -> Tensor:
    return torch.arange(size_in) // (size_in if group == -1 else group)


def gptq(
    weight: Tensor, *, bits: int, group: int, version: int = 1, shuffled: bool = False, sym: bool = True
) -> Module:
    index = runs(weight.shape[1], group)
    if shuffled:
        index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(1))]
    codes, zeros, scales = affine(weight, bits, index, symmetric=sym)
    tensors = {
        "qweight": words_along(codes.t(), bits, 0),
        "qzeros": words_along(zeros.t() - (1 if version == 1 else 0), bits, 1),
        "scales": scales.t().contiguous(),
        "g_idx": index.to(torch.int32),
    }
    return tensors, meant(codes, zeros, scales, index)


def awq(weight: Tensor, *, group: int) -> Module:
    index = runs(weight.shape[1], group)
    codes, zeros, scales = affine(weight, 4, index, symmetric=False)
    tensors = {
        "qweight": words_along(codes.t(), 4, 1, AWQ_NIBBLES),
        "qzeros": words_along(zeros.t(), 4, 1, AWQ_NIBBLES),
        "scales": scales.t().contiguous(),
    }
    return tensors, meant(codes, zeros, scales, index)


def pack_quantized(weight: Tensor, *, bits: int, group: int, sym: bool, shuffled: bool = False) -> Module:
    index = runs(weight.shape[1], group)
    if shuffled:
        index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(2))]
    codes, zeros, scales = affine(weight, bits, index, symmetric=sym)
    scales = scales.bfloat16()
    tensors = {
        "weight_packed": words_along(codes, bits, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not sym:
        tensors["weight_zero_point"] = words_along(zeros, bits, 0)
    if shuffled:
        tensors["weight_g_idx"] = index.to(torch.int32)
    return tensors, meant(codes, zeros, scales, index)


def int_quantized(weight: Tensor, *, sym: bool = True) -> Module:
    codes, zeros, scales = affine(weight, 8, runs(weight.shape[1], -1), symmetric=sym)
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    if not sym:
        tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
    return tensors, meant(codes, zeros, scales, runs(weight.shape[1], -1))


def float_quantized(weight: Tensor, *, scales: str, block: int = 16) -> Module:
    """`scales`: "tensor", "channel" or "block"."""
    out, size_in = weight.shape
    if scales == "block":
        shape = (-(-out // block), -(-size_in // block))
        scale = torch.rand(shape) * 0.01 + 0.01
        wide = scale.repeat_interleave(block, 0)[:out].repeat_interleave(block, 1)[:, :size_in]
    else:
        scale = (weight.abs().amax() if scales == "tensor" else weight.abs().amax(1, keepdim=True)) / 448
        wide = scale
    codes = (weight / wide).to(torch.float8_e4m3fn)
    name = "weight_scale_inv" if scales == "block" else "weight_scale"
    return {"weight": codes, name: scale.reshape(1) if scales == "tensor" else scale}, codes.float() * wide
