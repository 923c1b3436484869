"""Every family against transformers on tiny random models: logits of a whole sequence, and rope tables bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from aengine.errors import ModelLoadError
from aengine.kernels.reference import ReferenceOps
from aengine.models import loader
from aengine.models.rope import rope_table

TOKENS = 40
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LAYERS = ["full_attention", "sliding_attention", "full_attention"]

CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": (LlamaForCausalLM, LlamaConfig, {"head_dim": 16}),
    "llama-mha": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "linear": (
        LlamaForCausalLM, LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN}),
    "yarn-factor": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN | {"attention_factor": 0.7}}),
    "yarn-mscale": (
        LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5}},
    ),
    "yarn-untruncated": (
        LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN | {"truncate": False, "beta_fast": 8.0}},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": 7}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (
        Qwen2ForCausalLM, Qwen2Config, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen3-layers": (
        Qwen3ForCausalLM, Qwen3Config, {"use_sliding_window": True, "sliding_window": 6, "layer_types": LAYERS},
    ),
    "gemma3": (
        Gemma3ForCausalLM, Gemma3TextConfig,
        {"sliding_window": 5, "layer_types": LAYERS, "query_pre_attn_scalar": 20, "head_dim": 16},
    ),
    "gemma3-linear": (
        Gemma3ForCausalLM, Gemma3TextConfig,
        {
            "sliding_window": 5, "layer_types": LAYERS,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}  # fmt: skip


def make(name):
    """A random model whose biases and norms are not the neutral values they start with."""
    model_class, config_class, changes = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    model = model_class(config_class(**(TINY | changes))).float().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            scale = 0.3 if value.ndim == 1 else 0.15
            value.add_(torch.randn_like(value) * scale) if "norm" in key else value.copy_(
                torch.randn_like(value) * scale
            )
    return model


def reference(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def random_ids(seed=0):
    return torch.randint(0, TINY["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name, tmp_path, hf_files, full_logits):
    theirs = make(name)
    theirs.save_pretrained(tmp_path / "model")
    ours = loader.load_model(hf_files(tmp_path / "model"), ReferenceOps(), torch.float32)
    ids = random_ids()
    got, want = full_logits(ours, ids), reference(theirs, ids)
    assert got.shape == (TOKENS, TINY["vocab_size"])
    assert (got - want).abs().max() < 1e-4
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("name", CASES)
def test_rope_tables_equal_transformers_bit_for_bit(name, tmp_path, hf_files):
    theirs = make(name)
    theirs.save_pretrained(tmp_path / "model")
    config = loader.load_config(hf_files(tmp_path / "model"))
    positions = torch.arange(config.max_positions)
    kinds = {"full_attention": config.rope, "sliding_attention": config.local_rope} if config.local_rope else {}
    for kind, rope in (kinds or {None: config.rope}).items():
        arguments = (kind,) if kind else ()
        cos, sin = theirs.model.rotary_emb(torch.zeros(1), positions.unsqueeze(0), *arguments)
        table = rope_table(rope, config.max_positions)
        half = config.head_dim // 2
        assert torch.equal(table.cos, cos[0, :, :half])
        assert torch.equal(table.sin, sin[0, :, :half])


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_sharded_and_single_files_give_the_same_model(name, tmp_path, hf_files, full_logits):
    theirs = make(name)
    theirs.save_pretrained(tmp_path / "single")
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    models = [
        loader.load_model(hf_files(tmp_path / folder), ReferenceOps(), torch.float32)
        for folder in ("single", "sharded")
    ]
    first, second = (full_logits(model, random_ids(1)) for model in models)
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen2", "qwen3", "gemma3"])
def test_configuration_of_the_fourth_version_is_read_alike(name, tmp_path, hf_files):
    """rope_theta, rope_scaling and rope_local_base_freq beside each other, as before `rope_parameters`."""
    make(name).save_pretrained(tmp_path / "new")
    values = json.loads((tmp_path / "new/config.json").read_text())
    parameters = values.pop("rope_parameters")
    if name == "gemma3":
        values["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    values["rope_theta"] = parameters.pop("rope_theta")
    values["rope_scaling"] = parameters if parameters["rope_type"] != "default" else None
    (tmp_path / "old").mkdir()
    (tmp_path / "old/config.json").write_text(json.dumps(values))
    assert loader.load_config(hf_files(tmp_path / "old")) == loader.load_config(hf_files(tmp_path / "new"))


def test_bf16_is_close_to_fp32(tmp_path, hf_files, full_logits):
    make("llama").save_pretrained(tmp_path / "model")
    files, ids = hf_files(tmp_path / "model"), random_ids(2)
    wide = full_logits(loader.load_model(files, ReferenceOps(), torch.float32), ids)
    narrow = full_logits(loader.load_model(files, ReferenceOps(), torch.bfloat16), ids)
    assert narrow.dtype == torch.float32
    assert (wide - narrow).abs().max() < 0.1 * wide.abs().max()


def test_attention_specs_say_where_kv_lives(tmp_path, hf_files):
    expected = {
        "llama": [(0, 0), (0, 0), (0, 0)],
        "mistral-window": [(0, 7), (0, 7), (0, 7)],
        "qwen2-window": [(0, 0), (1, 5), (1, 5)],
        "gemma3": [(0, 0), (1, 5), (0, 0)],
    }
    for name, wanted in expected.items():
        make(name).save_pretrained(tmp_path / name)
        model = loader.load_model(hf_files(tmp_path / name), ReferenceOps(), torch.float32)
        assert [(spec.group, spec.window) for spec in model.attention] == wanted
        assert [spec.layer for spec in model.attention] == [0, 1, 2]
        assert (model.vocab_size, model.max_context, model.dtype) == (97, 64, torch.float32)


def test_progress_counts_layers(tmp_path, hf_files):
    make("qwen3").save_pretrained(tmp_path / "model")
    calls = []
    loader.load_model(hf_files(tmp_path / "model"), ReferenceOps(), torch.float32, lambda *args: calls.append(args))
    assert calls == [("load weights", done, 3) for done in (1, 2, 3)]


def test_a_missing_tensor_is_named(tmp_path, hf_files):
    theirs = make("llama")
    tensors = {key: value for key, value in theirs.state_dict().items() if "layers.1.mlp.up_proj" not in key}
    theirs.save_pretrained(tmp_path / "model", state_dict=tensors)
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*layers\.0\.mlp\.up_proj"):
        loader.load_model(hf_files(tmp_path / "model"), ReferenceOps(), torch.float32)


def test_a_shape_that_contradicts_the_configuration_is_named(tmp_path, hf_files):
    make("llama").save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 48', '"intermediate_size": 50'))
    with pytest.raises(ModelLoadError, match=r"shape \(48, 32\), the configuration says \(50, 32\)"):
        loader.load_model(hf_files(tmp_path / "model"), ReferenceOps(), torch.float32)
