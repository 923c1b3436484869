"""The weights of mixtures of experts.

Owns: reading a layer's stacked expert weights into one pair of linears per expert.
Does not know: routers' scores, activations, files.
Invariants: a prepared gate_up has the gates' rows first, whatever order the checkpoint keeps them in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.ops import Linear
from aengine.models.mixed_config import Mixture
from aengine.models.weights import Weights

Linears = tuple[Linear, ...]


def load_experts(
    weights: Weights, at: str, mixture: Mixture, hidden: int, *, bias: bool, interleaved: bool
) -> tuple[Linears, Linears]:
    """(gate_up, down) of each expert, from tensors [experts, in, out] under `at`.

    `interleaved`: the checkpoint's gate and up columns alternate.
    """
    n, ffn = mixture.experts, mixture.ffn
    gate_up = weights.tensor(at + "gate_up_proj", (n, hidden, 2 * ffn))
    down = weights.tensor(at + "down_proj", (n, ffn, hidden))
    gate_up_bias = weights.tensor(at + "gate_up_proj_bias", (n, 2 * ffn)) if bias else None
    down_bias = weights.tensor(at + "down_proj_bias", (n, hidden)) if bias else None
    first, second = [], []
    for expert in range(n):
        wide, wide_bias = gate_up[expert].T, _of(gate_up_bias, expert)
        if interleaved:
            wide = _gates_first(wide)
            wide_bias = None if wide_bias is None else _gates_first(wide_bias)
        first.append(weights.made(at + "gate_up_proj", wide.contiguous(), wide_bias))
        second.append(weights.made(at + "down_proj", down[expert].T.contiguous(), _of(down_bias, expert)))
    return tuple(first), tuple(second)


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert].clone()


def _gates_first(rows: Tensor) -> Tensor:
    return torch.cat((rows[::2], rows[1::2]))
