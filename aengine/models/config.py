"""What a model is: one normalised description of a decoder, whatever file it came from.

Owns: ModelConfig and RopeConfig, and their making from a Hugging Face config.json.
Does not know: tensors, tokenizers, GGUF (see gguf_config).
Invariants: frozen, pure data (no torch). Nothing that changes the result is ignored: an unknown architecture, rope
type, activation or layout raises ModelLoadError that names what is supported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from aengine.errors import ModelLoadError
from aengine.models import lfm2_config, mixed_config
from aengine.models.bounds import checked_layers
from aengine.models.mixed_config import Mixture, Temperature
from aengine.models.quant_method import QuantMethod, quant_method
from aengine.models.vision_config import VisionConfig, text_part, vision_part

Json = Mapping[str, Any]
Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt_oss", "llama4", "lfm2", "mllama"]
RopeType = Literal["default", "linear", "llama3", "yarn", "factors"]

ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "MllamaForConditionalGeneration": "mllama",
    "Lfm2ForCausalLM": "lfm2",
    "GptOssForCausalLM": "gpt_oss",
    "Llama4ForCausalLM": "llama4",
}
_MODEL_TYPES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "mllama": "MllamaForConditionalGeneration",
    "lfm2": "Lfm2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
}
# What a config.json of the family means when it leaves a key out.
_MAX_POSITIONS: Mapping[Family, int] = {
    "llama": 2048,
    "mistral": 131_072,
    "qwen2": 32_768,
    "qwen3": 32_768,
    "gemma3": 131_072,
    "mllama": 131_072,
    "lfm2": 128_000,
    "gpt_oss": 131_072,
    "llama4": 131_072,
}
_HEAD_DIMS: Mapping[Family, int] = {"gemma3": 256, "gpt_oss": 64, "llama4": 128}
_EIGHT_KV_HEADS = ("mistral", "gpt_oss", "llama4")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ACTIVATIONS: Mapping[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of `dim` elements per head. Lengths in tokens.

    `factor` stretches positions (linear, yarn) or divides long wavelengths (llama3). `attention_factor` scales cos and
    sin (yarn; None: derived from `factor`). Type "factors": the checkpoint's tensor `rope_freqs.weight` [dim / 2]
    divides the frequencies (GGUF's form of llama3).
    """

    theta: float
    dim: int
    type: RopeType = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. `windows[l]`: sliding window of layer l in tokens, 0 = full attention.

    `attention_scale` multiplies q·k. `local_rope`: the rope of window layers where it differs. `eos_ids`: every id
    that ends generation, the main one first. `norm_offset`: added to stored norm weights (Gemma keeps w - 1).
    `chunks[l]`: attention chunk of layer l in tokens, 0 = none; `roped[l]`: whether it rotates q and k. Both empty: as
    for every layer 0 and True. `conv_layers[l]`: layer l is a short convolution over `conv_kernel` tokens in place of
    attention; empty: none is. `quantised`: how the weights of linears are stored; None: as plain numbers.
    """

    family: Family
    architecture: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    max_positions: int
    windows: tuple[int, ...]
    attention_scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0
    norm_offset: float = 0.0
    local_rope: RopeConfig | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    roped: tuple[bool, ...] = ()
    mixture: Mixture | None = None
    temperature: Temperature | None = None
    vision: VisionConfig | None = None
    conv_layers: tuple[bool, ...] = ()
    conv_kernel: int = 0
    conv_bias: bool = False
    quantised: QuantMethod | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise ModelLoadError(f"{self.architecture}: {name} is {value!r}, not a positive integer")
        if self.heads % self.kv_heads:
            raise ModelLoadError(f"{self.heads} heads do not divide into {self.kv_heads} kv heads")
        if self.head_dim % 2 or self.rope.dim % 2 or self.rope.dim > self.head_dim:
            raise ModelLoadError(f"rotary dimension {self.rope.dim} does not fit a head of {self.head_dim}")
        if len(self.windows) != self.layers:
            raise ModelLoadError(f"{len(self.windows)} layer types for {self.layers} layers")

    @property
    def sliding_window(self) -> int:
        """The window of the window layers in tokens; 0 when every layer is full."""
        return max(self.windows)

    @property
    def kv_groups(self) -> tuple[int, ...]:
        """KV group of each layer. Full layers are group 0; window, chunk and cross layers 1, or 0 when there are no
        full ones."""
        if self.vision is not None:
            return tuple(int(layer in self.vision.cross_layers) for layer in range(self.layers))
        spans = [window or chunk for window, chunk in zip(self.windows, self.layer_chunks, strict=True)]
        return tuple(int(0 in spans and span > 0) for span in spans)

    @property
    def layer_chunks(self) -> tuple[int, ...]:
        """`chunks`, one for each layer."""
        return self.chunks or (0,) * self.layers


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelLoadError when the file is missing, not JSON or not an object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def config_from_folder(folder: Path) -> ModelConfig:
    """config.json, with generation_config.json's end-of-sequence ids where that file exists."""
    generation = folder / "generation_config.json"
    return config_from_hf(read_json(folder / "config.json"), read_json(generation) if generation.exists() else {})


def config_from_hf(config: Json, generation: Json | None = None) -> ModelConfig:
    """Raises ModelLoadError for architectures, rope types and activations this build does not have."""
    architecture = _architecture(config)
    family, quantised = ARCHITECTURES[architecture], quant_method(config)
    whole = config
    if family == "mllama":
        config = text_part(config)
    convs: tuple[bool, ...] = ()
    if family == "lfm2":
        convs, config = lfm2_config.conv_layers(config), lfm2_config.common_keys(config)
    heads, hidden = _int(config, "num_attention_heads"), _int(config, "hidden_size")
    gemma, layers = family == "gemma3", checked_layers(_int(config, "num_hidden_layers"))
    head_dim = int(config.get("head_dim") or _HEAD_DIMS.get(family) or hidden // heads)
    max_positions = int(config.get("max_position_embeddings") or _MAX_POSITIONS[family])
    rope, local_rope = _ropes(config, family, head_dim, max_positions)
    _refuse_softcaps(config)
    return ModelConfig(
        family=family,
        architecture=architecture,
        vocab_size=_int(config, "vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or (8 if family in _EIGHT_KV_HEADS else heads)),
        head_dim=head_dim,
        ffn=_int(config, "intermediate_size_mlp" if family == "llama4" else "intermediate_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-5 if family in ("gpt_oss", "llama4") else 1e-6)),
        rope=rope,
        local_rope=local_rope,
        tied_embeddings=bool(config.get("tie_word_embeddings", gemma)),
        max_positions=max_positions,
        windows=_windows(config, family, layers, max_positions),
        attention_scale=float(config.get("query_pre_attn_scalar", 256) if gemma else head_dim) ** -0.5,
        qkv_bias=family == "qwen2" or bool(config.get("attention_bias", family == "gpt_oss")),
        o_bias=family != "qwen2" and bool(config.get("attention_bias", family == "gpt_oss")),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "gemma3") or (family == "llama4" and bool(config.get("use_qk_norm", True))),
        activation=_activation(config, gemma),
        embed_scale=float(hidden) ** 0.5 if gemma else 1.0,
        norm_offset=1.0 if gemma else 0.0,
        bos_id=config.get("bos_token_id"),
        eos_ids=eos_ids(config, generation or {}),
        chunks=mixed_config.chunks(config, family, layers, max_positions),
        roped=mixed_config.roped_layers(config, family, layers),
        mixture=mixed_config.mixture(config, family, layers, _int(config, "intermediate_size")),
        temperature=mixed_config.temperature(config, family),
        vision=vision_part(whole, layers, _int(config, "vocab_size")) if family == "mllama" else None,
        conv_layers=convs,
        conv_kernel=lfm2_config.conv_kernel(config) if convs else 0,
        conv_bias=bool(convs) and bool(config.get("conv_bias", False)),
        quantised=quantised,
    )


def eos_ids(config: Json, generation: Json) -> tuple[int, ...]:
    """The end-of-sequence ids: generation_config.json's where it has any, else config.json's."""
    for source in (generation, config):
        value = source.get("eos_token_id")
        if value is not None:
            return tuple(int(token) for token in value) if isinstance(value, Sequence) else (int(value),)
    return ()


def _architecture(config: Json) -> str:
    named = list(config.get("architectures") or [])
    if not named and config.get("model_type") in _MODEL_TYPES:
        named = [_MODEL_TYPES[config["model_type"]]]
    for name in named:
        if name in ARCHITECTURES:
            return str(name)
    what = ", ".join(map(str, named)) or f"model_type {config.get('model_type')!r}"
    raise ModelLoadError(f"unsupported architecture {what}; supported are {', '.join(ARCHITECTURES)}")


def _int(config: Json, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelLoadError(f"config.json: {key} is {value!r}, not a positive integer")
    return value


def _activation(config: Json, gemma: bool) -> Literal["silu", "gelu_tanh"]:
    name = (config.get("hidden_activation") or "gelu_pytorch_tanh") if gemma else config.get("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise ModelLoadError(f"config.json: activation {name!r} is unknown; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _refuse_softcaps(config: Json) -> None:
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if config.get(key) is not None:
            raise ModelLoadError(f"config.json: {key} {config[key]} is not supported for {config.get('model_type')}")
    if config.get("use_bidirectional_attention"):
        raise ModelLoadError("config.json: use_bidirectional_attention is not supported: this is a causal decoder")


def _windows(config: Json, family: Family, layers: int, max_positions: int) -> tuple[int, ...]:
    """Window of each layer, 0 where attention is full or the window is as long as the context."""
    window = config.get("sliding_window", {"mistral": 4096, "gemma3": 4096, "gpt_oss": 128}.get(family))
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        window = None
    if family in ("llama", "llama4", "mllama") or not window or window >= max_positions:
        return (0,) * layers
    return tuple(int(window) if local else 0 for local in _local_layers(config, family, layers))


def _local_layers(config: Json, family: Family, layers: int) -> list[bool]:
    kinds = config.get("layer_types")
    if kinds is not None and family != "mistral":
        mixed_config.check_kinds(kinds, ("full_attention", "sliding_attention"))
        return [kind == "sliding_attention" for kind in kinds]
    if family == "gemma3":
        pattern = int(config.get("sliding_window_pattern") or 6)
        return [(index + 1) % pattern != 0 for index in range(layers)]
    if family == "gpt_oss":
        return [index % 2 == 0 for index in range(layers)]
    first = int(config.get("max_window_layers", 28)) if family in ("qwen2", "qwen3") else 0
    return [index >= first for index in range(layers)]


def _ropes(config: Json, family: Family, dim: int, max_positions: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Accepts `rope_parameters` (flat, or by layer type for Gemma) and the older rope_theta + rope_scaling."""
    parameters = dict(config.get("rope_parameters") or {})
    scaling = dict(config.get("rope_scaling") or {})
    if family != "gemma3":
        theta = config.get("rope_theta") or {"gpt_oss": 150_000.0, "llama4": 500_000.0}.get(family, 10_000.0)
        if family == "gpt_oss" and not parameters and not scaling:
            parameters = dict(mixed_config.GPT_OSS_ROPE)
        return _rope({"rope_theta": theta, **parameters, **scaling}, config, dim, max_positions), None
    full = {"rope_theta": config.get("rope_theta") or 1e6, **(parameters.get("full_attention") or {}), **scaling}
    theta = config.get("rope_local_base_freq") or 10_000.0
    local = {"rope_theta": theta, **(parameters.get("sliding_attention") or {})}
    return _rope(full, config, dim, max_positions), _rope(local, config, dim, max_positions)


def _rope(values: Json, config: Json, dim: int, max_positions: int) -> RopeConfig:
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise ModelLoadError(
            f"config.json: rope type {kind!r} is not supported; supported are {', '.join(_ROPE_TYPES)}"
        )
    for source in (values, config):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ModelLoadError(
                f"config.json: partial_rotary_factor {source['partial_rotary_factor']} is not supported"
            )
    original = config.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    original = int(original or max_positions)
    factor = values.get("factor")
    if factor is None and kind in ("linear", "llama3"):
        raise ModelLoadError(f"config.json: rope type {kind!r} has no factor")
    if kind == "llama3" and not {"low_freq_factor", "high_freq_factor"} <= set(values):
        raise ModelLoadError("config.json: rope type 'llama3' needs low_freq_factor and high_freq_factor")
    attention_factor = values.get("attention_factor")
    return RopeConfig(
        theta=float(values["rope_theta"]),
        dim=dim,
        type=cast(RopeType, kind),
        factor=float(factor if factor is not None else max_positions / original),
        original_max_positions=original,
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        attention_factor=None if attention_factor is None else float(attention_factor),
        beta_fast=float(values.get("beta_fast") or 32),
        beta_slow=float(values.get("beta_slow") or 1),
        mscale=float(values.get("mscale") or 0),
        mscale_all_dim=float(values.get("mscale_all_dim") or 0),
        truncate=bool(values.get("truncate", True)),
    )
