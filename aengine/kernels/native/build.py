"""Compiling the C kernels with the system's compiler, once, into a cache.

Owns: the list of sources and flags, the digest that names a build, the atomic publication of the result.
Does not know: what the kernels compute, ctypes, torch, environment variables.
Invariants: a library under its final name is complete (written elsewhere, then renamed); its name is a digest of the
sources, the flags, the compiler and the machine, so it is never stale; processes that build at the same time do the
same work and the last rename wins with equal content. Failure is a value, `Unavailable`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")

_COMMON_UNITS = ("pool.c", "context.c", "step.c")
_KERNEL_UNITS = (
    "quantised.c", "attention.c", "gemm.c", "quantised_pack.c", "elementwise.c", "recurrent.c", "mixture.c",
    "sample.c", "unpack.c", "table.c",
)  # fmt: skip
# Contraction off: sums and products are fused only where the source says so (see simd.h).
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
# Run by AVX2 instructions: see emulated.h. One optimisation level less, for the compiler's time.
_EMULATED = (*_AVX2, "-O1", "-Wno-psabi", "-include", str(SOURCES / "emulated.h"))
# The best stands first.
SETS: dict[str, tuple[str, ...]] = {
    "avx512vnni": (*_AVX512, "-mavx512vnni"),
    "avx512": _AVX512,
    "avx2vnni": (*_AVX2, "-mavxvnni"),
    "avx2": _AVX2,
    "portable": (),
    # For tests only: what the sets of those names compile, on machines without them.
    "emulated_avx512vnni": (*_EMULATED, "-DAE_EMULATE_AVX512VNNI"),
    "emulated_avx512": (*_EMULATED, "-DAE_EMULATE_AVX512"),
    "emulated_avx2vnni": (*_EMULATED, "-DAE_EMULATE_AVX2VNNI"),
}
_AVX2_FLAGS = {"avx2", "fma", "f16c"}
_AVX512_FLAGS = {"avx512f", "avx512bw", "avx512vl", "avx512dq", *_AVX2_FLAGS}
# As /proc/cpuinfo names them: the system leaves out what it would not save.
_CPU_FLAGS: dict[str, set[str]] = {
    "avx512vnni": {"avx512_vnni", *_AVX512_FLAGS},
    "avx512": _AVX512_FLAGS,
    "avx2vnni": {"avx_vnni", *_AVX2_FLAGS},
    "avx2": _AVX2_FLAGS,
    "portable": set(),
}
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Built:
    """A loadable library. `seconds` is what this call spent; `compiled` is False when the cache had it."""

    path: Path
    seconds: float
    compiled: bool


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why there are no native kernels, in words fit for a log line."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Unit:
    source: str
    object: str
    flags: tuple[str, ...]


def machine_isas() -> tuple[str, ...]:
    """The instruction sets this machine has, the best first; "portable" alone where its flags cannot be read."""
    flags = _machine_flags()
    return tuple(name for name, needed in _CPU_FLAGS.items() if needed <= flags)


def best_isa() -> str:
    return machine_isas()[0]


def lack_of(isa: str) -> str | None:
    """Why the kernels for `isa` cannot run here, in words; None when they can."""
    if isa not in _CPU_FLAGS:
        return f"there is no instruction set {isa!r}; there are {', '.join(_CPU_FLAGS)}"
    missing = sorted(_CPU_FLAGS[isa] - _machine_flags())
    if not missing:
        return None
    return f"the processor lacks {' '.join(missing)} of the instruction set {isa}; it has {', '.join(machine_isas())}"


def _machine_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set[str]())


def build(
    cache_dir: Path,
    *,
    isas: Sequence[str] | None = None,
    compiler: str | None = None,
    on_compile: Callable[[], object] | None = None,
) -> Built | Unavailable:
    """Return a library with the kernels for `isas`, compiling it if `cache_dir` does not hold it yet.

    `isas` None: the best of `machine_isas()` that the compiler knows, alone (about 5 s of compiling, shared by all
    cores). `compiler` None: cc, gcc or clang. `on_compile` is called before compiling, not when the library is there.
    """
    program = _find_compiler(compiler)
    if program is None:
        wanted = compiler if compiler is not None else ", ".join(COMPILERS)
        return Unavailable(f"no C compiler found (tried {wanted})")
    choices = [(isa,) for isa in machine_isas()] if isas is None else [tuple(sorted(isas, key=list(SETS).index))]
    failures: list[Unavailable] = []
    for sets in choices:
        built = _build(cache_dir, program, sets, on_compile)
        if isinstance(built, Built):
            return built
        failures.append(built)
    return failures[0]


def _build(
    cache_dir: Path, program: str, sets: Sequence[str], on_compile: Callable[[], object] | None
) -> Built | Unavailable:
    started = time.perf_counter()
    try:
        target = cache_dir / f"native-{_digest(program, sets)}.so"
        compiled = not target.exists()
        if compiled:
            if on_compile is not None:
                on_compile()
            cache_dir.mkdir(parents=True, exist_ok=True)
            _compile(program, sets, target)
        return Built(target, time.perf_counter() - started, compiled)
    except subprocess.CalledProcessError as error:
        return Unavailable(f"{program} failed with status {error.returncode}: {_last_lines(error.stderr)}")
    except subprocess.TimeoutExpired:
        return Unavailable(f"{program} took longer than {_TIMEOUT_S:.0f} s")
    except OSError as error:
        return Unavailable(f"cannot build the native kernels in {cache_dir}: {error}")


def _find_compiler(compiler: str | None) -> str | None:
    for name in COMPILERS if compiler is None else (compiler,):
        found = shutil.which(name)
        if found is not None:
            return found
    return None


def _units(sets: Sequence[str]) -> tuple[_Unit, ...]:
    kernels = [
        _Unit(source, f"{source}.{name}.o", (*SETS[name], f"-DAE_ISA={name}"))
        for source in _KERNEL_UNITS
        for name in sets
    ]
    have = "-DAE_SETS(X)=" + "".join(f"X({name})" for name in sets)
    return (*kernels, *(_Unit(source, f"{source}.o", (have,)) for source in _COMMON_UNITS))


def _digest(program: str, sets: Sequence[str]) -> str:
    digest = hashlib.sha256()
    version = _run([program, "--version"])
    for part in (platform.system(), platform.machine(), program, version, repr(_FLAGS), repr(_units(sets))):
        digest.update(part.encode() + b"\0")
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _compile(program: str, sets: Sequence[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".native-") as folder:
        work = Path(folder)

        def compile_unit(unit: _Unit) -> str:
            output = str(work / unit.object)
            _run([program, *_FLAGS, *unit.flags, "-c", str(SOURCES / unit.source), "-o", output])
            return output

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as workers:
            objects = list(workers.map(compile_unit, _units(sets)))
        linked = work / "linked.so"
        _run([program, "-shared", "-pthread", *objects, "-lm", "-o", str(linked)])
        os.replace(linked, target)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL
    )
    return done.stdout


def _last_lines(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    return " / ".join(lines[-3:]) if lines else "no message"
