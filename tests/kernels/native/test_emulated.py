"""The emulated instructions against their manual; the integer product of every set against exact sums."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from aengine.kernels.native.build import _COMMON_UNITS, COMPILERS, SETS, SOURCES, machine_isas

EMULATED = tuple(name for name in SETS if name.startswith("emulated_") and "avx2" in machine_isas())
Array = NDArray[np.generic]


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    folder = tmp_path_factory.mktemp("probe")
    compiler = next(path for name in COMPILERS if (path := shutil.which(name)))

    def load(name: str) -> ctypes.CDLL:
        target = folder / f"{name}.so"
        if not target.exists():
            flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-ffp-contract=off", *SETS[name], f"-I{SOURCES}"]
            source = Path(__file__).with_name("probe.c")
            subprocess.run([compiler, *flags, f"-DAE_ISA={name}", str(source), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))

    return load


def address(x: Array) -> int:
    return int(x.ctypes.data)


def call(library: ctypes.CDLL, name: str, result: type, count: int, *inputs: Array) -> Array:
    out = np.zeros(count, result)
    getattr(library, name)(*(ctypes.c_void_p(address(np.ascontiguousarray(x))) for x in (out, *inputs)))
    return out


def random_bits(rng: np.random.Generator, dtype: type, count: int) -> Array:
    """Any value of the type, its extremes often."""
    info = np.iinfo(dtype)
    some = rng.integers(info.min, info.max, count, dtype, endpoint=True)
    return np.where(rng.random(count) < 0.3, rng.choice(np.array([info.min, info.max, 0], dtype), count), some)


FLOATS = np.array([0.0, -0.0, 1.0, -2.5, np.inf, -np.inf, np.nan, 1e-42, 3e38], np.float32)


@pytest.mark.skipif(not EMULATED, reason="emulation needs AVX2")
def test_dot_products_as_the_manual_says(probe: Callable[[str], ctypes.CDLL]) -> None:
    """Unsigned by signed bytes, signed pairs; 32-bit sums wrap, nothing saturates."""
    library, rng = probe("emulated_avx512vnni"), np.random.default_rng(1)
    for _ in range(50):
        sums, a, b = random_bits(rng, np.int32, 16), random_bits(rng, np.uint8, 64), random_bits(rng, np.int8, 64)
        exact = sums.astype(np.int64) + (a.astype(np.int64) * b.astype(np.int64)).reshape(16, 4).sum(1)
        assert np.array_equal(call(library, "dpbusd_epi32", np.int32, 16, sums, a, b), exact.astype(np.int32))
        c, d = random_bits(rng, np.int16, 32), random_bits(rng, np.int16, 32)
        exact = sums.astype(np.int64) + (c.astype(np.int64) * d.astype(np.int64)).reshape(16, 2).sum(1)
        assert np.array_equal(call(library, "dpwssd_epi32", np.int32, 16, sums, c, d), exact.astype(np.int32))


@pytest.mark.skipif(not EMULATED, reason="emulation needs AVX2")
def test_integer_instructions_as_the_manual_says(probe: Callable[[str], ctypes.CDLL]) -> None:
    library, rng = probe("emulated_avx512"), np.random.default_rng(2)
    for _ in range(50):
        a, b = random_bits(rng, np.uint8, 64).astype(np.int64), random_bits(rng, np.int8, 64).astype(np.int64)
        pairs = (a * b).reshape(32, 2).sum(1).clip(-(2**15), 2**15 - 1)  # saturates
        got = call(library, "maddubs_epi16", np.int16, 32, a.astype(np.uint8), b.astype(np.int8))
        assert np.array_equal(got, pairs)
        c, d = random_bits(rng, np.int16, 32), random_bits(rng, np.int16, 32)
        exact = (c.astype(np.int64) * d.astype(np.int64)).reshape(16, 2).sum(1).astype(np.int32)
        assert np.array_equal(call(library, "madd_epi16", np.int32, 16, c, d), exact)
        assert np.array_equal(call(library, "add_epi16", np.int16, 32, c, d), c + d)  # wraps
        x, y = random_bits(rng, np.int32, 16), random_bits(rng, np.int32, 16)
        assert np.array_equal(call(library, "max_epi32", np.int32, 16, x, y), np.maximum(x, y))
        assert call(library, "reduce_max_epi32", np.int32, 1, x)[0] == x.max()
        assert np.array_equal(call(library, "cvtepi32_ps", np.float32, 16, x), x.astype(np.float32))
        floats = (rng.standard_normal(16) * 1e4).astype(np.float32)
        floats[:4] = 0.5, 1.5, -2.5, 3e9  # halves to even; what does not fit is the least integer
        rounded = np.where(floats < 2**31, np.rint(floats), -(2.0**31)).astype(np.int32)
        assert np.array_equal(call(library, "cvtps_epi32", np.int32, 16, floats), rounded)
        bytes_ = random_bits(rng, np.int8, 16)
        assert np.array_equal(call(library, "cvtepi8_epi32", np.int32, 16, bytes_), bytes_)


@pytest.mark.skipif(not EMULATED, reason="emulation needs AVX2")
def test_float_instructions_as_the_manual_says(probe: Callable[[str], ctypes.CDLL]) -> None:
    library, rng = probe("emulated_avx512"), np.random.default_rng(3)
    halves = np.arange(2**16, dtype=np.uint16).reshape(-1, 16)
    for some in halves:
        got, want = call(library, "cvtph_ps", np.float32, 16, some), some.view(np.float16).astype(np.float32)
        assert np.array_equal(got[~np.isnan(want)].view(np.int32), want[~np.isnan(want)].view(np.int32))
        assert np.isnan(got[np.isnan(want)]).all()
    for _ in range(50):
        a, b = rng.choice(FLOATS, 16), rng.choice(FLOATS, 16)
        for name, mask in (("max_ps", a > b), ("min_ps", a < b)):  # the second where equal or NaN
            got = call(library, name, np.float32, 16, a, b)
            assert np.array_equal(got.view(np.int32), np.where(mask, a, b).view(np.int32))
        # Of these the exact sum fits a double: one rounding, or two, are told apart.
        x, y = rng.uniform(1, 2, (2, 16)).astype(np.float32)
        z = rng.uniform(-4, -1, 16).astype(np.float32)
        fused = (x.astype(np.float64) * y + z).astype(np.float32)
        assert np.array_equal(call(library, "fmadd_ps", np.float32, 16, x, y, z), fused)
        assert not np.array_equal(fused, x * y + z)


@pytest.mark.parametrize("name", [*machine_isas(), *EMULATED])
def test_sums_of_a_unit_are_exact(probe: Callable[[str], ctypes.CDLL], name: str) -> None:
    """Of nibbles by int8, times a scale, and of bytes by int16, at the largest magnitudes too."""
    library, rng = probe(name), np.random.default_rng(4)
    lanes = library.lanes()
    for case in range(30):
        for codes16, width, w_type, x_type, top, least in (
            (0, 4, np.uint8, np.int8, 15, 0),
            (1, 2, np.int16, np.int16, 255, 0),
            (1, 2, np.int16, np.int16, 127, -128),
        ):
            steps = 32 // width
            limit = np.iinfo(x_type).max
            w = rng.integers(least, top, (steps, 2 * lanes, width), w_type, endpoint=True)
            x = rng.integers(-limit, limit, (steps, width), x_type, endpoint=True)
            if case < 3:
                w[:], x[:] = (top, least or top, top)[case], (limit, limit, -limit)[case]
            out = np.zeros(2 * lanes, np.int32)
            scale = (32767, 1, int(rng.integers(0, 32767, endpoint=True)))[min(case // 3, 2)]
            library.unit_sums(
                *(ctypes.c_void_p(address(v)) for v in (w, x)), steps, codes16, scale, ctypes.c_void_p(address(out))
            )
            exact = (w.astype(np.int64) * x[:, None].astype(np.int64)).sum((0, 2))
            assert np.array_equal(out, exact if codes16 else exact * scale)


@pytest.mark.parametrize("name", [*machine_isas(), *EMULATED])
def test_choices_of_lanes(probe: Callable[[str], ctypes.CDLL], name: str) -> None:
    library, rng = probe(name), np.random.default_rng(5)
    lanes = library.lanes()
    for _ in range(30):
        a, b = rng.choice(FLOATS, lanes), rng.choice(FLOATS, lanes)
        high, low, largest = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32), np.zeros(1, np.int32)
        library.lane_choices(*(ctypes.c_void_p(address(v)) for v in (a, b, high, low, largest)))
        assert np.array_equal(high.view(np.int32), np.where(a > b, a, b).view(np.int32))
        assert np.array_equal(low.view(np.int32), np.where(a < b, a, b).view(np.int32))
        assert largest[0] == max(a.view(np.int32).max(), b.view(np.int32).max())


def test_every_instruction_the_kernels_name_is_emulated() -> None:
    """What emulated.h lacks would be the machine's own, and would not compile only once it is used."""
    emulated = (SOURCES / "emulated.h").read_text()
    sources = [path for path in SOURCES.glob("*.[ch]") if path.name not in (*_COMMON_UNITS, "emulated.h")]
    used = {name for path in sources for name in re.findall(r"_mm512_\w+|_mm256_\w+_avx_\w+", path.read_text())}
    assert len(used) > 10
    assert {name for name in used if f"#define {name} " not in emulated} == set()
