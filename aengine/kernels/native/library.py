"""The C interface seen from Python: the loaded library, a context of it, memory for packed weights.

Owns: ctypes prototypes, the packing of argument structs, the life of contexts and of weight memory.
Does not know: torch, operations' meaning, shapes.
Invariants: every argument struct is packed as `api.h` declares it (8-byte members); every call releases the GIL; a
chunk of weight memory lives as long as any address handed out from it is held.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from struct import Struct

ABI = 7

# One entry per struct of api.h, in its order of members.
LINEAR_ARGS = Struct("PqqPqPPqqqqq")
PACK_ARGS = Struct("PqqPqq")
SEGMENT = Struct("PPPqqqq")
QUANTISED = Struct("qP")
PACK_QUANTISED_ARGS = Struct("PPPPqq")
UNPACK_ARGS = Struct("PqqPPP")
EMBED_PACKED_ARGS = Struct("PqPPqqqq")
EMBED_ARGS = Struct("PqPPqq")
RMS_NORM_ARGS = Struct("PPPPPqqqqqqqd")
ADD_ARGS = Struct("PPPqqd")
GLU_ARGS = Struct("PPqqqqq")
ROPE_ARGS = Struct("PPPPPqqqqqqq")
ATTENTION_ARGS = Struct("PPPPqqqqqqqPPqqqqqqqqPqPPqqqqqqddPPPqqqPP")
MUL_ARGS = Struct("PPPqqqqq")
SCALE_POSITIONS_ARGS = Struct("PPPPqqqqqq")
TAKE_ARGS = Struct("PPPqqq")
COLUMNS_ARGS = Struct("PPPqqqq")
PUT_ARGS = Struct("PPPPqqq")
SHORT_CONV_ARGS = Struct("PPPPPPPPqqqqqqq")
MIXTURE_ARGS = Struct("PPPPPPPPPPPPPqqqqqqqqqdd")
TABLE = Struct("PPqq")
LAY_OUT_ARGS = Struct("PPPPPPPPqqqPPPPPPPPP")
SAMPLE_ARGS = Struct("PqqqPPPPPqPPPPq")
LOGPROBS_ARGS = Struct("PqqqqPqPPP")
SETTLE_ARGS = Struct("PPPPPPqqPPPPP")
CALL = Struct("qP")

Operation = Callable[[bytes], int]
"""Takes a packed args struct, returns a status (0: done)."""

# What can stand in a program.
OPERATIONS = (
    "linear", "embed", "embed_packed", "rms_norm", "add", "glu", "rope", "attention", "mul", "scale_positions", "take",
    "put", "short_conv", "mixture", "lay_out", "sample", "logprobs", "settle", "columns",
)  # fmt: skip
_ALIGNMENT = 64
_CHUNK_BYTES = 32 * 2**20
_MESSAGES = {1: "out of memory for scratch buffers", 2: "unknown operation, or an index out of range"}


class NativeError(RuntimeError):
    """A native operation returned a status other than 0."""


def check(status: int, operation: str) -> None:
    if status:
        raise NativeError(f"native {operation} failed: {_MESSAGES.get(status, f'status {status}')}")


def load_library(path: Path) -> ctypes.CDLL:
    """Load and declare. Raises OSError when the file is no library of this interface."""
    library = ctypes.CDLL(str(path))
    _declare(library, "ae_abi", ctypes.c_int)
    if library.ae_abi() != ABI:
        raise OSError(f"{path} has interface {library.ae_abi()}, not {ABI}")
    _declare(library, "ae_context_create", ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)
    _declare(library, "ae_context_destroy", None, ctypes.c_void_p)
    _declare(library, "ae_context_isa", ctypes.c_char_p, ctypes.c_void_p)
    _declare(library, "ae_context_threads", ctypes.c_int, ctypes.c_void_p)
    _declare(library, "ae_context_set_threads", ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    _declare(library, "ae_alloc", ctypes.c_void_p, ctypes.c_int64)
    _declare(library, "ae_free", None, ctypes.c_void_p, ctypes.c_int64)
    _declare(library, "ae_touch", None, ctypes.c_void_p, ctypes.c_int64)
    _declare(library, "ae_packed_bytes", ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 3)
    _declare(library, "ae_codes_bytes", ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 3)
    _declare(library, "ae_scale_bytes", ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 5)
    _declare(library, "ae_program_run", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    _declare(library, "ae_operation", ctypes.c_int64, ctypes.c_char_p)
    for name in ("pack", "pack_quantised", "unpack", *OPERATIONS):
        # A bytes object goes over as the address of its content, which is the args struct.
        _declare(library, f"ae_{name}", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
    return library


def _declare(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> None:
    function = getattr(library, name)
    function.restype = result
    function.argtypes = list(arguments)


class Context:
    """An instruction set and a pool of threads. Operations queue: one runs at a time.

    `isa` None: the best this machine has. Raises OSError when the machine lacks `isa` or cannot start the threads.
    """

    def __init__(self, library: ctypes.CDLL, *, threads: int, isa: str | None = None) -> None:
        handle = library.ae_context_create(None if isa is None else isa.encode(), threads)
        if not handle:
            raise OSError(f"no native context with instruction set {isa or 'any'} and {threads} threads")
        self.library = library
        self.handle: int = handle
        self._close = weakref.finalize(self, library.ae_context_destroy, handle)

    @property
    def isa(self) -> str:
        name: bytes = self.library.ae_context_isa(self.handle)
        return name.decode()

    @property
    def threads(self) -> int:
        count: int = self.library.ae_context_threads(self.handle)
        return count

    def set_threads(self, threads: int) -> None:
        """Change the number of threads, between operations. Results do not depend on it."""
        if self.library.ae_context_set_threads(self.handle, threads):
            raise OSError(f"cannot start {threads} native threads")

    def operation(self, name: str) -> Operation:
        """The function `ae_<name>` with this context bound."""
        return partial(getattr(self.library, f"ae_{name}"), self.handle)

    def operation_number(self, name: str) -> int:
        """What stands for `ae_<name>` in a program's calls."""
        number: int = self.library.ae_operation(name.encode())
        if number < 0:
            raise OSError(f"operation {name!r} cannot stand in a program")
        return number

    def run_program(self, calls: int, count: int) -> int:
        """Run `count` packed CALLs at address `calls` in order, up to the first that fails; its status."""
        status: int = self.library.ae_program_run(self.handle, calls, count)
        return status

    def packed_bytes(self, dtype: int, in_features: int, out_features: int) -> int:
        size: int = self.library.ae_packed_bytes(self.handle, dtype, in_features, out_features)
        return size

    def codes_bytes(self, bits: int, in_features: int, out_features: int) -> int:
        size: int = self.library.ae_codes_bytes(self.handle, bits, in_features, out_features)
        return size

    def scale_bytes(self, bits: int, group: int, scale_dtype: int, in_features: int, out_features: int) -> int:
        size: int = self.library.ae_scale_bytes(self.handle, bits, group, scale_dtype, in_features, out_features)
        return size


@dataclass(frozen=True, slots=True)
class Block:
    """`size` bytes at `address`, zeroed, 64-byte aligned; `owner` keeps them alive."""

    address: int
    size: int
    owner: object


class _Chunk:
    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        address = library.ae_alloc(size)
        if not address:
            raise MemoryError(f"{size} bytes for packed weights")
        self.address: int = address
        self.size = size
        self.used = 0
        weakref.finalize(self, library.ae_free, address, size)


class WeightMemory:
    """Blocks cut from 2 MiB-aligned chunks of 32 MiB (huge pages: 29 against 13 to 22 GB/s read by one thread).

    A chunk goes back to the system with the last block of it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._chunk: _Chunk | None = None

    def take(self, size: int) -> Block:
        need = -(-size // _ALIGNMENT) * _ALIGNMENT
        chunk = self._chunk
        if chunk is None or chunk.used + need > chunk.size:
            chunk = _Chunk(self._library, max(need, _CHUNK_BYTES))
            if need < _CHUNK_BYTES:
                self._chunk = chunk
        address = chunk.address + chunk.used
        chunk.used += need
        return Block(address, size, chunk)
