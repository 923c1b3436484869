"""GGML's integer block formats taken apart into codes, scales and minima, without loss.

Owns: which formats have a `Quantised` form, and how their bits become it.
Does not know: files, tensor names, fp32 values of weights (see quants).
Invariants: `Quantised.dequantise()` of the result equals `quants.dequantise` of the same bytes for every finite scale:
each product of a code and a scale is exact in fp32, or rounded once as in the format's own formula. No fp32 copy of
the codes is ever made: beyond the result, a few MiB are in use whatever the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.quantised import Quantised
from aengine.models.ggml_types import GgmlType
from aengine.models.quants import CHUNK_ELEMENTS, halves, k_scales_and_minima, q3_k_scales
from aengine.models.spread import spread

Unpack = Callable[[str, Tensor, Tensor, Tensor, Tensor | None], None]
"""(format, blocks, codes, scale, minimum): a backend's own way to do what a form's `fill` does, to the same bits."""
_Fill = Callable[[Tensor, Tensor, Tensor, Tensor | None], None]


@dataclass(frozen=True, slots=True)
class _Form:
    """`fill(blocks, codes, scale, minimum)` writes uint8 blocks [B, bytes] into codes [B, elements] (uint8: int8 codes
    as two's complement), scale and minimum fp32 [B, elements / group]."""

    group: int
    bits: int
    has_minimum: bool
    fill: _Fill


def quantised(raw: Tensor, kind: GgmlType, shape: tuple[int, ...], unpack: Unpack | None = None) -> Quantised | None:
    """raw uint8 [bytes] of a matrix `shape` [out, in]; None when the format keeps plain numbers. `unpack`: in place of
    plain torch."""
    form = _FORMS.get(kind.name)
    if form is None or len(shape) != 2:
        return None
    out, size_in = shape
    blocks = raw.view(-1, kind.block_bytes)
    count, groups = blocks.shape[0], kind.block_elements // form.group
    codes = torch.empty((count, kind.block_elements), dtype=torch.uint8)
    scale = torch.empty((count, groups), dtype=torch.float32)
    minimum = torch.empty((count, groups), dtype=torch.float32) if form.has_minimum else None

    def fill(part: slice) -> None:
        form.fill(blocks[part], codes[part], scale[part], None if minimum is None else minimum[part])

    if unpack is not None:
        unpack(kind.name, blocks, codes, scale, minimum)
    else:
        spread(count, CHUNK_ELEMENTS // kind.block_elements, fill)
    whole = codes.view(out, size_in)
    return Quantised(
        codes=whole if form.bits == 4 else whole.view(torch.int8),
        scale=scale.view(out, -1),
        minimum=None if minimum is None else minimum.view(out, -1),
        group=form.group,
        bits=form.bits,
    )


def _nibbles(packed: Tensor, codes: Tensor) -> None:
    """packed [..., n] -> codes [..., 2n]: all low nibbles, then all high ones."""
    n = packed.shape[-1]
    torch.bitwise_and(packed, 15, out=codes[..., :n])
    torch.bitwise_right_shift(packed, 4, out=codes[..., n:])


def _fifth_bits(blocks: Tensor, codes: Tensor) -> None:
    """Put 32 bits [B, 4 bytes], least significant first, above the nibbles in codes [B, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (blocks.unsqueeze(-1) >> shifts).bitwise_and_(1).bitwise_left_shift_(4)
    codes.view(-1, 4, 8).bitwise_or_(bits)


def _q4_0(blocks: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None) -> None:
    assert minimum is not None
    _nibbles(blocks[:, 2:], codes)
    scale.copy_(halves(blocks, 0))
    torch.mul(scale, -8.0, out=minimum)


def _q4_1(blocks: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None) -> None:
    assert minimum is not None
    _nibbles(blocks[:, 4:], codes)
    scale.copy_(halves(blocks, 0))
    minimum.copy_(halves(blocks, 2))


def _q5_0(blocks: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None) -> None:
    _nibbles(blocks[:, 6:], codes)
    _fifth_bits(blocks[:, 2:6], codes)
    codes.sub_(16)
    scale.copy_(halves(blocks, 0))


def _q5_1(blocks: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None) -> None:
    assert minimum is not None
    _nibbles(blocks[:, 8:], codes)
    _fifth_bits(blocks[:, 4:8], codes)
    scale.copy_(halves(blocks, 0))
    minimum.copy_(halves(blocks, 2))


def _q8_0(blocks: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None) -> None:
    codes.copy_(blocks[:, 2:])
    scale.copy_(halves(blocks, 0))


def _k_scales(blocks: Tensor, scale: Tensor, minimum: Tensor | None) -> None:
    assert minimum is not None
    scales, minima = k_scales_and_minima(blocks)
    scale.copy_(scales)
    torch.neg(minima, out=minimum)


def _q2_k(blocks: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None) -> None:
    assert minimum is not None
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    codes.view(-1, 2, 4, 32).copy_(blocks[:, 16:80].view(-1, 2, 1, 32) >> shifts).bitwise_and_(3)
    torch.mul(halves(blocks, 80), (blocks[:, :16] & 15).float(), out=scale)
    torch.mul(-halves(blocks, 82), (blocks[:, :16] >> 4).float(), out=minimum)


def _q3_k(blocks: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None) -> None:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    codes.view(-1, 2, 4, 32).copy_(blocks[:, 32:96].view(-1, 2, 1, 32) >> shifts).bitwise_and_(3)
    third = (blocks[:, :32].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(8, 1)).bitwise_and_(1)
    codes.view(-1, 8, 32).add_(third.bitwise_left_shift_(2)).sub_(4)
    scale.copy_(q3_k_scales(blocks))


def _q4_k(blocks: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None) -> None:
    _nibbles(blocks[:, 16:].view(-1, 4, 32), codes.view(-1, 4, 64))
    _k_scales(blocks, scale, minimum)


def _q5_k(blocks: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None) -> None:
    _nibbles(blocks[:, 48:].view(-1, 4, 32), codes.view(-1, 4, 64))
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    fifth = (blocks[:, 16:48].unsqueeze(1) >> shifts).bitwise_and_(1).bitwise_left_shift_(4)
    codes.view(-1, 8, 32).bitwise_or_(fifth)
    _k_scales(blocks, scale, minimum)


def _q6_k(blocks: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None) -> None:
    _nibbles(blocks[:, :128].view(-1, 2, 64), codes.view(-1, 2, 128))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts).bitwise_and_(3).bitwise_left_shift_(4)
    codes.view(-1, 2, 4, 32).bitwise_or_(high)
    codes.sub_(32)
    torch.mul(halves(blocks, 208), blocks[:, 192:208].contiguous().view(torch.int8).float(), out=scale)


_FORMS: Mapping[str, _Form] = {
    "Q4_0": _Form(32, 4, True, _q4_0),
    "Q4_1": _Form(32, 4, True, _q4_1),
    "Q5_0": _Form(32, 8, False, _q5_0),
    "Q5_1": _Form(32, 8, True, _q5_1),
    "Q8_0": _Form(32, 8, False, _q8_0),
    "Q2_K": _Form(16, 8, True, _q2_k),
    "Q3_K": _Form(16, 8, False, _q3_k),
    "Q4_K": _Form(32, 4, True, _q4_k),
    "Q5_K": _Form(32, 8, True, _q5_k),
    "Q6_K": _Form(16, 8, False, _q6_k),
}
