"""Rotary embedding tables.

Owns: the frequencies of each rope type and the cos/sin tables made of them.
Does not know: how a backend applies a table, files.
Invariants: everything in fp32 and in the order of operations of the reference implementation, so that tables agree
with it to the last bit and greedy tokens with them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aengine.errors import ModelLoadError
from aengine.kernels.ops import RopeTable
from aengine.models.config import RopeConfig


def rope_table(rope: RopeConfig, positions: int, factors: Tensor | None = None) -> RopeTable:
    """Tables for positions 0 .. positions - 1: cos, sin fp32 [positions, dim / 2].

    `factors` fp32 [dim / 2] divides the frequencies; needed for rope type "factors", else None.
    """
    frequencies, scale = rope_frequencies(rope, factors)
    angles = torch.arange(positions, dtype=torch.float32).unsqueeze(1) * frequencies
    return RopeTable(cos=angles.cos().mul_(scale), sin=angles.sin_().mul_(scale))


def rope_frequencies(rope: RopeConfig, factors: Tensor | None = None) -> tuple[Tensor, float]:
    """-> (radians per position fp32 [dim / 2], scale of cos and sin)."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "default":
        return frequencies, 1.0
    if rope.type == "linear":
        return frequencies / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.type == "yarn":
        return _yarn(rope, rope.theta**exponents), yarn_attention_factor(rope)
    if factors is None or tuple(factors.shape) != tuple(frequencies.shape):
        shape = None if factors is None else tuple(factors.shape)
        raise ModelLoadError(f"rope_freqs.weight has shape {shape}, not {tuple(frequencies.shape)}")
    return frequencies / factors.float(), 1.0


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended."""
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions
    wavelengths = 2 * math.pi / frequencies
    long, short = wavelengths > original / low, wavelengths < original / high
    stretched = torch.where(long, frequencies / rope.factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    return torch.where(~short & ~long, blended, stretched)


def _yarn(rope: RopeConfig, periods: Tensor) -> Tensor:
    """Slow dimensions are interpolated by `factor`, fast ones kept, with a linear ramp between the two bounds."""
    low, high = (_yarn_dimension(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # no division by zero when the ramp is a step
    ramp = torch.clamp((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_dimension(rope: RopeConfig, turns: float) -> float:
    """The dimension that makes `turns` full turns over the original context."""
    return rope.dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def yarn_attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by under yarn."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
