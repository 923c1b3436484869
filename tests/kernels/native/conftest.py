"""Native kernels for every instruction set this machine can run, built once and kept between test runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from aengine.kernels.native import Context, NativeOps, Unavailable, build, load_library
from aengine.kernels.native.build import best_isa

# "wide" runs the code of AVX-512 with VNNI on vectors of 16 lanes that the compiler splits in two.
_X86 = ("avx512vnni", "avx512", "avx2")
_RUNS = _X86[_X86.index(best_isa()) :] if best_isa() in _X86 else ()
ISAS = (*_RUNS, "wide", "portable") if _RUNS else ("portable",)


@pytest.fixture(scope="session")
def library_path(request: pytest.FixtureRequest) -> Path:
    folder = Path(request.config.cache.mkdir("native-kernels"))  # type: ignore[union-attr]
    built = build(folder, isas=ISAS)
    assert not isinstance(built, Unavailable), built.reason
    return built.path


@pytest.fixture(scope="session", params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def ops(library_path: Path, isa: str) -> NativeOps:
    """Two threads."""
    return NativeOps(Context(load_library(library_path), threads=2, isa=isa))


@pytest.fixture(scope="session")
def ops_by_threads(library_path: Path, isa: str) -> dict[int, NativeOps]:
    library = load_library(library_path)
    return {threads: NativeOps(Context(library, threads=threads, isa=isa)) for threads in (1, 2, 5)}
