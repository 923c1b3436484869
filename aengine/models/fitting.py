"""Plain weights made integer at load.

Owns: the fit of codes, scale and minimum to each group of 32 inputs.
Does not know: files, models, backends.
Invariants: deterministic; a group's result depends on its own values only. Scales and minima are rounded to fp16 before
codes are chosen where fp16 holds them to full precision, so that a backend may keep them in two bytes. Temporary memory
is a few MiB whatever the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.quantised import Quantised
from aengine.models.spread import spread

GROUP = 32
CLIPS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)  # shares of a group's range tried for 4 bits
_CHUNK_GROUPS = 1 << 14
_HALF_MIN, _HALF_MAX = 2.0**-14, 65504.0


def fits(shape: tuple[int, ...]) -> bool:
    """Whether a weight of this shape can be made integer: inputs in whole groups."""
    return len(shape) == 2 and shape[1] % GROUP == 0


def fit(weight: Tensor, bits: int) -> Quantised:
    """`weight` [out, in] of a floating point type. 8 bits: symmetric, the largest value of a group becomes 127 steps.
    4 bits: the best of several clipped ranges, each with scale and minimum fitted by least squares."""
    out, size_in = weight.shape
    groups = weight.reshape(-1, GROUP)
    count = groups.shape[0]
    codes = torch.empty((count, GROUP), dtype=torch.uint8 if bits == 4 else torch.int8)
    scale = torch.empty((count, 1), dtype=torch.float32)
    minimum = torch.empty((count, 1), dtype=torch.float32) if bits == 4 else None

    def fill(part: slice) -> None:
        values = groups[part].float()
        if minimum is None:
            codes[part], scale[part] = _fit_8(values)
        else:
            codes[part], scale[part], minimum[part] = _fit_4(values)

    spread(count, _CHUNK_GROUPS, fill)
    return Quantised(
        codes=codes.view(out, size_in),
        scale=scale.view(out, -1),
        minimum=None if minimum is None else minimum.view(out, -1),
        group=GROUP,
        bits=bits,
    )


def _rounded(value: Tensor) -> Tensor:
    """To fp16 and back, but for values that fp16 does not hold to 11 bits."""
    size = value.abs()
    return torch.where((size >= _HALF_MIN) & (size <= _HALF_MAX), value.half().float(), value)


def _steps(values: Tensor, scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, values / scale)


def _fit_8(values: Tensor) -> tuple[Tensor, Tensor]:
    scale = _rounded(values.abs().amax(1, keepdim=True) / 127)
    return _steps(values, scale).round_().clamp_(-127, 127).to(torch.int8), scale


def _fit_4(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    best_codes = torch.zeros_like(values)
    best_scale, best_minimum = torch.zeros_like(low), low.clone()
    best_error = torch.full_like(low, torch.inf)
    for clip in CLIPS:
        middle, reach = (low + high) / 2, (high - low) / 2 * clip
        first = middle - reach
        guess = _steps(values - first, reach / 7.5).round_().clamp_(0, 15)
        scale, minimum = _least_squares(guess, values)
        codes = _steps(values - minimum, scale).round_().clamp_(0, 15)
        error = (codes * scale + minimum - values).square_().sum(1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_codes = torch.where(better, codes, best_codes)
        best_scale, best_minimum = torch.where(better, scale, best_scale), torch.where(better, minimum, best_minimum)
    return best_codes.to(torch.uint8), best_scale, best_minimum


def _least_squares(codes: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, minimum) that bring scale * codes + minimum closest to the values; all codes alike: (0, their mean)."""
    mean_code, mean = codes.mean(1, keepdim=True), values.mean(1, keepdim=True)
    spread = codes - mean_code
    power = spread.square().sum(1, keepdim=True)
    scale = torch.where(power == 0, 0.0, (spread * values).sum(1, keepdim=True) / power)
    scale = _rounded(scale)
    return scale, _rounded(mean - scale * mean_code)
