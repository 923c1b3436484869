"""LFM2's configuration in its spellings, and what its layers own. Its tokens are tested through the whole engine."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from aengine.errors import ModelLoadError
from aengine.kernels.ops import state_specs
from aengine.kernels.reference import ReferenceOps
from aengine.models import loader

LAYERS = ["conv", "full_attention", "conv", "conv"]
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 90,
    "num_hidden_layers": len(LAYERS),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "layer_types": LAYERS,
}


def save(path, **changes):
    torch.manual_seed(0)
    model = Lfm2ForCausalLM(Lfm2Config(**SIZES | {"block_multiple_of": 8} | changes))
    model.save_pretrained(path)
    return model


def rewrite(path, remove=(), **changes):
    values = json.loads((path / "config.json").read_text())
    kept = {key: value for key, value in values.items() if key not in remove}
    (path / "config.json").write_text(json.dumps(kept | changes))


def test_convolutions_own_states_and_attention_layers_kv(tmp_path, hf_files):
    save(tmp_path / "model", conv_L_cache=4)
    files = hf_files(tmp_path / "model")
    model = loader.load_model(files, ReferenceOps(), torch.bfloat16)
    assert [(spec.layer, spec.group, spec.window) for spec in model.attention] == [(0, 0, 0)]
    assert [(spec.layer, spec.group) for spec in state_specs(model)] == [(0, 1), (1, 1), (2, 1)]
    assert {(part.shape, part.dtype) for spec in model.states for part in spec.parts} == {((3, 32), torch.bfloat16)}
    outline = loader.outline(files, torch.bfloat16)
    assert (outline.attention, state_specs(outline)) == (model.attention, model.states)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_auto_adjust_ff_dim": False},
        {"block_ffn_dim_multiplier": 1.3},
        {"block_multiple_of": 256},
        {"intermediate_size": 91, "block_multiple_of": 7},
    ],
)
def test_mlp_sizes_are_those_of_transformers(changes, tmp_path, hf_files):
    theirs = save(tmp_path / "model", **changes)
    config = loader.load_config(hf_files(tmp_path / "model"))
    assert config.ffn == theirs.model.layers[0].feed_forward.w1.out_features


def test_older_spellings_are_read_alike(tmp_path, hf_files):
    save(tmp_path / "model", tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    wanted = loader.load_config(hf_files(tmp_path / "model"))
    rewrite(
        tmp_path / "model",
        remove=("layer_types", "rope_parameters", "tie_word_embeddings", "intermediate_size"),
        full_attn_idxs=[1],
        rope_theta=5e5,
        tie_embedding=True,
        block_ff_dim=90,
    )
    assert loader.load_config(hf_files(tmp_path / "model")) == wanted
    assert wanted.conv_layers == (True, False, True, True)
    assert wanted.rope.theta == 5e5
    assert wanted.tied_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv", "mamba", "conv", "conv"]}, r"layer_types \['mamba'\]"),
        ({"layer_types": ["conv"] * 4}, "layers of both kinds"),
        ({"layer_types": LAYERS[:3]}, "for 4 layers"),
        ({"conv_L_cache": 1}, "conv_L_cache is 1"),
        ({"intermediate_size": "big"}, "intermediate_size is 'big'"),
    ],
)
def test_what_is_not_understood_is_refused(changes, message, tmp_path, hf_files):
    save(tmp_path / "model")
    rewrite(tmp_path / "model", **changes)
    with pytest.raises(ModelLoadError, match=message):
        loader.load_config(hf_files(tmp_path / "model"))


def test_progress_counts_layers_of_both_kinds(tmp_path, hf_files):
    save(tmp_path / "model")
    calls = []
    loader.load_model(hf_files(tmp_path / "model"), ReferenceOps(), torch.float32, lambda *args: calls.append(args))
    assert calls == [("load weights", done, 4) for done in (1, 2, 3, 4)]
