"""Gemma 3 text models.

Owns: the weights and the forward of Gemma 3: scaled embeddings, norms before and after each half of a layer, q/k norms,
GELU-gated MLP, five window layers to each full one, with a rope of their own.
Does not know: files, devices, schedulers.
Invariants: as llama. Norm weights are held with the one added, so they are plain RMS norms in forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.ops import Linear, Ops, RopeTable, StepBatch
from aengine.models.checkpoint import Checkpoint
from aengine.models.config import ModelConfig
from aengine.models.llama import Layer, attend, attention_specs, load_layer
from aengine.models.rope import rope_table
from aengine.models.weights import Progress, Weights, load_embedding, load_layers


@dataclass(frozen=True, slots=True)
class SandwichLayer:
    """A layer whose halves are normed before (`inner`'s norms) and after they run."""

    inner: Layer
    after_attention: Tensor
    after_mlp: Tensor
    rope: RopeTable


class Gemma3Model:
    """A loaded model. Implements the `Model` protocol; see there for shapes."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        embedding: Tensor | Linear,
        layers: tuple[SandwichLayer, ...],
        norm: Tensor,
        head: Linear,
    ) -> None:
        self.config, self.dtype = config, dtype
        self.vocab_size, self.max_context = config.vocab_size, config.max_positions
        self.attention = attention_specs(config)
        self._embedding, self._layers, self._norm, self._head = embedding, layers, norm, head
        # The reference rounds the factor to the compute dtype before it multiplies.
        self._embed_scale = float(torch.tensor(config.embed_scale, dtype=dtype))

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> Gemma3Model:
        """Read, fuse and prepare all weights; `progress(phase, layers done, layers)` after each layer."""
        weights = Weights(checkpoint, ops, dtype)
        full = rope_table(config.rope, config.max_positions, weights.rope_factors())
        local = rope_table(config.local_rope, config.max_positions) if config.local_rope else full
        ropes = [local if window else full for window in config.windows]
        layers = load_layers(config.layers, lambda index: _load_layer(config, weights, index, ropes[index]), progress)
        embedding, head = load_embedding(config, weights)
        norm = weights.norm("model.norm", config.hidden, config.norm_offset)
        return cls(config, dtype, embedding, layers, norm, head)

    def forward(self, ops: Ops, batch: StepBatch) -> Tensor:
        residual, eps = ops.scale(ops.embed(self._embedding, batch.ids), self._embed_scale), self.config.norm_eps
        x = ops.rms_norm(residual, self._layers[0].inner.attention_norm, eps)
        next_norms = [layer.inner.attention_norm for layer in self._layers[1:]] + [self._norm]
        for layer, spec, next_norm in zip(self._layers, self.attention, next_norms, strict=True):
            inner = layer.inner
            x = attend(ops, x, inner, spec, layer.rope, eps, batch)
            x = ops.rms_norm(x, layer.after_attention, eps)
            x, residual = ops.add_rms_norm(x, residual, inner.mlp_norm, eps)
            x = ops.linear(ops.gelu_tanh_mul(ops.linear(x, inner.gate_up)), inner.down)
            x = ops.rms_norm(x, layer.after_mlp, eps)
            x, residual = ops.add_rms_norm(x, residual, next_norm, eps)
        return x

    def logits(self, ops: Ops, hidden: Tensor) -> Tensor:
        return ops.logits(hidden, self._head)


def _load_layer(config: ModelConfig, weights: Weights, index: int, rope: RopeTable) -> SandwichLayer:
    at, size, offset = f"model.layers.{index}.", config.hidden, config.norm_offset
    return SandwichLayer(
        inner=load_layer(config, weights, index, "pre_feedforward_layernorm"),
        after_attention=weights.norm(at + "post_attention_layernorm", size, offset),
        after_mlp=weights.norm(at + "post_feedforward_layernorm", size, offset),
        rope=rope,
    )
