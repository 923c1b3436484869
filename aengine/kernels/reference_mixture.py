"""Mixtures of experts, over any backend's linear.

Owns: the choice of experts, their activation, the weighted sum.
Does not know: how a linear is computed, models.
Invariants: each token's experts are summed in order of their number, and a linear's row depends on its own input alone
where the backend says so: then a token's result does not depend on the others of the step.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.ops import Experts, Linear


class HasLinear(Protocol):
    """What a mixture needs of its backend."""

    def linear(self, x: Tensor, w: Linear) -> Tensor: ...


def mixture(ops: HasLinear, x: Tensor, scores: Tensor, experts: Experts) -> Tensor:
    """See `Ops.mixture`. One pass per expert that some token chose; sums in fp32."""
    ranked = scores.float().sort(dim=-1, descending=True, stable=True)  # of equal scores the lower expert
    best, chosen = ranked.values[:, : experts.top_k], ranked.indices[:, : experts.top_k]
    weights = best.softmax(-1) if experts.scoring == "softmax" else best.sigmoid()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(chosen.flatten().tolist())):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        weight = weights[token, place].unsqueeze(1)
        taken = x[token]
        if experts.weigh == "input":
            taken = (taken * weight).to(x.dtype)
        result = ops.linear(activate(ops.linear(taken, experts.gate_up[expert]), experts), experts.down[expert])
        out.index_add_(0, token, result * weight if experts.weigh == "output" else result.float())
    return out.to(x.dtype)


def activate(gate_up: Tensor, experts: Experts) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    if experts.activation == "silu":
        return (F.silu(gate) * up).to(gate_up.dtype)
    gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
    return ((up + 1) * (gate * torch.sigmoid(gate * experts.alpha))).to(gate_up.dtype)
