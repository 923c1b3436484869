"""gpt-oss: window and full attention in turn, with sinks, and a mixture of experts in every layer.

Owns: the weights and the forward of this family.
Does not know: files, devices, schedulers.
Invariants: as llama. Sinks are held in fp32, the dtype of scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.errors import ModelLoadError
from aengine.kernels.ops import AttentionSpec, Experts, Linear, Ops, RopeTable, StepBatch
from aengine.models.checkpoint import Checkpoint
from aengine.models.config import ModelConfig
from aengine.models.experts import load_experts
from aengine.models.llama import attention_specs, heads
from aengine.models.rope import rope_table
from aengine.models.weights import Progress, Weights, load_embedding, load_layers


@dataclass(frozen=True, slots=True)
class GptOssLayer:
    """`sinks` fp32 [heads]; `router` [experts, hidden]."""

    attention_norm: Tensor
    qkv: Linear
    sinks: Tensor
    output: Linear
    mlp_norm: Tensor
    router: Linear
    experts: Experts


class GptOssModel:
    """A loaded model. Implements the `Model` protocol; see there for shapes."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        embedding: Tensor | Linear,
        layers: tuple[GptOssLayer, ...],
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
    ) -> GptOssModel:
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
            x = ops.mixture(x, ops.linear(x, layer.router), layer.experts)
            x, residual = ops.add_rms_norm(x, residual, next_norm, eps)
        return x

    def _attend(self, ops: Ops, x: Tensor, layer: GptOssLayer, spec: AttentionSpec, batch: StepBatch) -> Tensor:
        q, k, v = heads(ops, x, layer.qkv, spec)
        return ops.linear(ops.attention(q, k, v, spec, batch, layer.sinks, self._rope), layer.output)

    def logits(self, ops: Ops, hidden: Tensor) -> Tensor:
        return ops.logits(hidden, self._head)


def _load_layer(config: ModelConfig, weights: Weights, index: int) -> GptOssLayer:
    mixture = config.mixture
    if mixture is None:
        raise ModelLoadError(f"{config.architecture}: the configuration names no experts")
    at, hidden = f"model.layers.{index}.", config.hidden
    attn, q, kv = at + "self_attn.", config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = (attn + "q_proj", attn + "k_proj", attn + "v_proj")
    gate_up, down = load_experts(weights, at + "mlp.experts.", mixture, hidden, bias=True, interleaved=True)
    return GptOssLayer(
        attention_norm=weights.norm(at + "input_layernorm", hidden),
        qkv=weights.linear(qkv, (q, kv, kv), hidden, config.qkv_bias),
        sinks=weights.tensor(attn + "sinks", (config.heads,), torch.float32),
        output=weights.linear((attn + "o_proj",), (hidden,), q, config.o_bias),
        mlp_norm=weights.norm(at + "post_attention_layernorm", hidden),
        router=weights.plain(at + "mlp.router", mixture.experts, hidden, bias=True),
        experts=Experts(
            gate_up,
            down,
            mixture.per_token,
            scoring="softmax",
            weigh="output",
            activation="clamped",
            alpha=mixture.alpha,
            limit=mixture.limit,
        ),
    )
