"""Hugging Face configurations: what is read, what is refused."""

from __future__ import annotations

import json

import pytest

from aengine.errors import ModelLoadError
from aengine.models.config import ModelConfig, config_from_folder, config_from_hf

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "eos_token_id": 2,
}


def llama(**changes) -> ModelConfig:
    return config_from_hf(LLAMA | changes)


def test_defaults_of_old_files():
    config = llama()
    assert (config.family, config.kv_heads, config.head_dim) == ("llama", 8, 8)
    assert (config.max_positions, config.norm_eps, config.rope.theta) == (2048, 1e-6, 1e4)
    assert (config.tied_embeddings, config.qkv_bias, config.qk_norm) == (False, False, False)
    assert config.windows == (0, 0, 0, 0)
    assert config.attention_scale == 8**-0.5
    assert config.eos_ids == (2,)


def test_architecture_may_follow_from_the_model_type():
    values = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert config_from_hf(values | {"model_type": "qwen2"}).qkv_bias
    with pytest.raises(ModelLoadError, match="model_type None; supported are LlamaForCausalLM, MistralForCausalLM"):
        config_from_hf(values)


def test_unknown_architecture_lists_the_supported():
    with pytest.raises(ModelLoadError, match=r"MambaForCausalLM; supported are Llama.*Gemma3ForCausalLM"):
        llama(architectures=["MambaForCausalLM"])


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope"])
def test_unknown_rope_types_are_errors(key, kind):
    with pytest.raises(ModelLoadError, match=f"rope type '{kind}' is not supported; supported are default, linear"):
        llama(**{key: {"type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "activation 'relu' is unknown"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' has no factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "needs low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_key_value_heads": 3}, "8 heads do not divide into 3"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised by 'hqq'"),
    ],
)
def test_what_would_change_the_result_is_refused(changes, message):
    with pytest.raises(ModelLoadError, match=message):
        llama(**changes)


def test_windows_only_where_they_are_used():
    def mistral(**changes):
        return llama(architectures=["MistralForCausalLM"], max_position_embeddings=1000, **changes).windows

    assert mistral(sliding_window=100) == (100,) * 4
    assert mistral(sliding_window=None) == (0,) * 4
    assert mistral(sliding_window=1000) == (0,) * 4  # as long as the context: never seen
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9}
    assert llama(**qwen).windows == (0,) * 4
    assert llama(**qwen, use_sliding_window=True, max_window_layers=3).windows == (0, 0, 0, 9)
    assert llama(**qwen, use_sliding_window=True).sliding_window == 0  # no layer beyond the default 28
    with pytest.raises(ModelLoadError, match="linear_attention"):
        llama(**qwen, use_sliding_window=True, layer_types=["linear_attention"] * 4)


def test_generation_config_overrules_the_end_ids(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert config_from_folder(tmp_path).eos_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert config_from_folder(tmp_path).eos_ids == (7, 8)
    (tmp_path / "generation_config.json").write_text("{}")
    assert config_from_folder(tmp_path).eos_ids == (2,)


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read as JSON"), ("[]", "a JSON list, not an object")])
def test_broken_files_are_typed_errors(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=message):
        config_from_folder(tmp_path)


def test_no_file_is_a_typed_error(tmp_path):
    with pytest.raises(ModelLoadError, match="cannot be read"):
        config_from_folder(tmp_path)
