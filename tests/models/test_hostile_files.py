"""Model folders made by strangers: whatever stands in them, loading ends in a typed error or in a model that fits."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from aengine.errors import AengineError, InvalidRequest, ModelLoadError
from aengine.models.checkpoint import INDEX, SafetensorsCheckpoint, safetensors_files
from aengine.models.images import ImageProcessor
from aengine.models.loader import load_config, load_tokenizer
from aengine.models.store import ModelFiles

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "vocab_size": 300,
    "tie_word_embeddings": True,
}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 3, 2**31, 2**64, 10**30, 0.5, float("nan"), float("inf"), "", "64", "../x"]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "type"]), st.sampled_from(["llama3", 0, None]), max_size=2),
)
KEYS = [*CONFIG, "rope_scaling", "head_dim", "quantization_config", "eos_token_id", "layer_types", "sliding_window"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hostile")
    save_file({"a": torch.ones(4, 4), "b.c": torch.zeros(3, dtype=torch.bfloat16)}, made / "model.safetensors")
    return made


def files(folder: Path) -> ModelFiles:
    return ModelFiles("hf", folder, "hostile", folder)


@given(changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_garbled_safetensors_end_in_a_typed_error_or_inside_the_file(
    folder: Path, changes: list[tuple[int, int]]
) -> None:
    whole = bytearray((folder / "model.safetensors").read_bytes())
    for at, byte in changes:
        whole[at % len(whole)] = byte
    path = folder / "garbled.st"
    path.write_bytes(whole)
    try:
        checkpoint = SafetensorsCheckpoint(folder, [path])
        tensors = [checkpoint.tensor(name, torch.float32) for name in checkpoint.names()]
    except ModelLoadError:
        return
    assert sum(tensor.numel() for tensor in tensors) <= len(whole)


@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_absurd_configs_end_in_a_typed_error_or_a_config(folder: Path, changes: dict[str, object]) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    try:
        config = load_config(files(folder))
    except AengineError:
        return
    assert config.vocab_size > 0


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model": 7}', '{"model": {"type": "BPE"}}', "[" * 10_000])
def test_broken_json_files_end_in_a_typed_error(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(AengineError):
        load_tokenizer(files(folder))
    (folder / "config.json").write_text(text)
    with pytest.raises(AengineError):
        load_config(files(folder))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\0b"])
def test_an_index_names_files_beside_it_only(folder: Path, name: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelLoadError, match="not the name of a file beside it"):
        safetensors_files(folder)
    (folder / INDEX).unlink()


def png(width: int, height: int) -> bytes:
    """A picture that says it is so large; its pixels are a few bytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(("width", "height"), [(9_000, 9_000), (60_000, 60_000), (2**31 - 1, 1), (70_000, 1_000)])
def test_picture_bombs_are_refused_before_their_pixels_are_made(width: int, height: int) -> None:
    reader = ImageProcessor.__new__(ImageProcessor)  # nothing of a model is needed to refuse
    with pytest.raises(InvalidRequest) as caught:
        reader.read(png(width, height), files=False, where="image 0")
    assert "pixels" in str(caught.value)


def test_nothing_in_the_package_unpickles() -> None:
    sources = Path(__file__).parents[2] / "aengine"
    for path in sources.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for word in ("torch.load(", "import pickle", "allow_pickle=True", "joblib", "trust_remote_code=True"):
            assert word not in text, f"{path}: {word}"
