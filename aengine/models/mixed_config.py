"""What the config.json of gpt-oss and Llama 4 says beyond the common keys: experts, layer kinds, temperature.

Owns: Mixture and Temperature, their reading, and the layer kinds of the two families.
Does not know: the rest of a configuration, tensors.
Invariants: frozen, pure data; a value this build cannot follow raises ModelLoadError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aengine.errors import ModelLoadError

Json = Mapping[str, Any]
# gpt-oss's config.json leaves its rope out where it is the published one.
GPT_OSS_ROPE: Json = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


@dataclass(frozen=True, slots=True)
class Mixture:
    """Layers whose MLP is a mixture of `experts`, of which `per_token` run for a token; `ffn` is one expert's width.

    `layers`: the indices of those layers. `alpha`, `limit`: of the clamped activation (gpt-oss).
    """

    experts: int
    per_token: int
    ffn: int
    layers: tuple[int, ...]
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        if not 0 < self.per_token <= self.experts:
            raise ModelLoadError(f"{self.per_token} experts per token of {self.experts} experts")


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries of layers without rope at position p are scaled by 1 + scale * ln(1 + floor((p + 1) / floor_tokens))."""

    floor_tokens: float
    scale: float


def mixture(config: Json, family: str, layers: int, ffn: int) -> Mixture | None:
    if family == "gpt_oss":
        return Mixture(
            experts=int(config.get("num_local_experts") or config.get("num_experts") or 128),
            per_token=int(config.get("num_experts_per_tok") or config.get("experts_per_token") or 4),
            ffn=ffn,
            layers=tuple(range(layers)),
            alpha=float(config.get("swiglu_alpha") or 1.702),
            limit=float(config.get("swiglu_limit") or 7.0),
        )
    if family != "llama4":
        return None
    step = int(config.get("interleave_moe_layer_step") or 1)
    named = config.get("moe_layers")
    return Mixture(
        experts=int(config.get("num_local_experts") or 16),
        per_token=int(config.get("num_experts_per_tok") or 1),
        ffn=int(config.get("intermediate_size") or 8192),
        layers=tuple(range(step - 1, layers, step) if named is None else map(int, named)),
    )


def temperature(config: Json, family: str) -> Temperature | None:
    if family != "llama4" or not config.get("attn_temperature_tuning", True):
        return None
    return Temperature(float(config.get("floor_scale") or 8192), float(config.get("attn_scale") or 0.1))


def roped_layers(config: Json, family: str, layers: int) -> tuple[bool, ...]:
    """Which layers rotate q and k. config.json's no_rope_layers holds 1 for those that do."""
    if family != "llama4":
        return (True,) * layers
    marks = config.get("no_rope_layers")
    if not marks:
        every = int(config.get("no_rope_layer_interval") or 4)
        marks = [(index + 1) % every for index in range(layers)]
    return tuple(bool(mark) for mark in marks[:layers])


def chunks(config: Json, family: str, layers: int, max_positions: int) -> tuple[int, ...]:
    """Attention chunk of each layer in tokens; 0 where attention is full or a chunk is as long as the context."""
    size = config.get("attention_chunk_size", 8192) if family == "llama4" else None
    if not size or size >= max_positions:
        return (0,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(int(size) if roped else 0 for roped in roped_layers(config, family, layers))
    check_kinds(kinds, ("full_attention", "chunked_attention"))
    return tuple(int(size) if kind == "chunked_attention" else 0 for kind in kinds)


def check_kinds(kinds: list[str], supported: tuple[str, ...]) -> None:
    unknown = sorted(set(kinds) - set(supported))
    if unknown:
        raise ModelLoadError(f"config.json: layer_types {unknown} are not supported")
