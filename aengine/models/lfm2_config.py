"""LFM2's config.json in the common keys.

Owns: the keys only LFM2 has, their older spellings and defaults.
Does not know: ModelConfig, tensors.
Invariants: pure; what it does not understand raises ModelLoadError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aengine.errors import ModelLoadError
from aengine.models.bounds import checked_layers

Json = Mapping[str, Any]
ROPE_THETA = 1_000_000.0


def common_keys(config: Json) -> dict[str, Any]:
    """The configuration as one of the llama kind would say it; `layer_types` is left to `conv_layers`."""
    out = {key: value for key, value in config.items() if key not in ("layer_types", "sliding_window")}
    out["intermediate_size"] = _mlp_size(config)
    out["rms_norm_eps"] = config.get("norm_eps", 1e-5)
    out["tie_word_embeddings"] = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    out["rope_theta"] = config.get("rope_theta") or ROPE_THETA
    return out


def conv_layers(config: Json) -> tuple[bool, ...]:
    """Which layers are short convolutions; the others attend."""
    layers = checked_layers(int(config.get("num_hidden_layers") or 0))
    kinds = config.get("layer_types")
    if kinds is None:
        attending = config.get("full_attn_idxs")
        attending = range(layers) if attending is None else attending
        kinds = ["full_attention" if index in attending else "conv" for index in range(layers)]
    unknown = sorted(set(kinds) - {"conv", "full_attention"})
    if unknown:
        raise ModelLoadError(f"config.json: layer_types {unknown} are not supported")
    if len(kinds) != layers or len(set(kinds)) != 2:
        raise ModelLoadError(
            f"config.json: layer_types {list(kinds)} for {layers} layers: LFM2 has layers of both kinds"
        )
    return tuple(kind == "conv" for kind in kinds)


def conv_kernel(config: Json) -> int:
    """Tokens that one output of a convolution sees, its own included."""
    taps = int(config.get("conv_L_cache", 3))
    if taps < 2:
        raise ModelLoadError(f"config.json: conv_L_cache is {taps}; a convolution of at least 2 tokens is supported")
    return taps


def _mlp_size(config: Json) -> int:
    """The size in the file is that of an MLP without gate; two thirds of it, scaled and rounded up, make one with."""
    size = config.get("block_ff_dim", config.get("intermediate_size"))
    if not isinstance(size, int) or size <= 0:
        raise ModelLoadError(f"config.json: intermediate_size is {size!r}, not a positive integer")
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), int(config.get("block_multiple_of", 256))
    return size if factor is None else -(-int(factor * size) // multiple) * multiple
