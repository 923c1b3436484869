"""Weights of type float8 e4m3 and their products.

Owns: fp8 weights with one scale an output, activations rounded row by row, the choice between the product of the
device and dequantised values.
Does not know: checkpoints, kernels.
Invariants: value[o, i] = code[o, i] * scale[o]. Where the device multiplies fp8, activations are rounded to e4m3 too,
one scale a row; elsewhere weights are turned back and activations stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
GREATEST = 448.0
ALIGN = 16  # torch._scaled_mm wants dimensions in multiples of it


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """codes e4m3 [out, in]; scale fp32 [out]; bias [out] or None."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        return (self.codes.float() * self.scale.unsqueeze(1)).to(dtype)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, d] -> e4m3 [n, d] and fp32 scales [n] with x about codes * scale. Rows of zeros have scale 1."""
    wide = x.float()
    most = wide.abs().amax(-1)
    scale = torch.where(most > 0, most / GREATEST, 1.0)
    return (wide / scale.unsqueeze(1)).clamp_(-GREATEST, GREATEST).to(E4M3), scale


def able(device: torch.device) -> bool:
    """Whether the device multiplies fp8: compute capability 8.9 or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def multiplies(weight: Fp8Weight) -> bool:
    """Whether the device multiplies this weight as fp8: it can, and dimensions are in 16s."""
    return able(weight.codes.device) and not any(size % ALIGN for size in weight.codes.shape)


def linear(x: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """x [T, in] -> [T, out] of `dtype`."""
    if multiplies(weight):
        codes, scale = quantise_rows(x)
        y = torch._scaled_mm(
            codes,
            weight.codes.t(),
            scale_a=scale.unsqueeze(1),
            scale_b=weight.scale.unsqueeze(0),
            out_dtype=torch.bfloat16,
        )
    else:
        y = F.linear(x, weight.dequantise(x.dtype))
    y = y.to(dtype)
    return y if weight.bias is None else y + weight.bias.to(dtype)
