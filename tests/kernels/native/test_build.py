"""Building: the cache, concurrent starts, and every way it can fail without raising."""

from __future__ import annotations

import ctypes
import importlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from aengine.kernels.native import Context, NativeOps, Unavailable, build, load_library, load_native_ops
from aengine.kernels.native.build import Built, best_isa
from aengine.kernels.native.library import ABI, CALL, LINEAR_ARGS, NativeError, WeightMemory, check
from aengine.kernels.ops import Linear

build_module = importlib.import_module("aengine.kernels.native.build")  # its name is also a function's


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "fakecc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The system's compiler without its optimisation, which takes most of the time; an object that one build made is
    the next one's too."""
    folder = tmp_path_factory.mktemp("quick")
    return fake_compiler(
        folder,
        f"""for output; do :; done
kept={folder}/$(printf '%s ' "$@" | sed 's| -o .*||' | cksum | tr ' ' -)
case " $* " in *" -c "*) [ -f "$kept" ] && exec cp "$kept" "$output" ;; esac
{build_module._find_compiler(None)} "$@" -O0 || exit
case " $* " in *" -c "*) cp "$output" "$kept.$$" && mv "$kept.$$" "$kept" ;; esac""",
    )


def test_second_build_is_found_in_the_cache(tmp_path: Path, quick: str) -> None:
    first = build(tmp_path, isas=("portable",), compiler=quick)
    second = build(tmp_path, isas=("portable",), compiler=quick)
    assert isinstance(first, Built)
    assert isinstance(second, Built)
    assert (first.compiled, second.compiled) == (True, False)
    assert first.path == second.path
    assert os.listdir(tmp_path) == [first.path.name]


def test_concurrent_builds_end_with_one_whole_library(tmp_path: Path, quick: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: build(tmp_path, isas=("portable",), compiler=quick), range(2)))
    paths = {r.path for r in results if isinstance(r, Built)}
    assert len(paths) == 1
    assert load_library(paths.pop()).ae_abi() == ABI
    assert len(os.listdir(tmp_path)) == 1


def test_sets_have_builds_of_their_own(tmp_path: Path, library_path: Path, quick: str) -> None:
    built = build(tmp_path, isas=("portable",), compiler=quick)
    assert isinstance(built, Built)
    assert built.path.name != library_path.name
    with pytest.raises(OSError, match="avx2"):
        Context(load_library(built.path), threads=1, isa="avx2")


def test_no_compiler(tmp_path: Path) -> None:
    result = load_native_ops(tmp_path, 1, compiler="no-such-compiler")
    assert result == Unavailable("no C compiler found (tried no-such-compiler)")


def test_failing_compiler_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, '[ "$1" = --version ] && exit 0; echo "x.c:1: no such thing" >&2; exit 3')
    cache = tmp_path / "cache"
    result = build(cache, compiler=compiler)
    assert isinstance(result, Unavailable)
    assert "status 3" in result.reason
    assert "no such thing" in result.reason
    assert os.listdir(cache) == []


def test_a_compiler_that_writes_rubbish(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, 'for last; do :; done; [ "$1" = --version ] || echo rubbish > "$last"')
    result = load_native_ops(tmp_path / "cache", 1, compiler=compiler)
    assert isinstance(result, Unavailable)
    assert "cannot be used" in result.reason


def test_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = build(tmp_path / "file" / "cache", isas=("portable",))
    assert isinstance(result, Unavailable)


def test_context_of_an_unknown_set_or_thread_count(library_path: Path) -> None:
    library = load_library(library_path)
    with pytest.raises(OSError, match="mmx"):
        Context(library, threads=1, isa="mmx")
    with pytest.raises(OSError, match="0 threads"):
        Context(library, threads=0)
    assert Context(library, threads=1).isa == best_isa()


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        ("avx2 fma f16c", "avx2"),
        ("avx2 fma", "portable"),
        ("avx2 fma f16c avx_vnni", "avx2vnni"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq", "avx512"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx_vnni", "avx2vnni"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx_vnni", "avx512vnni"),
    ],
)
def test_which_set_is_chosen(monkeypatch: pytest.MonkeyPatch, flags: str, best: str) -> None:
    monkeypatch.setattr(build_module, "_machine_flags", lambda: set(flags.split()))
    assert best_isa() == best


def test_a_set_that_cannot_run_is_refused_before_it_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "_machine_flags", lambda: {"avx2", "fma", "f16c"})
    refused = load_native_ops(tmp_path, 1, isa="avx512vnni")
    assert isinstance(refused, Unavailable)
    assert "lacks avx512_vnni avx512bw avx512dq avx512f avx512vl" in refused.reason
    unknown = load_native_ops(tmp_path, 1, isa="mmx")
    assert isinstance(unknown, Unavailable)
    assert "no instruction set 'mmx'" in unknown.reason
    assert os.listdir(tmp_path) == []


def test_a_compiler_that_lacks_a_set_gets_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old compilers do not know the newest processors: their users keep the kernels that they had."""
    monkeypatch.setattr(build_module, "_machine_flags", lambda: {"avx2", "fma", "f16c", "avx_vnni"})
    script = 'for last; do case $last in -mavx*) exit 1;; --version) exit 0; esac; done; echo content > "$last"'
    compiler = fake_compiler(tmp_path, script)
    built = build(tmp_path / "cache", compiler=compiler)
    assert isinstance(built, Built)
    assert built.path == build(tmp_path / "cache", isas=("portable",), compiler=compiler).path  # type: ignore[union-attr]


def test_status_becomes_an_error() -> None:
    check(0, "linear")
    with pytest.raises(NativeError, match="linear failed: out of memory"):
        check(1, "linear")


def test_weight_memory_is_aligned_zeroed_and_shared(library_path: Path) -> None:
    memory = WeightMemory(load_library(library_path))
    small = [memory.take(100) for _ in range(3)]
    large = memory.take(40 * 2**20)
    assert {block.address % 64 for block in [*small, large]} == {0}
    assert small[1].address - small[0].address == 128
    assert small[0].owner is small[2].owner
    assert large.owner is not small[0].owner
    assert memory.take(10).owner is small[0].owner
    assert ctypes.string_at(small[1].address, 100) == bytes(100)


def test_a_program_is_its_calls_in_order(ops: NativeOps, library_path: Path) -> None:
    """Two products in one foreign call, the second of the first one's result."""
    first, second = ops.prepare(Linear(torch.randn(24, 40))), ops.prepare(Linear(torch.randn(8, 24)))
    x, y, z = torch.randn(5, 40), torch.empty(5, 24), torch.empty(5, 8)
    expected = ops.linear(ops.linear(x, first), second)

    def linear_args(x: torch.Tensor, w: Linear, y: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
        block, (rows, inputs), outputs = w.packed.block, x.shape, y.shape[1]
        packed = LINEAR_ARGS.pack(
            x.data_ptr(), 0, inputs, block.address, 0, 0, y.data_ptr(), 0, outputs, rows, inputs, outputs
        )
        return ctypes.create_string_buffer(packed, len(packed))

    structs = [linear_args(x, first, y), linear_args(y, second, z)]
    calls = b"".join(CALL.pack(0, ctypes.addressof(s)) for s in structs)
    program = ctypes.create_string_buffer(calls, len(calls))
    run = ops.context.library.ae_program_run
    assert run(ops.context.handle, ctypes.addressof(program), 2) == 0
    assert torch.equal(z, expected)
    unknown = ctypes.create_string_buffer(CALL.pack(99, 0), CALL.size)
    with pytest.raises(NativeError, match="unknown operation"):
        check(run(ops.context.handle, ctypes.addressof(unknown), 1), "program")
