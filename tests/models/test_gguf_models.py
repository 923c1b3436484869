"""Models from GGUF: the same logits as the model the file was made from; hyper-parameters and their refusals."""

from __future__ import annotations

import gguf
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from aengine.errors import ModelLoadError
from aengine.kernels.reference import ReferenceOps
from aengine.models import loader
from aengine.models.checkpoint import rows_to_halves
from aengine.models.gguf import GGUFFile
from aengine.models.gguf_config import config_from_gguf
from aengine.models.rope import rope_frequencies

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig, "llama", {}),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, "llama", {"tie_word_embeddings": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, "qwen2", {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, "qwen3", {"head_dim": 16}),
    "gemma3": (
        Gemma3ForCausalLM, Gemma3TextConfig, "gemma3",
        {"num_hidden_layers": 7, "sliding_window": 5, "head_dim": 16, "query_pre_attn_scalar": 16},
    ),
}  # fmt: skip


def make(name):
    model_class, config_class, architecture, changes = CASES[name]
    torch.manual_seed(len(name))
    model = model_class(config_class(**(TINY | changes))).float().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.add_(torch.randn_like(value) * (0.3 if "norm" in key or "bias" in key else 0.15))
    return model, architecture


def interleaved(value, heads):
    """The row order converters give q and k of the "llama" architecture."""
    return value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def stored(key, value, config, architecture):
    """-> (name, value) as a converter writes them."""
    module, kind = key.rsplit(".", 1)
    if architecture == "llama" and "q_proj" in key:
        value = interleaved(value, config.num_attention_heads)
    if architecture == "llama" and "k_proj" in key:
        value = interleaved(value, config.num_key_value_heads)
    if architecture == "gemma3" and "norm" in key:
        value = value + 1
    if module in TOP:
        return f"{TOP[module]}.{kind}", value
    _, _, layer, inner = module.split(".", 3)
    names = GEMMA_NAMES if architecture == "gemma3" else NAMES
    return f"blk.{layer}.{names[inner]}.{kind}", value


def write(model, architecture, builder, kind=None):
    config, writer = model.config, builder(architecture=architecture)
    writer.hyper_parameters(config)
    if architecture == "gemma3":
        writer.writer.add_sliding_window(config.sliding_window)
    else:
        writer.writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in model.state_dict().items():
        if not (key == "lm_head.weight" and config.tie_word_embeddings):
            name, value = stored(key, value, config, architecture)
            writer.tensor(name, value, kind if value.ndim == 2 else None)
    return writer


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_source_model(name, gguf_builder, gguf_files, full_logits):
    theirs, architecture = make(name)
    path = write(theirs, architecture, gguf_builder).write()
    ours = loader.load_model(gguf_files(path), ReferenceOps(), torch.float32)
    ids = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0]
    got = full_logits(ours, ids)
    assert (got - want).abs().max() < 1e-4
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_quantised_rows_are_reordered_after_decoding(gguf_builder, gguf_files, full_logits):
    """q and k of "llama" files in a block format: near the unquantised model, far from one with unordered rows."""
    theirs, architecture = make("llama")
    path = write(theirs, architecture, gguf_builder, gguf.GGMLQuantizationType.Q8_0).write()
    ours = loader.load_model(gguf_files(path), ReferenceOps(), torch.float32)
    ids = list(range(30))
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0]
    error = (full_logits(ours, ids) - want).norm() / want.norm()
    assert error < 0.03


def test_row_order_is_undone():
    value = torch.randn(24, 5)
    assert torch.equal(rows_to_halves(interleaved(value, 3), 3), value)
    assert torch.equal(rows_to_halves(interleaved(value[:, 0], 3), 3), value[:, 0])


def test_checkpoint_shows_hugging_face_names(gguf_builder, gguf_files):
    theirs, architecture = make("gemma3")
    files = gguf_files(write(theirs, architecture, gguf_builder).write())
    checkpoint = loader.open_checkpoint(files, loader.load_config(files))
    assert checkpoint.names() == frozenset(theirs.state_dict()) - {"lm_head.weight"}
    for key, value in theirs.state_dict().items():
        if key != "lm_head.weight":
            assert checkpoint.shape(key) == tuple(value.shape)
    with pytest.raises(ModelLoadError, match=r"no tensor 'model\.layers\.9\.mlp\.up_proj\.weight'.*layers\.0"):
        checkpoint.tensor("model.layers.9.mlp.up_proj.weight", torch.float32)


def test_gemma_pattern_and_local_rope(gguf_builder, gguf_files):
    theirs, architecture = make("gemma3")
    config = loader.load_config(gguf_files(write(theirs, architecture, gguf_builder).write()))
    assert config.windows == (5, 5, 5, 5, 5, 0, 5)
    assert config.kv_groups == (1, 1, 1, 1, 1, 0, 1)
    assert (config.rope.theta, config.local_rope.theta) == (1e6, 1e4)
    assert config.embed_scale == 32**0.5


def test_special_ids_come_from_the_tokenizer_keys(gguf_builder, gguf_files):
    theirs, architecture = make("llama")
    builder = write(theirs, architecture, gguf_builder)
    builder.writer.add_bos_token_id(1)
    builder.writer.add_eos_token_id(2)
    builder.writer.add_eot_token_id(7)
    config = loader.load_config(gguf_files(builder.write()))
    assert (config.bos_id, config.eos_ids) == (1, (2, 7))


def with_keys(gguf_builder, add):
    theirs, architecture = make("llama")
    builder = write(theirs, architecture, gguf_builder)
    add(builder.writer)
    return config_from_gguf(GGUFFile(builder.write()))


def test_rope_scalings(gguf_builder):
    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    rope = with_keys(gguf_builder, yarn).rope
    assert (rope.type, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 16)
    factors = torch.tensor([1.0, 1.0, 4.0, 8.0])

    def llama3(writer):
        writer.add_tensor("rope_freqs.weight", factors.numpy())

    rope = with_keys(gguf_builder, llama3).rope
    assert rope.type == "factors"
    frequencies, scale = rope_frequencies(rope, factors)
    assert scale == 1.0
    assert torch.equal(frequencies, 1e4 ** -(torch.arange(0, 8, 2) / 8) / factors)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rope scaling 'longrope' is not supported"),
        (lambda w: w.add_expert_count(8), "mixture of 8 experts"),
    ],
)
def test_what_is_not_supported_is_refused(gguf_builder, add, message):
    with pytest.raises(ModelLoadError, match=message):
        with_keys(gguf_builder, add)


def test_unknown_architecture_lists_the_supported(gguf_builder):
    builder = gguf_builder(architecture="mamba")
    builder.tensor("token_embd.weight", torch.zeros(4, 4))
    with pytest.raises(ModelLoadError, match="architecture 'mamba'; supported are llama, qwen2, qwen3, gemma3"):
        config_from_gguf(GGUFFile(builder.write()))
