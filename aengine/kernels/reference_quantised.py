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
LEAST = 2.0**-100  # a row whose magnitudes are below counts as zero, for the greatest code over them is not finite
NARROW, WIDE = 127, 32767  # greatest codes of activations of 8 and of 16 bits
SCALES = 32767  # the greatest scale of a unit of 8 bits, in factors of its row
WHOLE_INPUTS = 8192  # the most of which one integer is the sum where they share a scale
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


def whole(part: Quantised) -> bool:
    """Whether an output's sum is one integer."""
    size_in = part.shape[1]
    return part.bits == 8 and part.group == size_in <= WHOLE_INPUTS and not part.fits_five


def most_wide(parts: Sequence[Quantised]) -> int:
    """The greatest code of 16 bits before a weight of `parts`: 128 times it, summed over all inputs, fits 32 bits."""
    if not any(whole(part) for part in parts):
        return WIDE
    inputs = -(-parts[0].shape[1] // UNIT) * UNIT
    return min(WIDE, (2**31 - 1) // (128 * inputs))


def round_wide(x: Tensor, most: int = WIDE) -> Rounded:
    """To 16 bits: a row's greatest magnitude becomes `most`."""
    units = _units(x)
    top = units.abs().amax((1, 2)).unsqueeze(-1)
    inverse, factor = _over(top, most, top.isfinite() & (top >= LEAST))
    codes = _codes(units, inverse)
    codes = torch.where(top.unsqueeze(-1).isfinite(), codes, 0.0)
    return Rounded(codes, torch.zeros_like(codes), torch.ones(codes.shape[:2]), factor)


def round_narrow(x: Tensor) -> Rounded:
    """To 8 bits: a unit's greatest magnitude becomes 127 or the next that an integer scale allows. Where its scale
    stands out, what this left over is rounded to 8 bits again."""
    units = _units(x)
    top = units.abs().amax((1, 2)).unsqueeze(-1)
    fits = top.isfinite() & (top >= LEAST)
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
    rounded = {of: round_wide(x, most_wide(parts)) if of else round_narrow(x) for of in set(wide)}
    y = torch.cat([_part(rounded[of], part) for of, part in zip(wide, parts, strict=True)], -1)
    return y if bias is None else y + bias.float()


def _part(rounded: Rounded, part: Quantised) -> Tensor:
    """y = factor * sum over spans, rising, of scale_x * (scale_w * dot) + minimum * (scale_x * sum of x codes)."""
    scale_x = rounded.scale
    out, size_in = part.shape
    if whole(part):
        return _whole(rounded, part)
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


def _whole(rounded: Rounded, part: Quantised) -> Tensor:
    """y = factor * (scale_w * dot + minimum * sum of x codes), of all inputs."""
    x, w = rounded.codes.flatten(1)[:, : part.shape[1]], part.codes.double()
    y = part.scale[:, 0] * (x @ w.T).float()
    if part.minimum is not None:
        y = y + part.minimum[:, 0] * x.sum(-1, keepdim=True).float()
    return y * rounded.factor
