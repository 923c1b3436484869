"""Native kernels for every instruction set this machine can run, built once and kept between test runs."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from aengine.kernels.native import Context, NativeOps, Unavailable, build, load_library
from aengine.kernels.native.build import machine_isas

# Besides what the machine has: what AVX-512 with VNNI compiles (see emulated.h). The other emulated sets differ from it
# or from AVX2 in the steps of the integer product alone, which test_emulated.py holds to exact sums; the environment
# variable KERNEL_ISAS (names, spaces between) runs everything on whichever sets it names.
_RUNS = machine_isas()
_EMULATED = ("emulated_avx512vnni",) if "avx2" in _RUNS and "avx512vnni" not in _RUNS else ()
ISAS = tuple(os.environ.get("KERNEL_ISAS", "").split()) or (*_RUNS[:-1], *_EMULATED, _RUNS[-1])


@pytest.fixture(scope="session")
def library_path(request: pytest.FixtureRequest) -> Path:
    """Workers of one test run wait for the first, which builds it."""
    folder = Path(request.config.cache.mkdir("native-kernels"))  # type: ignore[union-attr]
    with (folder.parent / "native-kernels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
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
