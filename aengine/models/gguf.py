"""GGUF files, opened by memory map.

Owns: the container format: header, metadata values, tensor infos, bounds checks, raw tensor bytes.
Does not know: architectures, tensor naming schemes, tokenizers, how blocks are dequantised.
Invariants: opening touches only the header; string arrays are walked once and decoded on demand (a vocabulary of
262,144 entries opens in about 0.1 s). Every offset is checked against the file size before it is used, so a truncated
or garbled file raises ModelLoadError with the numbers, never a crash later.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from aengine.errors import ModelLoadError
from aengine.models.ggml_types import GGML_TYPES, GgmlType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MIN_VALUE_BYTES = 13  # length of a key, type, one byte of value
MIN_TENSOR_BYTES = 24  # length of a name, dimension count, type, offset

_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, tuple[struct.Struct, np.dtype[Any]]] = {
    code: (struct.Struct("<" + letter), np.dtype("<" + kind))
    for code, letter, kind in (
        (0, "B", "u1"),
        (1, "b", "i1"),
        (2, "H", "u2"),
        (3, "h", "i2"),
        (4, "I", "u4"),
        (5, "i", "i4"),
        (6, "f", "f4"),
        (7, "?", "?"),
        (10, "Q", "u8"),
        (11, "q", "i8"),
        (12, "d", "f8"),
    )
}
_U32, _U64 = struct.Struct("<I").unpack_from, struct.Struct("<Q").unpack_from


class StringArray(Sequence[str]):
    """An array of strings inside the map. Only the offsets of its first and last byte are known until it is read."""

    def __init__(self, view: mmap.mmap, start: int, count: int) -> None:
        self._view, self._start, self._count = view, start, count
        self._decoded: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._strings()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._strings())

    def _strings(self) -> list[str]:
        if self._decoded is None:
            view, at, out = self._view, self._start, []
            for _ in range(self._count):
                end = at + 8 + _U64(view, at)[0]
                out.append(view[at + 8 : end].decode("utf-8", "replace"))
                at = end
            self._decoded = out
        return self._decoded


GGUFValue = int | float | bool | str | NDArray[Any] | StringArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` in row-major order (the file's dimensions reversed); bytes start .. start + n_bytes."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    start: int
    n_bytes: int


class GGUFFile:
    """An open GGUF file: `metadata` by key, `tensors` by name, in file order.

    Raises ModelLoadError when the file is missing, truncated, garbled or of an unsupported version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _open_map(path)
        reader = _Reader(path, self._map)
        n_tensors, n_values = reader.header()
        self.version = reader.version
        self.metadata: dict[str, GGUFValue] = reader.values(n_values)
        self.metadata_bytes = reader.at
        self.tensors: dict[str, TensorInfo] = reader.tensors(n_tensors, self._alignment())

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or value <= 0 or value % 8:
            raise ModelLoadError(f"{self.path}: general.alignment is {value!r}, not a positive multiple of 8")
        return value

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes as stored, uint8 [n_bytes]: a private view of the map, copied on write."""
        info = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, info.n_bytes, info.start)

    def metadata_digest(self) -> bytes:
        """SHA-256 of header and metadata (architecture, hyper-parameters, tokenizer, chat template)."""
        return hashlib.sha256(memoryview(self._map)[: self.metadata_bytes]).digest()


_open: weakref.WeakValueDictionary[tuple[str, int, int], GGUFFile] = weakref.WeakValueDictionary()


def open_gguf(path: Path) -> GGUFFile:
    """As GGUFFile, but the same object while somebody holds it and the file has not changed: a header with a large
    vocabulary takes up to 0.1 s to walk, and several parts of a start need it."""
    try:
        found = path.stat()
    except OSError:
        return GGUFFile(path)  # which tells what is wrong
    key = str(path.absolute()), found.st_mtime_ns, found.st_size
    file = _open.get(key)
    if file is None:
        file = _open[key] = GGUFFile(path)
    return file


def _open_map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # A private writable map: torch refuses to share read-only memory without a warning.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be opened as GGUF: {error}") from error


class _Reader:
    """A cursor over the header. `at` never passes `size`."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self.path, self.view, self.size = path, view, len(view)
        self.at = 0
        self.version = 0

    def fail(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {message} (at byte {self.at:,} of {self.size:,})")

    def take(self, n_bytes: int, what: str) -> int:
        """Advance by n_bytes; returns where they start."""
        if n_bytes > self.size - self.at:
            raise self.fail(f"truncated: {what} needs {n_bytes:,} bytes, {self.size - self.at:,} are left")
        start = self.at
        self.at += n_bytes
        return start

    def u32(self, what: str) -> int:
        return int(_U32(self.view, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64(self.view, self.take(8, what))[0])

    def string(self, what: str) -> str:
        start = self.take(self.u64(f"length of {what}"), what)
        return self.view[start : self.at].decode("utf-8", "replace")

    def header(self) -> tuple[int, int]:
        """-> (tensor count, metadata count)."""
        magic = self.view[self.take(4, "magic") : self.at]
        if magic != MAGIC:
            raise self.fail(f"not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
        self.version = self.u32("version")
        if self.version not in VERSIONS:
            swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big")
            hint = ", the file is big-endian" if swapped in VERSIONS else ""
            raise self.fail(f"GGUF version is {self.version}, supported are {VERSIONS}{hint}")
        counts = self.u64("tensor count"), self.u64("metadata count")
        self.check_count("tensor", counts[0], MIN_TENSOR_BYTES)
        self.check_count("metadata", counts[1], MIN_VALUE_BYTES)
        return counts

    def check_count(self, what: str, count: int, min_bytes: int) -> None:
        if count * min_bytes > self.size - self.at:
            raise self.fail(f"absurd {what} count {count:,}: it needs at least {count * min_bytes:,} bytes")

    def values(self, count: int) -> dict[str, GGUFValue]:
        out: dict[str, GGUFValue] = {}
        for index in range(count):
            key = self.string(f"metadata key {index}")
            if key in out:
                raise self.fail(f"metadata key {key!r} occurs twice")
            out[key] = self.value(key, self.u32(f"type of {key!r}"))
        return out

    def value(self, key: str, code: int) -> GGUFValue:
        if code == _STRING:
            return self.string(f"value of {key!r}")
        if code == _ARRAY:
            return self.array(key, self.u32(f"element type of {key!r}"), self.u64(f"length of {key!r}"))
        form, _ = self.scalar(key, code)
        value: int | float | bool = form.unpack_from(self.view, self.take(form.size, f"value of {key!r}"))[0]
        return value

    def scalar(self, key: str, code: int) -> tuple[struct.Struct, np.dtype[Any]]:
        if code not in _SCALARS:
            raise self.fail(f"metadata key {key!r} has value type {code}, which is unknown or nested too deeply")
        return _SCALARS[code]

    def array(self, key: str, code: int, count: int) -> NDArray[Any] | StringArray:
        if code == _STRING:
            return self.strings(key, count)
        form, dtype = self.scalar(key, code)
        start = self.take(count * form.size, f"array {key!r} of {count:,} elements")
        return np.frombuffer(self.view, dtype, count, start)

    def strings(self, key: str, count: int) -> StringArray:
        self.check_count(f"string array {key!r}", count, 8)
        # The one loop over a whole vocabulary: local names, one bounds check by struct per string, one at the end.
        view, at, read = self.view, self.at, _U64
        try:
            for _ in range(count):
                at += 8 + read(view, at)[0]
        except (struct.error, OverflowError):
            raise self.fail(f"truncated: string array {key!r} of {count:,} runs past the end") from None
        out = StringArray(self.view, self.at, count)
        self.take(at - self.at, f"string array {key!r} of {count:,}")
        return out

    def tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        heads = [self.tensor_head(index) for index in range(count)]
        base = -(-self.at // alignment) * alignment
        out: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in heads:
            if name in out:
                raise self.fail(f"tensor {name!r} occurs twice")
            out[name] = self.place(name, shape, kind, base, offset, alignment)
        return out

    def tensor_head(self, index: int) -> tuple[str, tuple[int, ...], GgmlType, int]:
        name = self.string(f"name of tensor {index}")
        n_dims = self.u32(f"dimension count of {name!r}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.fail(f"tensor {name!r} has {n_dims} dimensions, not 1 to {MAX_DIMS}")
        dims = struct.unpack_from(f"<{n_dims}Q", self.view, self.take(8 * n_dims, f"dimensions of {name!r}"))
        code = self.u32(f"type of {name!r}")
        if code not in GGML_TYPES:
            known = ", ".join(kind.name for kind in GGML_TYPES.values())
            raise self.fail(f"tensor {name!r} has GGML type {code}, supported are {known}")
        return name, tuple(reversed(dims)), GGML_TYPES[code], self.u64(f"offset of {name!r}")

    def place(
        self, name: str, shape: tuple[int, ...], kind: GgmlType, base: int, offset: int, alignment: int
    ) -> TensorInfo:
        elements = math.prod(shape)
        if not elements or shape[-1] % kind.block_elements:
            raise self.fail(f"tensor {name!r} of shape {shape} does not divide into blocks of {kind.block_elements}")
        n_bytes = elements // kind.block_elements * kind.block_bytes
        if offset % alignment:
            raise self.fail(f"tensor {name!r} starts at offset {offset:,}, not a multiple of {alignment}")
        if base + offset + n_bytes > self.size:
            raise self.fail(f"truncated: tensor {name!r} ends at byte {base + offset + n_bytes:,}, past the end")
        return TensorInfo(name, shape, kind, base + offset, n_bytes)
