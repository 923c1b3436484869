"""Mixtures of experts without asking the device who chose whom.

Owns: the choice of experts, the sorted order of (token, expert) pairs, the tables of experts' addresses.
Does not know: routers, how weights were packed.
Invariants: nothing waits for the device. Each token's experts are summed in order of their number, and of equal scores
the lower expert is chosen.

    pairs, sorted by expert   | expert 0 | expert 1  | 3 |      offsets say where each begins
    programs                  blocks of one expert's pairs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.errors import NotSupported
from aengine.kernels.ops import Experts, Linear
from aengine.kernels.reference_mixture import activate
from aengine.kernels.triton.device.linear import grouped_linear_kernel
from aengine.kernels.triton.launch import on_device, widened
from aengine.kernels.triton.packed import PackedPart, PackedWeight

_DENSE_STEP = 32


@dataclass(frozen=True, slots=True)
class _Table:
    """The same linear of all experts: addresses int64 [experts] of its parts; `held` keeps them alive."""

    weight: Tensor
    scale: Tensor | None
    minimum: Tensor | None
    bias: Tensor | None
    outputs: int
    inputs: int
    stride: int
    group: int
    bits: int
    step: int
    wide_scale: bool
    held: tuple[Tensor, ...]


class Mixture:
    """Callable mixture. Keeps the tables of each `Experts` it has seen."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[int, tuple[Experts, _Table, _Table]] = {}

    def __call__(self, x: Tensor, scores: Tensor, experts: Experts) -> Tensor:
        gate_up, down = self._tables_of(experts, x.dtype)
        tokens, top_k, count = len(x), experts.top_k, len(experts.gate_up)
        ranked = scores.float().sort(dim=-1, descending=True, stable=True)
        best = ranked.values[:, :top_k]
        weights = best.softmax(-1) if experts.scoring == "softmax" else best.sigmoid()
        chosen, order = ranked.indices[:, :top_k].sort(dim=-1)
        weights = weights.gather(1, order)
        flat = chosen.flatten()
        pairs = flat.argsort(stable=True)
        sizes = torch.zeros(count, dtype=torch.int32, device=x.device)
        sizes.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        offsets = torch.zeros(count + 1, dtype=torch.int32, device=x.device)
        offsets[1:] = sizes.cumsum(0)
        taken = x.index_select(0, pairs // top_k)
        if experts.weigh == "input":
            taken = (taken * weights.flatten()[pairs].unsqueeze(1)).to(x.dtype)
        active = activate(_grouped(taken, gate_up, offsets), experts)
        result = _grouped(active, down, offsets)
        back = torch.empty_like(result).index_copy_(0, pairs, result).view(tokens, top_k, -1)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for place in range(top_k):
            part = back[:, place].float()
            out += part * weights[:, place, None] if experts.weigh == "output" else part
        return out.to(x.dtype)

    def _tables_of(self, experts: Experts, dtype: torch.dtype) -> tuple[_Table, _Table]:
        found = self._tables.get(id(experts))
        if found is None or found[0] is not experts:
            if not 0 < experts.top_k <= len(experts.gate_up):
                raise NotSupported(f"a mixture of {len(experts.gate_up)} experts cannot choose {experts.top_k}")
            gate_up, down = (_table(linears, dtype, self._device) for linears in (experts.gate_up, experts.down))
            found = self._tables[id(experts)] = (experts, gate_up, down)
        return found[1], found[2]


def _grouped(x: Tensor, table: _Table, offsets: Tensor) -> Tensor:
    """x [P, in], sorted by expert -> [P, out]."""
    count = len(offsets) - 1
    y = x.new_empty((len(x), table.outputs))
    if not len(x):
        return y
    few = len(x) <= 4 * count
    block_m, block_n, warps = (16, 64, 4) if few else (64, 128, 8)
    grouped_linear_kernel[(len(x) // block_m + count, -(-table.outputs // block_n))](
        x, table.weight, table.scale, table.minimum, table.bias, y, offsets, table.outputs, table.stride,
        EXPERTS=count, K=table.inputs, GROUP=table.group, BITS=table.bits, WIDE_SCALE=table.wide_scale,
        BM=block_m, BN=block_n, BK=table.step, UP=widened(x.dtype), num_warps=warps, num_stages=3,
    )  # fmt: skip
    return y


def _table(linears: Sequence[Linear], dtype: torch.dtype, device: torch.device) -> _Table:
    biases = [_bias(linear, device) for linear in linears]
    bias = [one for one in biases if one is not None]
    if len(bias) not in (0, len(linears)):
        raise NotSupported(f"{len(bias)} of {len(linears)} experts have a bias")
    packed = [linear.packed for linear in linears if isinstance(linear.packed, PackedWeight)]
    if not packed:
        return _dense_table([linear.weight for linear in linears], bias, dtype, device)
    parts = [part for weight in packed for part in weight.parts]
    formats = {(part.bits, part.group, part.minimum is None) for part in parts}
    if len(parts) != len(linears) or len(formats) != 1:
        raise NotSupported(f"{len(linears)} experts have {len(parts)} parts of {len(formats)} formats, not one of one")
    return _packed_table(parts, bias, device)


def _bias(linear: Linear, device: torch.device) -> Tensor | None:
    bias = linear.packed.bias if isinstance(linear.packed, PackedWeight) else linear.bias
    return None if bias is None else bias.to(device, torch.float32).contiguous()


def _dense_table(weights: Sequence[Tensor], bias: list[Tensor], dtype: torch.dtype, device: torch.device) -> _Table:
    held = [_aligned(weight.to(device, dtype).contiguous()) for weight in weights]
    outputs, inputs = held[0].shape
    return _Table(
        _addresses(held, device), None, None, _addresses(bias, device) if bias else None,
        outputs, inputs, inputs, inputs, 16, _DENSE_STEP, False, (*held, *bias),
    )  # fmt: skip


def _packed_table(parts: Sequence[PackedPart], bias: list[Tensor], device: torch.device) -> _Table:
    wide = any(part.scale.dtype is torch.float32 for part in parts)
    kind = torch.float32 if wide else torch.float16
    codes, scales = [part.codes for part in parts], [part.scale.to(kind) for part in parts]
    minima = [part.minimum.to(kind) for part in parts if part.minimum is not None]
    one = parts[0]
    return _Table(
        _addresses(codes, device), _addresses(scales, device), _addresses(minima, device) if minima else None,
        _addresses(bias, device) if bias else None, one.out_features, one.in_features, one.stride,
        one.group, one.bits, one.step, wide, (*codes, *scales, *minima, *bias),
    )  # fmt: skip


def _aligned(weight: Tensor) -> Tensor:
    return weight if weight.data_ptr() % 16 == 0 else weight.clone()


def _addresses(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    return on_device([tensor.data_ptr() for tensor in tensors], torch.int64, device)
