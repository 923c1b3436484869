"""ModelConfig from GGUF metadata.

Owns: GGUF's key names for hyper-parameters, and what its architectures mean.
Does not know: tensor values (only names and shapes), tokenizers beyond the special token ids.
Invariants: as config: an unknown architecture or rope type raises ModelLoadError, nothing is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from aengine.errors import ModelLoadError
from aengine.models.bounds import checked_layers
from aengine.models.config import Family, ModelConfig, RopeConfig, RopeType
from aengine.models.gguf import GGUFFile, GGUFValue

# GGUF architecture -> (family, name of the same architecture in Hugging Face form). "llama" is Mistral's too.
GGUF_ARCHITECTURES: Mapping[str, tuple[Family, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3", "Gemma3ForCausalLM"),
}
GEMMA3_PATTERN = 6  # every sixth layer is full; the file does not say so
GEMMA3_LOCAL_THETA = 10_000.0  # nor this
GEMMA3_27B_LAYERS, GEMMA3_27B_QUERY_SCALAR = 62, 168  # 5376 / 32; other sizes scale by their head_dim of 256
_SCALINGS: Mapping[str, RopeType] = {"none": "default", "linear": "linear", "yarn": "yarn"}


class _Keys:
    """Metadata keys of one architecture, typed."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture

    def value(self, name: str) -> GGUFValue | None:
        return self.file.metadata.get(f"{self.architecture}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        value = self.value(name)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = int(value[0])  # one entry per layer, all alike
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or value < 0:
            shown = "missing" if value is None else repr(value)
            raise ModelLoadError(f"{self.file.path}: {self.architecture}.{name} is {shown}, not a single count")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.value(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float):
            raise ModelLoadError(f"{self.file.path}: {self.architecture}.{name} is {value!r}, not a number")
        return float(value)


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Raises ModelLoadError for architectures and rope types this build does not have."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        supported = ", ".join(GGUF_ARCHITECTURES)
        raise ModelLoadError(f"{file.path}: unsupported GGUF architecture {architecture!r}; supported are {supported}")
    keys = _Keys(file, str(architecture))
    if keys.count("expert_count", 0):
        raise ModelLoadError(f"{file.path}: mixture of {keys.count('expert_count')} experts is not supported")
    if "token_embd.weight" not in file.tensors:
        raise ModelLoadError(f"{file.path}: has no tensor token_embd.weight")
    return _config(file, keys, *GGUF_ARCHITECTURES[str(architecture)])


def _config(file: GGUFFile, keys: _Keys, family: Family, architecture: str) -> ModelConfig:
    heads, hidden, gemma = keys.count("attention.head_count"), keys.count("embedding_length"), family == "gemma3"
    head_dim = keys.count("attention.key_length", hidden // max(heads, 1))
    if keys.count("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(f"{file.path}: value heads of another size than key heads ({head_dim})")
    rope = _rope(file, keys, head_dim, 1e6 if gemma else 10_000.0)
    layers, max_positions = checked_layers(keys.count("block_count")), keys.count("context_length")
    return ModelConfig(
        family=family,
        architecture=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=keys.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=keys.count("feed_forward_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope=rope,
        local_rope=RopeConfig(theta=GEMMA3_LOCAL_THETA, dim=head_dim) if gemma else None,
        tied_embeddings="output.weight" not in file.tensors,
        max_positions=max_positions,
        windows=_windows(keys, family, layers, max_positions),
        attention_scale=_attention_scale(gemma, layers, head_dim),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        activation="gelu_tanh" if gemma else "silu",
        embed_scale=float(hidden) ** 0.5 if gemma else 1.0,
        norm_offset=0.0,  # GGUF files hold Gemma's norms with the one already added
        bos_id=special_id(file, "bos"),
        eos_ids=gguf_eos_ids(file),
    )


def special_id(file: GGUFFile, kind: str) -> int | None:
    """The id under tokenizer.ggml.<kind>_token_id, None when the file has none."""
    value = file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
    return value if isinstance(value, int) else None


def gguf_eos_ids(file: GGUFFile) -> tuple[int, ...]:
    """End of sequence, of turn and of message, in this order, each once."""
    found = (special_id(file, kind) for kind in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _attention_scale(gemma: bool, layers: int, head_dim: int) -> float:
    if gemma and layers == GEMMA3_27B_LAYERS:
        return float(GEMMA3_27B_QUERY_SCALAR**-0.5)
    return float(head_dim**-0.5)


def _windows(keys: _Keys, family: Family, layers: int, max_positions: int) -> tuple[int, ...]:
    window = keys.count("attention.sliding_window", 0)
    if not window or window >= max_positions:
        return (0,) * layers
    pattern = keys.count("attention.sliding_window_pattern", GEMMA3_PATTERN) if family == "gemma3" else layers + 1
    return tuple(window if (index + 1) % pattern else 0 for index in range(layers))


def _rope(file: GGUFFile, keys: _Keys, head_dim: int, theta: float) -> RopeConfig:
    scaling = keys.value("rope.scaling.type")
    legacy = keys.number("rope.scale_linear", 1.0)
    kind = str(scaling) if scaling is not None else ("linear" if legacy != 1.0 else "none")
    if kind not in _SCALINGS:
        supported = ", ".join(_SCALINGS)
        raise ModelLoadError(f"{file.path}: rope scaling {kind!r} is not supported; supported are {supported}")
    factors = "rope_freqs.weight" in file.tensors
    if factors and kind != "none":
        raise ModelLoadError(f"{file.path}: rope scaling {kind!r} together with rope_freqs.weight is not supported")
    factor = keys.number("rope.scaling.factor", legacy)
    attention_factor = keys.value("rope.scaling.attn_factor")
    return RopeConfig(
        theta=keys.number("rope.freq_base", theta),
        dim=keys.count("rope.dimension_count", head_dim),
        type="factors" if factors else _SCALINGS[kind],
        factor=factor,
        original_max_positions=keys.count("rope.scaling.original_context_length", keys.count("context_length")),
        attention_factor=None if attention_factor is None else keys.number("rope.scaling.attn_factor"),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )
