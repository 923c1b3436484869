"""Dequantisation of GGML block formats to fp32.

Owns: the blocks' arithmetic.
Does not know: files, tensor names, models; `ggml_types` lists the formats.
Invariants: exact: each result is the fp32 value of the format's own formula, bit for bit as ggml's reference computes
it. Vectorised in torch over [blocks, bytes], a chunk at a time: temporary memory is a few MiB whatever the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from aengine.models.ggml_types import GgmlType
from aengine.models.spread import spread

CHUNK_ELEMENTS = 1 << 18  # decoded at a time: 1 MiB of fp32 stays in the second-level cache

Dequantise = Callable[[Tensor], Tensor]  # uint8 [B, block_bytes] -> fp32 [B, block_elements]


def dequantise(raw: Tensor, kind: GgmlType, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """raw uint8 [bytes] of whole blocks -> a new tensor of `shape`, rounded once to `dtype`."""
    blocks = raw.view(-1, kind.block_bytes)
    out = torch.empty((blocks.shape[0], kind.block_elements), dtype=dtype)
    decode = _DECODERS[kind.name]

    def fill(part: slice) -> None:
        out[part] = decode(blocks[part])

    spread(blocks.shape[0], max(1, CHUNK_ELEMENTS // kind.block_elements), fill)
    return out.view(shape)


def halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """`count` fp16 values at byte `start` of each block -> fp32 [B, count]."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> uint8 [..., 2n]: all low nibbles, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _nibbles_f32(packed: Tensor) -> Tensor:
    """As `_nibbles`, fp32, without an intermediate: the formats without further bits need no integer result."""
    n = packed.shape[-1]
    out = torch.empty((*packed.shape[:-1], 2 * n), dtype=torch.float32)
    out[..., :n] = packed & 15
    out[..., n:] = packed >> 4
    return out


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """32 bits at byte `start`, least significant first -> uint8 [B, 32] of 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (blocks[:, start : start + 4].unsqueeze(-1) >> shifts) & 1
    return bits.flatten(1) << 4


def _f32(blocks: Tensor) -> Tensor:
    return blocks.clone().view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float16).float()


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.bfloat16).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles_f32(blocks[:, 2:]).sub_(8).mul_(halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles_f32(blocks[:, 4:]).mul_(halves(blocks, 0)).add_(halves(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return q.float().sub_(16).mul_(halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return q.float().mul_(halves(blocks, 0)).add_(halves(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(halves(blocks, 0))


def k_scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The K formats' 8 scales and 8 minima of 6 bits in bytes 4 .. 15 -> two fp32 [B, 8], already multiplied."""
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1)
    minima = torch.cat((mid & 63, (high >> 4) | ((mid >> 2) & 48)), dim=1)
    return halves(blocks, 0) * scales.float(), halves(blocks, 2) * minima.float()


def q3_k_scales(blocks: Tensor) -> Tensor:
    """Q3_K's 16 scales of 6 bits in bytes 96 .. 107 -> fp32 [B, 16], already multiplied."""
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    upper = ((high.unsqueeze(1) >> shifts) & 3).flatten(1) << 4
    scales = torch.cat((low & 15, low >> 4), dim=1) | upper
    return halves(blocks, 108) * scales.float().sub_(32)


def _q2_k(blocks: Tensor) -> Tensor:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    q = (blocks[:, 16:80].view(-1, 2, 1, 32) >> shifts) & 3
    scale, minimum = (
        halves(blocks, 80) * (blocks[:, :16] & 15).float(),
        halves(blocks, 82) * (blocks[:, :16] >> 4).float(),
    )
    return q.view(-1, 16, 16).float().mul_(scale.unsqueeze(-1)).sub_(minimum.unsqueeze(-1)).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    low = ((blocks[:, 32:96].view(-1, 2, 1, 32) >> shifts) & 3).view(-1, 8, 32)
    third = (blocks[:, :32].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(8, 1)) & 1
    q = (low | (third << 2)).view(-1, 16, 16).float().sub_(4)
    return q.mul_(q3_k_scales(blocks).unsqueeze(-1)).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    scale, minimum = (value.unsqueeze(-1) for value in k_scales_and_minima(blocks))
    q = _nibbles_f32(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return q.mul_(scale).sub_(minimum).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, minimum = (value.unsqueeze(-1) for value in k_scales_and_minima(blocks))
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    fifth = ((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4
    q = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) | fifth
    return q.float().mul_(scale).sub_(minimum).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64))  # [B, 2, 128]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts) & 3  # [B, 2, 4, 32]
    q = low | (high.flatten(2) << 4)
    scale = halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()  # [B, 16]
    return q.view(-1, 16, 16).float().sub_(32).mul_(scale.unsqueeze(-1)).flatten(1)


_DECODERS: Mapping[str, Dequantise] = {
    "F32": _f32,
    "F16": _f16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "BF16": _bf16,
}
