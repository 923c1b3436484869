"""gpt-oss and Llama 4 against transformers on tiny random models: logits of a whole sequence, settings, experts."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, Llama4ForCausalLM, Llama4TextConfig

from aengine.errors import ModelLoadError
from aengine.kernels.ops import Experts, Linear
from aengine.kernels.reference import ReferenceOps
from aengine.models import loader
from aengine.models.config import config_from_hf
from aengine.models.rope import rope_table

TOKENS = 60
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
GPT_OSS = TINY | {"num_experts_per_tok": 2, "sliding_window": 7, "rope_parameters": YARN}
LLAMA4 = TINY | {"intermediate_size_mlp": 40, "attention_chunk_size": 12, "floor_scale": 8}
CASES = {
    "gpt-oss": (GptOssForCausalLM, GptOssConfig, GPT_OSS),
    "gpt-oss-low-limit": (GptOssForCausalLM, GptOssConfig, GPT_OSS | {"swiglu_limit": 0.3, "swiglu_alpha": 1.3}),
    "gpt-oss-all-experts": (GptOssForCausalLM, GptOssConfig, GPT_OSS | {"num_experts_per_tok": 4}),
    "gpt-oss-plain-rope": (
        GptOssForCausalLM, GptOssConfig, GPT_OSS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "llama4": (Llama4ForCausalLM, Llama4TextConfig, LLAMA4),
    "llama4-dense-between": (Llama4ForCausalLM, Llama4TextConfig, LLAMA4 | {"interleave_moe_layer_step": 2}),
    "llama4-two-experts": (Llama4ForCausalLM, Llama4TextConfig, LLAMA4 | {"num_experts_per_tok": 2}),
    "llama4-no-norm": (Llama4ForCausalLM, Llama4TextConfig, LLAMA4 | {"use_qk_norm": False}),
    "llama4-no-temperature": (Llama4ForCausalLM, Llama4TextConfig, LLAMA4 | {"attn_temperature_tuning": False}),
    "llama4-bias": (Llama4ForCausalLM, Llama4TextConfig, LLAMA4 | {"attention_bias": True}),
    "llama4-all-full": (Llama4ForCausalLM, Llama4TextConfig, LLAMA4 | {"attention_chunk_size": None}),
}  # fmt: skip


def make(name):
    """A random model whose biases, sinks and norms are not the neutral values they start with."""
    model_class, config_class, changes = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    model = model_class(config_class(**changes)).float().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key:
                value.add_(torch.randn_like(value) * 0.3)
            elif "sinks" in key:
                value.copy_(torch.randn_like(value) * 2.0)
            else:
                value.copy_(torch.randn_like(value) * (0.3 if value.ndim == 1 else 0.2))
    return model


def random_ids(seed=0):
    return torch.randint(0, TINY["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name, tmp_path, hf_files, full_logits):
    theirs = make(name)
    theirs.save_pretrained(tmp_path / "model")
    ours = loader.load_model(hf_files(tmp_path / "model"), ReferenceOps(), torch.float32)
    ids = random_ids()
    got = full_logits(ours, ids)
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0]
    assert (got - want).abs().max() < 1e-4 * max(1.0, float(want.abs().max()))
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_yarn_of_gpt_oss_equals_transformers_bit_for_bit(tmp_path, hf_files):
    theirs = make("gpt-oss")
    theirs.save_pretrained(tmp_path / "model")
    config = loader.load_config(hf_files(tmp_path / "model"))
    cos, sin = theirs.model.rotary_emb(torch.zeros(1), torch.arange(config.max_positions).unsqueeze(0))
    table = rope_table(config.rope, config.max_positions)
    assert torch.equal(table.cos, cos[0])
    assert torch.equal(table.sin, sin[0])


@pytest.mark.parametrize("name", ["gpt-oss", "llama4"])
def test_keys_left_out_mean_what_the_family_means_by_them(name, tmp_path):
    """A config.json with only the sizes reads as one with every derived key."""
    make(name).save_pretrained(tmp_path / "model")
    whole = json.loads((tmp_path / "model/config.json").read_text())
    derived = ("layer_types", "moe_layers", "no_rope_layers", "swiglu_alpha", "swiglu_limit", "attention_bias")
    bare = {key: value for key, value in whole.items() if key not in derived}
    assert config_from_hf(bare) == config_from_hf(whole)


def test_layers_alternate_between_two_groups(tmp_path, hf_files):
    expected = {
        "gpt-oss": [(1, 7, 0), (0, 0, 0), (1, 7, 0), (0, 0, 0)],
        "llama4": [(1, 0, 12), (1, 0, 12), (1, 0, 12), (0, 0, 0)],
        "llama4-all-full": [(0, 0, 0)] * 4,
    }
    for name, wanted in expected.items():
        make(name).save_pretrained(tmp_path / name)
        model = loader.load_model(hf_files(tmp_path / name), ReferenceOps(), torch.float32)
        assert [(spec.group, spec.window, spec.chunk) for spec in model.attention] == wanted


def test_impossible_experts_are_refused(tmp_path, hf_files):
    make("gpt-oss").save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(path.read_text().replace('"num_experts_per_tok": 2', '"num_experts_per_tok": 5'))
    with pytest.raises(ModelLoadError, match="5 experts per token of 4 experts"):
        loader.load_config(hf_files(tmp_path / "model"))


def test_a_token_of_a_mixture_does_not_depend_on_the_others():
    torch.manual_seed(0)
    experts = Experts(
        tuple(Linear(torch.randn(12, 8)) for _ in range(5)),
        tuple(Linear(torch.randn(8, 6)) for _ in range(5)),
        top_k=2,
        scoring="softmax",
        weigh="output",
    )
    x, scores = torch.randn(9, 8), torch.randn(9, 5)
    together = ReferenceOps().mixture(x, scores, experts)
    for token in range(9):
        alone = ReferenceOps().mixture(x[token : token + 1], scores[token : token + 1], experts)
        assert torch.allclose(together[token], alone[0], atol=1e-5)
