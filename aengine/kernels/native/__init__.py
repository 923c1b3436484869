"""The native CPU backend: C kernels built on first use, called through ctypes, bitwise batch-invariant.

Owns: `load_native_ops`, the one door other rooms use; which instruction sets the machine has.
Does not know: models, runners, environment variables.
Invariants: without a compiler or a writable cache the answer is a value that says why, never an exception.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from aengine.kernels.native.build import Unavailable, build, lack_of, machine_isas
from aengine.kernels.native.library import Context, load_library
from aengine.kernels.native.ops import NativeOps

__all__ = [
    "Context",
    "NativeOps",
    "Unavailable",
    "build",
    "lack_of",
    "load_library",
    "load_native_ops",
    "machine_isas",
]


def load_native_ops(
    cache_dir: Path,
    threads: int,
    *,
    isa: str | None = None,
    compiler: str | None = None,
    on_compile: Callable[[], object] | None = None,
) -> NativeOps | Unavailable:
    """Build (or find) the kernels under `cache_dir` and open them with `threads` threads.

    `isa`: "avx512vnni", "avx512", "avx2vnni", "avx2", "portable" or None for the best this machine has. `compiler`: a
    program name or path; None tries cc, gcc, clang. Takes some seconds the first time (11 s of processor time and more,
    of which `on_compile` tells at the beginning), 20 to 60 ms after that.
    """
    if isa is not None and (lack := lack_of(isa)) is not None:
        return Unavailable(lack)
    built = build(cache_dir, isas=None if isa is None else (isa,), compiler=compiler, on_compile=on_compile)
    if isinstance(built, Unavailable):
        return built
    try:
        context = Context(load_library(built.path), threads=threads, isa=isa)
    except OSError as error:
        return Unavailable(f"the native kernels at {built.path} cannot be used: {error}")
    return NativeOps(context)
