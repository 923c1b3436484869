"""Products with quantised weights and activations rounded to integers: the oracle of the integer kernels, in torch.

Owns: how activations are rounded, the exact integer sums and how they become fp32.
Does not know: panels, instruction sets, threads.
Invariants: integer sums are exact (fp64 holds them); each step of fp32 arithmetic is rounded as the kernels round it,
except that a fused multiply-add is one rounding there and two here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.quantised import Quantised

UNIT = 32  # activations that share a scale
# Of units of 16 bits and of rows of 8: magnitudes below count as zero, for the greatest code over them is not finite.
LEAST_WIDE, LEAST_NARROW = 2.0**-110, 2.0**-100
NARROW, WIDE = 127, 32767  # greatest codes of activations of 8 and of 16 bits
SCALES = 32767  # the greatest scale of a unit of 8 bits, in factors of its row
OUT = 3  # a unit of 8 bits has second codes if its scale is more than so many times the mean of its row


@dataclass(frozen=True, slots=True)
class Rounded:
    """codes, second fp64 [T, units, 32], scale fp32 [T, units], factor fp32 [T, 1]: a value is
    factor * scale * (code + second / 256).

    What is not finite makes codes 0 and a scale or factor NaN: every output of its row is NaN.
    """

    codes: Tensor
    second: Tensor
    scale: Tensor
    factor: Tensor


def _units(x: Tensor) -> Tensor:
    return F.pad(x.float(), (0, -x.shape[1] % UNIT)).view(len(x), -1, UNIT)


def _over(top: Tensor, most: int, fits: Tensor) -> tuple[Tensor, Tensor]:
    """(most / top, top / most) where it fits; else zeros, of the latter NaN where top is not finite."""
    least = torch.where(top.isfinite(), 0.0, torch.nan)
    return torch.where(fits, torch.full_like(top, most) / top, 0.0), torch.where(fits, top / most, least)


def _codes(x: Tensor, inverse: Tensor) -> Tensor:
    return torch.round(x * inverse.unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0).double()


def round_wide(x: Tensor) -> Rounded:
    """To 16 bits: a unit's greatest magnitude becomes 32,767."""
    units = _units(x)
    top = units.abs().amax(-1)
    inverse, scale = _over(top, WIDE, top.isfinite() & (top >= LEAST_WIDE))
    codes = _codes(units, inverse)
    return Rounded(codes, torch.zeros_like(codes), scale, torch.ones(len(x), 1))


def round_narrow(x: Tensor) -> Rounded:
    """To 8 bits: a unit's greatest magnitude becomes 127 or the next that an integer scale allows. Where its scale
    stands out, what this left over is rounded to 8 bits again."""
    units = _units(x)
    top = units.abs().amax((1, 2)).unsqueeze(-1)
    fits = top.isfinite() & (top >= LEAST_NARROW)
    inverse, factor = _over(top, NARROW * SCALES, fits)
    exact = units.abs().amax(-1) * _over(top, SCALES, fits)[0]
    scale = exact.ceil().clamp(max=SCALES).nan_to_num(0.0)
    inverse = torch.where(scale > 0, inverse / scale, 0.0)
    codes = torch.where(top.unsqueeze(-1).isfinite(), _codes(units, inverse), 0.0)
    left = (units * inverse.unsqueeze(-1) - codes.float()) * 256
    stands_out = scale * scale.shape[1] > OUT * scale.sum(1, keepdim=True)
    second = torch.where(stands_out.unsqueeze(-1), torch.round(left).clamp(-NARROW, NARROW).double(), 0.0)
    return Rounded(codes, second, scale, factor)


def linear_quantised(x: Tensor, parts: Sequence[Quantised], bias: Tensor | None = None) -> Tensor:
    """x [T, in] by the weight that `parts` make up -> fp32 [T, out].

    Activations have 16 bits before codes of 8 bits, 8 bits before those of 4 and 5; of the latter, units whose scale
    stands out in their row have second codes.
    """
    if parts[0].order is not None:
        x = x.index_select(1, parts[0].order)
    wide = [part.bits == 8 and not part.fits_five for part in parts]
    rounded = {of: round_wide(x) if of else round_narrow(x) for of in set(wide)}
    y = torch.cat([_part(rounded[of], part) for of, part in zip(wide, parts, strict=True)], -1)
    return y if bias is None else y + bias.float()


def _part(rounded: Rounded, part: Quantised) -> Tensor:
    """y = factor * sum over spans, rising, of scale_x * (scale_w * dot) + minimum * (scale_x * sum of x codes)."""
    scale_x = rounded.scale
    out, size_in = part.shape
    span = UNIT if part.group == size_in or part.group % UNIT == 0 else 16  # inputs summed as integers
    per_unit, spans = UNIT // span, scale_x.shape[1] * (UNIT // span)
    x, second = (codes.reshape(len(codes), spans, span) for codes in (rounded.codes, rounded.second))
    w = F.pad(part.codes.double(), (0, spans * span - size_in)).view(out, spans, span)
    y = torch.zeros((len(x), out))
    for index in range(spans):
        group = min(index * span // part.group, part.scale.shape[1] - 1)
        sx = scale_x[:, index // per_unit].unsqueeze(-1)
        for codes, of in ((x[:, index], 1.0), (second[:, index], 1 / 256)):
            dot = (codes @ w[:, index].T).float()
            y = y + sx * (part.scale[:, group] * of * dot)
            if part.minimum is not None:
                y = y + part.minimum[:, group] * (sx * of * codes.sum(-1, keepdim=True).float())
    return y * rounded.factor
