"""LFM2: short convolutions in most layers, full attention in some.

Owns: the weights and the forward of LFM2: gated causal convolutions with a recurrent state of a few tokens, attention
with q/k norms, gated MLPs.
Does not know: files, devices, schedulers.
Invariants: as llama. Attention layers own KV (page group 0), convolution layers a state (page group 1); each kind is
numbered from 0 in layer order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.ops import AttentionSpec, Linear, Ops, RopeTable, StatePart, StateSpec, StepBatch
from aengine.models.checkpoint import Checkpoint
from aengine.models.config import ModelConfig
from aengine.models.llama import Layer, attend, attention_specs
from aengine.models.rope import rope_table
from aengine.models.weights import Progress, Weights, load_embedding, load_layers

STATE_GROUP = 1  # attention is group 0


@dataclass(frozen=True, slots=True)
class ConvLayer:
    """`project` [3 hidden, hidden] gives gate in, gate out, x. `kernel` fp32 [K, hidden], newest token last."""

    norm: Tensor
    project: Linear
    kernel: Tensor
    bias: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Lfm2Model:
    """A loaded model. Implements the `Model` protocol, with `states`; see there for shapes."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        embedding: Tensor | Linear,
        layers: tuple[Layer | ConvLayer, ...],
        norm: Tensor,
        head: Linear,
        rope: RopeTable,
    ) -> None:
        self.config, self.dtype = config, dtype
        self.vocab_size, self.max_context = config.vocab_size, config.max_positions
        self.attention, self.states = attention_specs(config), state_layers(config, dtype)
        self._specs = _in_order(config.conv_layers, self.attention, self.states)
        self._embedding, self._layers, self._norm, self._head, self._rope = embedding, layers, norm, head, rope

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> Lfm2Model:
        """Read, fuse and prepare all weights; `progress(phase, layers done, layers)` after each layer."""
        weights = Weights(checkpoint, ops, dtype)
        layers = load_layers(config.layers, lambda index: _load_layer(config, weights, index), progress)
        embedding, head = load_embedding(config, weights)
        norm = weights.norm("model.embedding_norm", config.hidden)
        rope = rope_table(config.rope, config.max_positions, weights.rope_factors())
        return cls(config, dtype, embedding, layers, norm, head, rope)

    def forward(self, ops: Ops, batch: StepBatch) -> Tensor:
        residual, eps = ops.embed(self._embedding, batch.ids), self.config.norm_eps
        norms = [layer.norm if isinstance(layer, ConvLayer) else layer.attention_norm for layer in self._layers]
        x = ops.rms_norm(residual, norms[0], eps)
        for layer, spec, next_norm in zip(self._layers, self._specs, [*norms[1:], self._norm], strict=True):
            if isinstance(spec, StateSpec):
                assert isinstance(layer, ConvLayer)
                x = _convolve(ops, x, layer, spec, batch)
            else:
                assert isinstance(layer, Layer)
                x = attend(ops, x, layer, spec, self._rope, eps, batch)
            x, residual = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
            x, residual = ops.add_rms_norm(x, residual, next_norm, eps)
        return x

    def logits(self, ops: Ops, hidden: Tensor) -> Tensor:
        return ops.logits(hidden, self._head)


def _convolve(ops: Ops, x: Tensor, layer: ConvLayer, spec: StateSpec, batch: StepBatch) -> Tensor:
    """Normed hidden states x [T, D] -> [T, D], state written."""
    size = x.shape[1]
    gate_in, gate_out, inner = ops.split(ops.linear(x, layer.project), (size, size, size))
    inner = ops.short_conv(ops.mul(gate_in, inner), layer.kernel, layer.bias, spec, batch)
    return ops.linear(ops.mul(gate_out, inner), layer.output)


def state_layers(config: ModelConfig, dtype: torch.dtype) -> tuple[StateSpec, ...]:
    """One for each convolution: its last inputs."""
    parts = (StatePart("inputs", (config.conv_kernel - 1, config.hidden), dtype),)
    return tuple(StateSpec(layer, STATE_GROUP, parts) for layer in range(config.conv_layers.count(True)))


def _in_order(
    convs: Sequence[bool], attention: Sequence[AttentionSpec], states: Sequence[StateSpec]
) -> tuple[AttentionSpec | StateSpec, ...]:
    """The spec of each layer of the model."""
    attending, recurrent = iter(attention), iter(states)
    return tuple(next(recurrent) if conv else next(attending) for conv in convs)


def _load_mlp(config: ModelConfig, weights: Weights, at: str) -> tuple[Tensor, Linear, Linear]:
    mlp = at + "feed_forward."
    gate_up = weights.linear((mlp + "w1", mlp + "w3"), (config.ffn,) * 2, config.hidden, bias=False)
    down = weights.linear((mlp + "w2",), (config.hidden,), config.ffn, bias=False)
    return weights.norm(at + "ffn_norm", config.hidden), gate_up, down


def _load_layer(config: ModelConfig, weights: Weights, index: int) -> Layer | ConvLayer:
    return (_load_conv if config.conv_layers[index] else _load_attention)(config, weights, index)


def _load_attention(config: ModelConfig, weights: Weights, index: int) -> Layer:
    at = f"model.layers.{index}."
    attn, hidden = at + "self_attn.", config.hidden
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    mlp_norm, gate_up, down = _load_mlp(config, weights, at)
    return Layer(
        attention_norm=weights.norm(at + "operator_norm", hidden),
        qkv=weights.linear((attn + "q_proj", attn + "k_proj", attn + "v_proj"), (q, kv, kv), hidden, bias=False),
        q_norm=weights.norm(attn + "q_layernorm", config.head_dim),
        k_norm=weights.norm(attn + "k_layernorm", config.head_dim),
        output=weights.linear((attn + "out_proj",), (hidden,), q, bias=False),
        mlp_norm=mlp_norm,
        gate_up=gate_up,
        down=down,
    )


def _load_conv(config: ModelConfig, weights: Weights, index: int) -> ConvLayer:
    at = f"model.layers.{index}."
    conv, hidden, bias = at + "conv.", config.hidden, config.conv_bias
    kernel = weights.tensor(conv + "conv.weight", (hidden, 1, config.conv_kernel))
    mlp_norm, gate_up, down = _load_mlp(config, weights, at)
    return ConvLayer(
        norm=weights.norm(at + "operator_norm", hidden),
        project=weights.linear((conv + "in_proj",), (3 * hidden,), hidden, bias),
        kernel=kernel[:, 0].t().float().contiguous(),
        bias=weights.tensor(conv + "conv.bias", (hidden,)).float() if bias else None,
        output=weights.linear((conv + "out_proj",), (hidden,), hidden, bias),
        mlp_norm=mlp_norm,
        gate_up=gate_up,
        down=down,
    )
