"""Llama 4 text models.

Owns: the weights and the forward of this family: chunked attention with rope and normed q, k in three layers of four,
full attention without rope but with a temperature that grows with the position in the fourth; a mixture of experts
beside a shared expert in some layers, a dense MLP in the others.
Does not know: files, devices, schedulers.
Invariants: as llama. The rows of q and k of rotated layers are reordered at load, from rotation of neighbours to
rotation of halves: scores and norms do not change under a common permutation of q and k.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from aengine.kernels.ops import AttentionSpec, Experts, Linear, Ops, RopeTable, StepBatch
from aengine.models.checkpoint import Checkpoint, rows_to_halves
from aengine.models.config import ModelConfig
from aengine.models.experts import load_experts
from aengine.models.llama import attention_specs, heads
from aengine.models.mixed_config import Temperature
from aengine.models.rope import rope_table
from aengine.models.weights import Progress, Weights, load_embedding, load_layers


@dataclass(frozen=True, slots=True)
class Routed:
    """The mixture of a layer: `router` [experts, hidden]."""

    router: Linear
    experts: Experts


@dataclass(frozen=True, slots=True)
class Llama4Layer:
    """`gate_up`, `down`: the dense MLP, or the shared expert beside `routed`. `qk_norm`: ones [head_dim], or None."""

    attention_norm: Tensor
    qkv: Linear
    roped: bool
    qk_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    routed: Routed | None


class Llama4Model:
    """A loaded model. Implements the `Model` protocol; see there for shapes."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        embedding: Tensor | Linear,
        layers: tuple[Llama4Layer, ...],
        norm: Tensor,
        head: Linear,
        rope: RopeTable,
    ) -> None:
        self.config, self.dtype = config, dtype
        self.vocab_size, self.max_context = config.vocab_size, config.max_positions
        self.attention = attention_specs(config)
        self._embedding, self._layers, self._norm, self._head, self._rope = embedding, layers, norm, head, rope
        self._temperatures = None if config.temperature is None else _factors(config.temperature, config.max_positions)

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> Llama4Model:
        """Read, fuse and prepare all weights; `progress(phase, layers done, layers)` after each layer."""
        weights = Weights(checkpoint, ops, dtype)
        layers = load_layers(config.layers, lambda index: _load_layer(config, weights, index), progress)
        embedding, head = load_embedding(config, weights)
        rope = rope_table(config.rope, config.max_positions)
        return cls(config, dtype, embedding, layers, weights.norm("model.norm", config.hidden), head, rope)

    def forward(self, ops: Ops, batch: StepBatch) -> Tensor:
        residual, eps, layers = ops.embed(self._embedding, batch.ids), self.config.norm_eps, self._layers
        x = ops.rms_norm(residual, layers[0].attention_norm, eps)
        next_norms = [layer.attention_norm for layer in layers[1:]] + [self._norm]
        for layer, spec, next_norm in zip(layers, self.attention, next_norms, strict=True):
            x = self._attend(ops, x, layer, spec, batch)
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = _feed_forward(ops, x, layer)
            x, residual = ops.add_rms_norm(x, residual, next_norm, eps)
        return x

    def _attend(self, ops: Ops, x: Tensor, layer: Llama4Layer, spec: AttentionSpec, batch: StepBatch) -> Tensor:
        q, k, v = heads(ops, x, layer.qkv, spec)
        if layer.roped:
            q, k = ops.rope(q, batch.positions, self._rope), ops.rope(k, batch.positions, self._rope)
        elif self._temperatures is not None:
            q = ops.scale_positions(q, batch.positions, self._temperatures)
        if layer.qk_norm is not None:
            eps = self.config.norm_eps
            q, k = ops.rms_norm(q, layer.qk_norm, eps), ops.rms_norm(k, layer.qk_norm, eps)
        return ops.linear(ops.attention(q, k, v, spec, batch), layer.output)

    def logits(self, ops: Ops, hidden: Tensor) -> Tensor:
        return ops.logits(hidden, self._head)


def _feed_forward(ops: Ops, x: Tensor, layer: Llama4Layer) -> Tensor:
    out = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
    if layer.routed is None:
        return out
    return ops.add(out, ops.mixture(x, ops.linear(x, layer.routed.router), layer.routed.experts))


def _factors(temperature: Temperature, positions: int) -> Tensor:
    """fp32 [positions]."""
    steps = torch.floor((torch.arange(positions, dtype=torch.float32) + 1.0) / temperature.floor_tokens)
    return torch.log1p(steps) * temperature.scale + 1.0


def _load_layer(config: ModelConfig, weights: Weights, index: int) -> Llama4Layer:
    at, hidden, mixture = f"model.layers.{index}.", config.hidden, config.mixture
    attn, mlp, roped = at + "self_attn.", at + "feed_forward.", config.roped[index]
    routed, ffn = None, config.ffn
    if mixture is not None and index in mixture.layers:
        gate_up, down = load_experts(weights, mlp + "experts.", mixture, hidden, bias=False, interleaved=False)
        experts = Experts(gate_up, down, mixture.per_token, scoring="sigmoid", weigh="input")
        routed = Routed(weights.plain(mlp + "router", mixture.experts, hidden, bias=False), experts)
        mlp, ffn = mlp + "shared_expert.", mixture.ffn
    return Llama4Layer(
        attention_norm=weights.norm(at + "input_layernorm", hidden),
        qkv=_load_qkv(config, weights, attn, roped),
        roped=roped,
        qk_norm=torch.ones(config.head_dim, dtype=torch.float32) if config.qk_norm and roped else None,
        output=weights.linear((attn + "o_proj",), (hidden,), config.heads * config.head_dim, config.o_bias),
        mlp_norm=weights.norm(at + "post_attention_layernorm", hidden),
        gate_up=weights.linear((mlp + "gate_proj", mlp + "up_proj"), (ffn, ffn), hidden, False),
        down=weights.linear((mlp + "down_proj",), (hidden,), ffn, False),
        routed=routed,
    )


def _load_qkv(config: ModelConfig, weights: Weights, at: str, roped: bool) -> Linear:
    counts = (config.heads, config.kv_heads, config.kv_heads)
    names = (at + "q_proj", at + "k_proj", at + "v_proj")
    orders = tuple(partial(rows_to_halves, heads=count) if roped else None for count in counts[:2])
    outs = tuple(count * config.head_dim for count in counts)
    return weights.linear(names, outs, config.hidden, config.qkv_bias, (*orders, None))
