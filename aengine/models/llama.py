"""Llama and its descendants: Llama 2/3, SmolLM2, Mistral, Qwen2/2.5, Qwen3.

Owns: the weights of one decoder of this shape and its forward in Ops: pre-norm attention and gated MLP, with optional
biases, q/k norms and sliding windows.
Does not know: files (weights come from a Checkpoint by name), devices, schedulers.
Invariants: forward calls nothing but Ops; q, k, v are one linear and gate, up another, fused at load. Loading holds at
most the weights plus one layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.ops import AttentionSpec, Linear, Ops, RopeTable, StepBatch
from aengine.models.checkpoint import Checkpoint
from aengine.models.config import ModelConfig
from aengine.models.rope import rope_table
from aengine.models.weights import Progress, Weights, load_embedding, load_layers


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. `qkv` [(heads + 2 kv_heads) * head_dim, hidden]; `gate_up` [2 ffn, hidden]."""

    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


def load_layer(config: ModelConfig, weights: Weights, index: int, mlp_norm: str) -> Layer:
    """Layer `index` of the checkpoint; `mlp_norm` names the norm before the MLP."""
    at = f"model.layers.{index}."
    attn, mlp, hidden = at + "self_attn.", at + "mlp.", config.hidden
    q, kv, offset = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.norm_offset
    qkv = (attn + "q_proj", attn + "k_proj", attn + "v_proj")
    return Layer(
        attention_norm=weights.norm(at + "input_layernorm", hidden, offset),
        qkv=weights.linear(qkv, (q, kv, kv), hidden, config.qkv_bias),
        q_norm=weights.norm(attn + "q_norm", config.head_dim, offset) if config.qk_norm else None,
        k_norm=weights.norm(attn + "k_norm", config.head_dim, offset) if config.qk_norm else None,
        output=weights.linear((attn + "o_proj",), (hidden,), q, config.o_bias),
        mlp_norm=weights.norm(at + mlp_norm, hidden, offset),
        gate_up=weights.linear((mlp + "gate_proj", mlp + "up_proj"), (config.ffn,) * 2, hidden, config.mlp_bias),
        down=weights.linear((mlp + "down_proj",), (hidden,), config.ffn, config.mlp_bias),
    )


def attention_specs(config: ModelConfig) -> tuple[AttentionSpec, ...]:
    """The layers that own KV; layers that are convolutions do not."""
    spans = zip(config.kv_groups, config.windows, config.layer_chunks, strict=True)
    convs = config.conv_layers or (False,) * config.layers
    return tuple(
        AttentionSpec(
            layer=layer,
            group=group,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            window=window,
            chunk=chunk,
        )
        for layer, (group, window, chunk) in enumerate(
            [span for span, conv in zip(spans, convs, strict=True) if not conv]
        )
    )


def heads(ops: Ops, x: Tensor, qkv: Linear, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D] -> q [T, heads, head_dim], k and v [T, kv_heads, head_dim]."""
    q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    q, k, v = ops.split(ops.linear(x, qkv), (q_size, kv_size, kv_size))
    return (
        q.view(-1, spec.heads, spec.head_dim),
        k.view(-1, spec.kv_heads, spec.head_dim),
        v.view(-1, spec.kv_heads, spec.head_dim),
    )


def attend(ops: Ops, x: Tensor, layer: Layer, spec: AttentionSpec, rope: RopeTable, eps: float, b: StepBatch) -> Tensor:
    """Attention of normed hidden states x [T, D] -> [T, D], KV written."""
    q, k, v = heads(ops, x, layer.qkv, spec)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = ops.rms_norm(q, layer.q_norm, eps), ops.rms_norm(k, layer.k_norm, eps)
    return ops.linear(ops.attention(q, k, v, spec, b, rope=rope), layer.output)


class LlamaModel:
    """A loaded model. Implements the `Model` protocol; see there for shapes."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        embedding: Tensor | Linear,
        layers: tuple[Layer, ...],
        norm: Tensor,
        head: Linear,
        rope: RopeTable,
    ) -> None:
        self.config, self.dtype = config, dtype
        self.vocab_size, self.max_context = config.vocab_size, config.max_positions
        self.attention = attention_specs(config)
        self._embedding, self._layers, self._norm, self._head, self._rope = embedding, layers, norm, head, rope

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> LlamaModel:
        """Read, fuse and prepare all weights; `progress(phase, layers done, layers)` after each layer."""
        weights = Weights(checkpoint, ops, dtype)
        layers = load_layers(
            config.layers, lambda index: load_layer(config, weights, index, "post_attention_layernorm"), progress
        )
        embedding, head = load_embedding(config, weights)
        norm = weights.norm("model.norm", config.hidden, config.norm_offset)
        rope = rope_table(config.rope, config.max_positions, weights.rope_factors())
        return cls(config, dtype, embedding, layers, norm, head, rope)

    def forward(self, ops: Ops, batch: StepBatch) -> Tensor:
        residual, eps, layers = ops.embed(self._embedding, batch.ids), self.config.norm_eps, self._layers
        x = ops.rms_norm(residual, layers[0].attention_norm, eps)
        next_norms = [layer.attention_norm for layer in layers[1:]] + [self._norm]
        for layer, spec, next_norm in zip(layers, self.attention, next_norms, strict=True):
            x = attend(ops, x, layer, spec, self._rope, eps, batch)
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
            x, residual = ops.add_rms_norm(x, residual, next_norm, eps)
        return x

    def logits(self, ops: Ops, hidden: Tensor) -> Tensor:
        return ops.logits(hidden, self._head)
