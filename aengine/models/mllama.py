"""Llama 3.2 Vision: a Llama whose extra layers attend to images.

Owns: the weights of the decoder, the gated cross-attention layers and the projector; the forward in Ops; running the
vision tower, which is transformers' own module.
Does not know: files, prompts, which token sees which image.
Invariants: an image's entries depend on the image alone (one image at a time through the tower, padding tiles dropped
after it), so their K and V can be shared by all prompts. A token that sees no image passes a cross layer unchanged: in
the original both halves of the layer are masked for it. (transformers masks only the MLP, and lets such a token attend
to all images of the prompt, so that the beginning of a prompt would depend on what follows it.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aengine.errors import ModelLoadError
from aengine.kernels.ops import AttentionSpec, LayerKV, Linear, Ops, RopeTable, StepBatch
from aengine.kernels.quantised import Quantised
from aengine.models.checkpoint import Checkpoint
from aengine.models.config import ModelConfig
from aengine.models.llama import Layer, attend, load_layer
from aengine.models.rope import rope_table
from aengine.models.vision_config import VisionConfig
from aengine.models.weights import Progress, Weights, load_layers


@dataclass(frozen=True, slots=True)
class CrossLayer:
    """A layer that attends to images. `kv` [2 * kv_heads * head_dim, hidden]; the gates are tanh of the stored ones."""

    attention_norm: Tensor
    q: Linear
    kv: Linear
    q_norm: Tensor
    k_norm: Tensor
    output: Linear
    attention_gate: float
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    mlp_gate: float


class MllamaModel:
    """A loaded model. Implements the `MediaModel` protocol; see there for shapes."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        embedding: Tensor | Linear,
        layers: tuple[Layer | CrossLayer, ...],
        norm: Tensor,
        head: Linear,
        vision: VisionTower,
    ) -> None:
        assert config.vision is not None
        self.config, self.dtype = config, dtype
        self.vocab_size, self.max_context = config.vocab_size, config.max_positions
        self.input_vocab = config.vision.input_vocab
        self.attention = _attention_specs(config, config.vision)
        self._embedding, self._layers, self._norm, self._head = embedding, layers, norm, head
        self._rope = rope_table(config.rope, config.max_positions)
        self._vision = vision

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> MllamaModel:
        """Read, fuse and prepare all weights; `progress(phase, layers done, layers)` after each layer."""
        assert config.vision is not None
        names = _Names(checkpoint)
        weights = Weights(names, ops, dtype)
        layers = load_layers(config.layers, lambda index: _load_layer(config, weights, index), progress)
        embedding, head = _load_embedding(config, config.vision, weights)
        norm = weights.norm("model.norm", config.hidden)
        vision = VisionTower.load(config.vision, config.hidden, names, ops, dtype)
        return cls(config, dtype, embedding, layers, norm, head, vision)

    def forward(self, ops: Ops, batch: StepBatch) -> Tensor:
        eps = self.config.norm_eps
        hidden = ops.embed(self._embedding, batch.ids)
        for layer, spec in zip(self._layers, self.attention, strict=True):
            if isinstance(layer, CrossLayer):
                hidden = _cross(ops, hidden, layer, spec, eps, batch)
            else:
                hidden = _decode(ops, hidden, layer, spec, self._rope, eps, batch)
        return ops.rms_norm(hidden, self._norm, eps)

    def logits(self, ops: Ops, hidden: Tensor) -> Tensor:
        return ops.logits(hidden, self._head)

    def encode_media(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """arrays: pixel_values fp32 [used tiles, channels, size, size], aspect_ratio_ids int64 [1], aspect_ratio_mask
        int64 [max tiles], 1 for used ones -> [used tiles * tile tokens, D]."""
        return self._vision.encode(arrays)

    def write_media(self, ops: Ops, entries: Tensor, kv: Sequence[LayerKV], pages: Tensor) -> None:
        for layer, spec in zip(self._layers, self.attention, strict=True):
            if isinstance(layer, CrossLayer):
                size = spec.kv_heads * spec.head_dim
                k, v = ops.split(ops.linear(entries, layer.kv), (size, size))
                k, v = (part.view(-1, spec.kv_heads, spec.head_dim) for part in (k, v))
                k = ops.rms_norm(k, layer.k_norm, self.config.norm_eps)
                ops.write_items(k, v, kv[spec.layer], pages)


def _decode(
    ops: Ops, hidden: Tensor, layer: Layer, spec: AttentionSpec, rope: RopeTable, eps: float, batch: StepBatch
) -> Tensor:
    x = attend(ops, ops.rms_norm(hidden, layer.attention_norm, eps), layer, spec, rope, eps, batch)
    x, hidden = ops.add_rms_norm(x, hidden, layer.mlp_norm, eps)
    return ops.add(hidden, _mlp(ops, x, layer))


def _mlp(ops: Ops, x: Tensor, layer: Layer | CrossLayer) -> Tensor:
    return ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)


def _cross(ops: Ops, hidden: Tensor, layer: CrossLayer, spec: AttentionSpec, eps: float, batch: StepBatch) -> Tensor:
    """Only the tokens that see an image; text-only steps skip the layer."""
    if batch.cross is None:
        return hidden
    x = ops.take(hidden, batch.cross.tokens)
    q = ops.linear(ops.rms_norm(x, layer.attention_norm, eps), layer.q).view(-1, spec.heads, spec.head_dim)
    seen = ops.cross_attention(ops.rms_norm(q, layer.q_norm, eps), spec, batch)
    x = ops.add(x, ops.scale(ops.linear(seen, layer.output), layer.attention_gate))
    x = ops.add(x, ops.scale(_mlp(ops, ops.rms_norm(x, layer.mlp_norm, eps), layer), layer.mlp_gate))
    return ops.put(hidden, batch.cross.tokens, x)


def _attention_specs(config: ModelConfig, vision: VisionConfig) -> tuple[AttentionSpec, ...]:
    return tuple(
        AttentionSpec(
            layer=layer,
            group=group,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            cross=layer in vision.cross_layers,
        )
        for layer, group in enumerate(config.kv_groups)
    )


def _load_embedding(config: ModelConfig, vision: VisionConfig, weights: Weights) -> tuple[Tensor | Linear, Linear]:
    """-> (embedding, with rows for placeholders at its end; output head, without). Tied: the head is cut from it."""
    name, shape = "model.embed_tokens.weight", (vision.input_vocab, config.hidden)
    if config.tied_embeddings:
        embedding = weights.tensor(name, shape)
        return embedding, weights.prepare(Linear(embedding[: config.vocab_size]))
    return weights.table(name, shape), weights.linear(("lm_head",), (config.vocab_size,), config.hidden, bias=False)


def _load_layer(config: ModelConfig, weights: Weights, index: int) -> Layer | CrossLayer:
    assert config.vision is not None
    if index in config.vision.cross_layers:
        return _load_cross(config, weights, index)
    return load_layer(config, weights, index, "post_attention_layernorm")


def _load_cross(config: ModelConfig, weights: Weights, index: int) -> CrossLayer:
    at = f"model.layers.{index}."
    attn, mlp, hidden = at + "cross_attn.", at + "mlp.", config.hidden
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    gates = (weights.tensor(at + name, (1,), torch.float32) for name in ("cross_attn_attn_gate", "cross_attn_mlp_gate"))
    attention_gate, mlp_gate = (float(gate.tanh()) for gate in gates)
    return CrossLayer(
        attention_norm=weights.norm(at + "input_layernorm", hidden),
        q=weights.linear((attn + "q_proj",), (q,), hidden, False),
        kv=weights.linear((attn + "k_proj", attn + "v_proj"), (kv, kv), hidden, False),
        q_norm=weights.norm(attn + "q_norm", config.head_dim),
        k_norm=weights.norm(attn + "k_norm", config.head_dim),
        output=weights.linear((attn + "o_proj",), (hidden,), q, False),
        attention_gate=attention_gate,
        mlp_norm=weights.norm(at + "post_attention_layernorm", hidden),
        gate_up=weights.linear((mlp + "gate_proj", mlp + "up_proj"), (config.ffn,) * 2, hidden, False),
        down=weights.linear((mlp + "down_proj",), (hidden,), config.ffn, False),
        mlp_gate=mlp_gate,
    )


class VisionTower:
    """transformers' vision model and the projector to the decoder's width."""

    def __init__(self, tower: Any, projector: Linear, ops: Ops) -> None:
        self._tower, self._projector, self._ops = tower, projector, ops

    @classmethod
    def load(cls, vision: VisionConfig, hidden: int, names: _Names, ops: Ops, dtype: torch.dtype) -> VisionTower:
        from transformers.models.mllama.configuration_mllama import MllamaVisionConfig
        from transformers.models.mllama.modeling_mllama import MllamaVisionModel

        settings = MllamaVisionConfig(**json.loads(vision.settings))
        with torch.device("meta"):  # no memory for weights that are replaced at once
            tower = MllamaVisionModel(settings)
        state = {name: names.tensor("vision." + name, dtype) for name in tower.state_dict()}
        for name, value in tower.state_dict().items():
            _check_shape("vision_model." + name, state[name], tuple(value.shape))
        tower.load_state_dict(state, assign=True)
        weight = names.tensor("projector.weight", dtype)
        _check_shape("multi_modal_projector.weight", weight, (hidden, settings.vision_output_dim))
        projector = ops.prepare(Linear(weight, names.tensor("projector.bias", dtype)))
        return cls(tower.eval(), projector, ops)

    def encode(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """The tower computes padding tiles too (real tiles attend to them); they are dropped behind it."""
        tiles, ratio, mask = arrays["pixel_values"], arrays["aspect_ratio_ids"], arrays["aspect_ratio_mask"]
        used = len(tiles)
        pixels = tiles.new_zeros((len(mask), *tiles.shape[1:]))
        pixels[:used] = tiles
        out = self._tower(
            pixel_values=pixels[None, None], aspect_ratio_ids=ratio[None], aspect_ratio_mask=mask[None, None]
        )
        seen: Tensor = out.last_hidden_state[0, 0, :used]  # [tiles, tile tokens, width]
        return self._ops.linear(seen.flatten(0, 1), self._projector)


def _check_shape(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape or not math.prod(shape):
        raise ModelLoadError(f"tensor {name!r} has shape {tuple(value.shape)}, the configuration says {shape}")


class _Names:
    """A checkpoint seen through a plain decoder's names, plus vision.* and projector.*: files name the same tensors in
    two ways, with the decoder outside or inside of "model."."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        inside = any(name.startswith("model.language_model.") for name in checkpoint.names())
        self._prefixes = {
            "model.": "model.language_model." if inside else "language_model.model.",
            "lm_head.": "lm_head." if inside else "language_model.lm_head.",
            "vision.": "model.vision_model." if inside else "vision_model.",
            "projector.": "model.multi_modal_projector." if inside else "multi_modal_projector.",
        }

    def names(self) -> frozenset[str]:
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(self._inner(name))

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._checkpoint.tensor(self._inner(name), dtype)

    def quantised(self, name: str) -> Quantised | None:
        return self._checkpoint.quantised(self._inner(name))

    def fitted(self, name: str, weight: Tensor) -> Quantised | None:
        return self._checkpoint.fitted(self._inner(name), weight)

    def _inner(self, name: str) -> str:
        for prefix, inner in self._prefixes.items():
            if name.startswith(prefix):
                return inner + name.removeprefix(prefix)
        return name
