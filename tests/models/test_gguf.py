"""The GGUF parser against the gguf package's reader, and against broken files."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.errors import ModelLoadError
from aengine.models.gguf import GGUFFile, StringArray, open_gguf
from aengine.models.quants import dequantise
from tests.counting import calls

TYPES = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]
WORDS = ["", "a", "schön", "日本語", "🎉" * 3, "x" * 300]


def write(path: Path) -> Path:
    """A file with every kind of metadata value and a tensor of each type the package can write."""
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in (
        ("uint8", 200), ("int8", -5), ("uint16", 60_000), ("int16", -300), ("uint32", 4_000_000_000),
        ("int32", -7), ("uint64", 2**63), ("int64", -(2**60)), ("float32", 0.5), ("float64", 1e-300),
        ("bool", True), ("string", "chat ✓\n"),
    ):  # fmt: skip
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    writer.add_array("test.strings", WORDS)
    writer.add_array("test.ints", [1, -2, 3])
    writer.add_array("test.floats", [0.25, -1.5])
    writer.add_array("test.bools", [True, False])
    rng = np.random.default_rng(0)
    for index, kind in enumerate(TYPES):
        values = rng.standard_normal((3, 64)).astype(np.float32)
        writer.add_tensor(f"t{index}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("cube", rng.standard_normal((2, 3, 5)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "sample.gguf")


def plain(value):
    if isinstance(value, StringArray | np.ndarray):
        return list(value)
    return value


def test_metadata_equals_the_package(sample):
    ours = GGUFFile(sample)
    fields = gguf.GGUFReader(sample).fields
    theirs = {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
    assert ours.version == fields["GGUF.version"].contents()
    assert {key: plain(value) for key, value in ours.metadata.items()} == theirs
    assert ours.metadata["test.uint64"] == 2**63
    assert ours.metadata["test.strings"][3] == "日本語"
    assert ours.metadata["test.strings"][:2] == ["", "a"]


def test_tensors_equal_the_package(sample):
    ours = GGUFFile(sample)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(sample).tensors}
    assert list(ours.tensors) == list(theirs)
    for name, info in ours.tensors.items():
        reference = theirs[name]
        assert info.shape == tuple(reversed(reference.shape.tolist()))
        got = dequantise(torch.from_numpy(ours.raw(name)), info.type, info.shape).numpy()
        want = gguf.quants.dequantize(reference.data, reference.tensor_type)
        assert np.array_equal(got, want.reshape(got.shape))


def test_writing_to_the_map_leaves_the_file_alone(sample):
    before = sample.read_bytes()
    GGUFFile(sample).raw("cube")[:] = 0
    assert sample.read_bytes() == before


def test_every_truncation_is_a_typed_error(sample, tmp_path):
    whole = sample.read_bytes()
    path = tmp_path / "short.gguf"
    last = max(info.start + info.n_bytes for info in GGUFFile(sample).tensors.values())
    for size in [*range(0, 1200, 7), *range(1200, last, 61), last - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=r"short\.gguf"):
            GGUFFile(path)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_garbled_headers_never_escape_as_other_errors(sample, data):
    whole = bytearray(sample.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 1500))
        whole[at] = data.draw(st.integers(0, 255))
    path = sample.parent / "garbled.gguf"
    path.write_bytes(whole)
    try:
        file = GGUFFile(path)
    except ModelLoadError:
        return
    for info in file.tensors.values():  # whatever it accepted lies inside the file
        assert len(file.raw(info.name)) == info.n_bytes
        assert info.start + info.n_bytes <= len(whole)


def patched(sample: Path, tmp_path: Path, at: int, value: bytes) -> Path:
    data = bytearray(sample.read_bytes())
    data[at : at + len(value)] = value
    path = tmp_path / "patched.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGML", "not a GGUF file: it begins with b'GGML'"),
        (4, struct.pack("<I", 1), r"version is 1, supported are \(2, 3\)"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**60), "absurd tensor count 1,152,921,504,606,846,976"),
        (16, struct.pack("<Q", 2**40), "absurd metadata count 1,099,511,627,776"),
        (24, struct.pack("<Q", 2**63), "truncated: metadata key 0 needs 9,223,372,036,854,775,808 bytes"),
    ],
)
def test_bad_headers_name_the_numbers(sample, tmp_path, at, value, message):
    with pytest.raises(ModelLoadError, match=message):
        GGUFFile(patched(sample, tmp_path, at, value))


def info_of_cube(sample: Path) -> int:
    """Where the dimension count of tensor "cube" stands."""
    name = struct.pack("<Q", 4) + b"cube"
    return sample.read_bytes().index(name) + len(name)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (0, struct.pack("<I", 9), "has 9 dimensions"),
        (4, struct.pack("<Q", 0), "does not divide into blocks"),
        (4, struct.pack("<Q", 2**40), "past the end"),
        (28, struct.pack("<I", 999), "GGML type 999, supported are F32"),
        (28, struct.pack("<I", 2), "does not divide into blocks of 32"),
        (32, struct.pack("<Q", 2**50), "past the end"),
        (32, struct.pack("<Q", 7), "not a multiple of 32"),
    ],
)
def test_bad_tensor_infos_name_the_tensor(sample, tmp_path, field, value, message):
    with pytest.raises(ModelLoadError, match=f"tensor 'cube'.*{message}"):
        GGUFFile(patched(sample, tmp_path, info_of_cube(sample) + field, value))


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(ModelLoadError, match="cannot be opened"):
        GGUFFile(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelLoadError, match="cannot be opened"):
        GGUFFile(tmp_path / "empty.gguf")


def test_a_large_vocabulary_opens_with_one_call_a_token(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"tok{index}" for index in range(262_144)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    opened = []
    assert calls(lambda: opened.append(GGUFFile(tmp_path / "big.gguf"))) < 1.01 * 262_144
    (file,) = opened
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == 262_144
    assert tokens[262_143] == "tok262143"


def test_metadata_digest_depends_on_metadata_only(sample, tmp_path):
    same = patched(sample, tmp_path, sample.stat().st_size - 40, b"\xff" * 8)
    assert GGUFFile(same).metadata_digest() == GGUFFile(sample).metadata_digest()
    other = tmp_path / "other.gguf"
    other.write_bytes(sample.read_bytes().replace("schön".encode(), b"schon!"))
    assert GGUFFile(other).metadata_digest() != GGUFFile(sample).metadata_digest()


def test_an_open_file_is_shared_while_it_is_held_and_unchanged(sample, tmp_path):
    path = tmp_path / "shared.gguf"
    path.write_bytes(sample.read_bytes())
    first = open_gguf(path)
    assert open_gguf(path) is first
    path.write_bytes(sample.read_bytes() + b"\0" * 32)
    assert open_gguf(path) is not first
    with pytest.raises(ModelLoadError, match="cannot be opened"):
        open_gguf(tmp_path / "none.gguf")
