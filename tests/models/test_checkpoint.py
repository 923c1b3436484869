"""Safetensors folders, digests, and how much memory loading holds."""

from __future__ import annotations

import json
import os
import weakref

import pytest
import torch
from safetensors.torch import save_file

from aengine.errors import ModelLoadError
from aengine.kernels.reference import ReferenceOps
from aengine.models import loader
from aengine.models.checkpoint import INDEX, SafetensorsCheckpoint, safetensors_files
from aengine.models.config import config_from_hf
from aengine.models.llama import LlamaModel


def write_shards(folder, names=("one", "two", "three")):
    weight_map = {}
    for index, name in enumerate(names):
        file = f"model-{index}.safetensors"
        save_file({f"{name}.weight": torch.full((2, 3), float(index))}, folder / file)
        weight_map[f"{name}.weight"] = file
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_one_checkpoint(tmp_path):
    write_shards(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path, safetensors_files(tmp_path))
    assert checkpoint.names() == {"one.weight", "two.weight", "three.weight"}
    assert checkpoint.shape("two.weight") == (2, 3)
    value = checkpoint.tensor("three.weight", torch.bfloat16)
    assert value.dtype == torch.bfloat16
    assert (value == 2).all()
    with pytest.raises(ModelLoadError, match=r"no tensor 'four\.weight'"):
        checkpoint.tensor("four.weight", torch.float32)


def test_tensors_do_not_depend_on_the_file(tmp_path):
    write_shards(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path, safetensors_files(tmp_path))
    value = checkpoint.tensor("one.weight", torch.float32)
    value.fill_(9)
    assert (checkpoint.tensor("one.weight", torch.float32) == 0).all()


def test_missing_weights_are_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"has no \.safetensors file"):
        safetensors_files(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"found pytorch_model\.bin"):
        safetensors_files(tmp_path)
    write_shards(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"1 of 3 shards are missing: model-1\.safetensors"):
        safetensors_files(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(ModelLoadError, match="has no weight_map"):
        safetensors_files(tmp_path)


def test_broken_and_integer_weights_are_typed_errors(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ModelLoadError, match="cannot be read as safetensors"):
        SafetensorsCheckpoint(tmp_path, safetensors_files(tmp_path))
    save_file({"a": torch.zeros(2, dtype=torch.int8)}, path)
    with pytest.raises(ModelLoadError, match=r"'a' is torch\.int8"):
        SafetensorsCheckpoint(tmp_path, safetensors_files(tmp_path)).tensor("a", torch.float32)


def hf_model(folder, value=1.0, config="{}"):
    folder.mkdir()
    (folder / "config.json").write_text(config)
    weights = torch.arange(300_000, dtype=torch.float32)
    weights[150_000:150_100] *= value
    save_file({"w": weights}, folder / "model.safetensors")
    return folder


def test_digest_names_content_only(tmp_path, hf_files):
    first = loader.weights_digest(hf_files(hf_model(tmp_path / "a")))
    assert len(first) == 32
    same = hf_model(tmp_path / "b")
    os.utime(same / "model.safetensors", (1, 1))
    assert loader.weights_digest(hf_files(same)) == first
    others = [hf_model(tmp_path / "c", value=2.0), hf_model(tmp_path / "d", config='{"a": 1}')]
    assert len({first, *(loader.weights_digest(hf_files(other)) for other in others)}) == 3


def test_digest_of_gguf(gguf_builder, gguf_files):
    def write(name, value, title):
        builder = gguf_builder(name)
        builder.writer.add_name(title)
        return gguf_files(builder.tensor("a", torch.full((64, 64), value)).write())

    first = loader.weights_digest(write("a.gguf", 1.0, "x"))
    assert loader.weights_digest(write("b.gguf", 1.0, "x")) == first
    assert loader.weights_digest(write("c.gguf", 2.0, "x")) != first
    assert loader.weights_digest(write("d.gguf", 1.0, "y")) != first


class CountingCheckpoint:
    """Makes tensors up and counts the bytes of those still alive."""

    def __init__(self, shapes):
        self.shapes, self.live, self.peak = shapes, 0, 0

    def names(self):
        return frozenset(self.shapes)

    def shape(self, name):
        return self.shapes[name]

    def tensor(self, name, dtype):
        value = torch.zeros(self.shapes[name], dtype=dtype)
        self.track(value)
        return value

    def quantised(self, name):
        return None

    def fitted(self, name, weight):
        return None

    def track(self, value):
        self.live += value.nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(value, self._drop, value.nbytes)

    def _drop(self, n_bytes):
        self.live -= n_bytes


class CountingOps(ReferenceOps):
    """Counts fused weights too, and repacks each, as a native backend does."""

    def __init__(self, checkpoint):
        super().__init__()
        self.checkpoint = checkpoint

    def prepare(self, linear):
        packed = linear.weight.clone()
        self.checkpoint.track(packed)
        return type(linear)(packed, linear.bias)


def test_loading_holds_the_weights_plus_one_layer():
    layers, hidden, ffn, vocab = 12, 64, 192, 100
    config = config_from_hf(
        {
            "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": hidden,
            "num_hidden_layers": layers, "intermediate_size": ffn, "num_attention_heads": 4,
            "max_position_embeddings": 16,
        }
    )  # fmt: skip
    layer = {f"self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
    layer |= {"mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden)}
    layer |= {"mlp.down_proj.weight": (hidden, ffn), "input_layernorm.weight": (hidden,)}
    layer["post_attention_layernorm.weight"] = (hidden,)
    shapes = {f"model.layers.{index}.{name}": shape for index in range(layers) for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (hidden,), "model.embed_tokens.weight": (vocab, hidden)}
    shapes["lm_head.weight"] = (vocab, hidden)
    checkpoint = CountingCheckpoint(shapes)
    model = LlamaModel.load(config, checkpoint, CountingOps(checkpoint), torch.float32)
    one_layer = sum(4 * torch.Size(shape).numel() for shape in layer.values())
    assert model.vocab_size == vocab
    assert checkpoint.live >= layers * (one_layer - 8 * hidden)  # the whole model is held (norms are not tracked)
    assert checkpoint.peak <= checkpoint.live + one_layer
