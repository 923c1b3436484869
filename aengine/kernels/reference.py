"""Reference backend: every op in plain torch, on CPU or CUDA tensors. The oracle all other backends are held to.

Owns: the ops of `kernels.ops.Ops` except attention, which lives beside it in `reference_attention`.
Does not know: requests, schedulers, checkpoints, packed weights.
Invariants: norms, rotations, softmax and logits are computed in fp32 whatever the compute dtype; results are returned
in the dtype of the input. No state between steps except index arrays derived from the batch at hand.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.ops import AttentionSpec, Experts, LayerKV, Linear, RopeTable, StateSpec, StepBatch
from aengine.kernels.reference_attention import PagedAttention
from aengine.kernels.reference_cross import QUERY_BLOCK, cross_attention, write_items
from aengine.kernels.reference_mixture import mixture
from aengine.kernels.reference_state import ShortConv

# Vocabulary rows turned to fp32 at a time: 2,048 x 576 x 4 B = 4.5 MiB, small enough to stay in the last cache level.
LOGITS_BLOCK = 2048


class ReferenceOps:
    """`Ops` in plain torch. One instance serves one stream; it is not shared between threads."""

    name = "reference"

    def __init__(self) -> None:
        self._attention = PagedAttention()
        self._short_conv = ShortConv()

    def prepare(self, linear: Linear) -> Linear:
        if not linear.parts:
            return linear
        weight = torch.cat([part.dequantise(linear.weight.dtype) for part in linear.parts])
        return Linear(weight, linear.bias)

    def embed(self, table: Tensor | Linear, ids: Tensor) -> Tensor:
        return F.embedding(ids, table.weight if isinstance(table, Linear) else table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * inverse * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        return F.linear(x, w.weight, w.bias)

    def logits(self, x: Tensor, w: Linear) -> Tensor:
        """fp32 products and sums: a bf16 matrix product would round logits to 8 bits and make ties common."""
        if w.weight.dtype == torch.float32:
            return F.linear(x.float(), w.weight, None if w.bias is None else w.bias.float())
        out = x.new_empty((x.shape[0], w.out_features), dtype=torch.float32)
        wide = x.float()
        for first in range(0, w.out_features, LOGITS_BLOCK):
            block = w.weight[first : first + LOGITS_BLOCK].float()
            out[:, first : first + LOGITS_BLOCK] = F.linear(wide, block)
        return out if w.bias is None else out.add_(w.bias.float())

    def rope(self, x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
        half = table.rotary_dim // 2
        cos = table.cos[positions].unsqueeze(1)
        sin = table.sin[positions].unsqueeze(1)
        low, high = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
        if 2 * half == x.shape[-1]:
            return turned
        return torch.cat((turned, x[..., 2 * half :]), dim=-1)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        batch: StepBatch,
        sinks: Tensor | None = None,
        rope: RopeTable | None = None,
    ) -> Tensor:
        if rope is not None:
            q, k = self.rope(q, batch.positions, rope), self.rope(k, batch.positions, rope)
        return self._attention(q, k, v, spec, batch, sinks)

    def scale_positions(self, x: Tensor, positions: Tensor, factors: Tensor) -> Tensor:
        return (x.float() * factors[positions].view(-1, 1, 1)).to(x.dtype)

    def mixture(self, x: Tensor, scores: Tensor, experts: Experts) -> Tensor:
        return mixture(self, x, scores, experts)

    def short_conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: StateSpec, batch: StepBatch) -> Tensor:
        return self._short_conv(x, weight, bias, spec, batch)

    def cross_attention(self, q: Tensor, spec: AttentionSpec, batch: StepBatch) -> Tensor:
        assert batch.cross is not None
        return cross_attention(q, batch.kv[spec.layer], spec, batch.cross, QUERY_BLOCK)

    def write_items(self, k: Tensor, v: Tensor, kv: LayerKV, pages: Tensor) -> None:
        write_items(k, v, kv, pages)

    def take(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x.index_select(0, tokens)

    def put(self, x: Tensor, tokens: Tensor, y: Tensor) -> Tensor:
        return x.index_copy(0, tokens, y)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate.float()).mul_(up).to(gate_up.dtype)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate.float(), approximate="tanh").mul_(up).to(gate_up.dtype)

    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.split(x, list(sizes), dim=-1))
