"""Products with quantised weights and activations rounded to integers: the oracle of the integer kernels, in torch.

Owns: how activations are rounded, the exact integer sums and how they become fp32.
Does not know: panels, instruction sets, threads.
Invariants: integer sums are exact (fp64 holds them); each step of fp32 arithmetic is rounded as the kernels round it,
except that a fused multiply-add is one rounding there and two here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.quantised import Quantised

UNIT = 32  # activations that share a scale
LEAST = 2.0**-110  # magnitudes below count as zero: the greatest code over them would not be finite
NARROW, WIDE = 127, 32767  # greatest codes of activations of 8 and of 16 bits


def quantise_rows(x: Tensor, most: int = NARROW) -> tuple[Tensor, Tensor]:
    """x [T, in] -> codes fp64 [T, units, 32] within -most .. most, scale fp32 [T, units]: greatest magnitude / most.

    A unit with infinity or NaN has codes 0 and scale NaN: every output of its row is NaN.
    """
    rows, size_in = x.shape
    wide = F.pad(x.float(), (0, -size_in % UNIT)).view(rows, -1, UNIT)
    top = wide.abs().amax(-1)
    finite = wide.isfinite().all(-1)
    fits = finite & (top >= LEAST)
    inverse = torch.where(fits, torch.div(torch.full_like(top, most), top), 0.0)
    scale = torch.where(fits, top / most, torch.where(finite, 0.0, torch.nan))
    codes = torch.where(finite.unsqueeze(-1), torch.round(wide * inverse.unsqueeze(-1)), 0.0)
    return codes.double(), scale


def linear_quantised(
    x: Tensor, parts: Sequence[Quantised], bias: Tensor | None = None, precise: bool = False
) -> Tensor:
    """x [T, in] by the weight that `parts` make up -> fp32 [T, out].

    Activations have 16 bits before codes of 8 bits and where `precise`, 8 bits elsewhere.
    """
    if parts[0].order is not None:
        x = x.index_select(1, parts[0].order)
    y = torch.cat([_part(*quantise_rows(x, WIDE if precise or part.bits == 8 else NARROW), part) for part in parts], -1)
    return y if bias is None else y + bias.float()


def _part(x: Tensor, scale_x: Tensor, part: Quantised) -> Tensor:
    """y = sum over spans, rising, of scale_x * (scale_w * dot) + minimum * (scale_x * sum of x codes)."""
    out, size_in = part.shape
    span = UNIT if part.group == size_in or part.group % UNIT == 0 else 16  # inputs summed as integers
    per_unit, spans = UNIT // span, x.shape[1] * (UNIT // span)
    x = x.reshape(x.shape[0], spans, span)
    w = F.pad(part.codes.double(), (0, spans * span - size_in)).view(out, spans, span)
    y = torch.zeros((x.shape[0], out))
    for index in range(spans):
        group = min(index * span // part.group, part.scale.shape[1] - 1)
        sx = scale_x[:, index // per_unit].unsqueeze(-1)
        dot = (x[:, index] @ w[:, index].T).float()
        y = y + sx * (part.scale[:, group] * dot)
        if part.minimum is not None:
            y = y + part.minimum[:, group] * (sx * x[:, index].sum(-1, keepdim=True).float())
    return y
