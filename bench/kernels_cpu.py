"""Claim: linear kernels of the CPU backend read weights at 80 % of the machine's read rate, and compute near its peak.

The linear layers of SmolLM2-135M in every weight format, at several numbers of rows, beside three limits measured by
the same thread pool (bench/limits.c): bytes read from memory, fp32 fused multiply-adds, exact integer products of 8
and of 16 bits. One row counts against the read rate (bytes as packed, scales included), 64
and more against arithmetic. bf16 weights are widened and multiplied in fp32: their limit is fp32's.

A figure is the sum over layers of each call's least time. Limits are taken between the calls, and the best of them
counts: the machine's speed changes within seconds, and the best of both belong together. With one thread, time is the
thread's CPU time, which other programs on the machine disturb least; with more, it is wall time.

    python bench/kernels_cpu.py [--threads 1] [--formats w4g32,w8g32] [--rows 1,64] [--seconds 2]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from report import ROOT, Report, quiet_gc

from aengine.kernels.native import NativeOps, Unavailable, load_native_ops
from aengine.kernels.native.build import SETS, SOURCES
from aengine.kernels.native.library import WeightMemory
from aengine.kernels.ops import Linear
from aengine.kernels.quantised import Quantised

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # [out, in]: qkv, output, gate and up, down
HEAD = (49152, 576)
LAYERS = 30
READ_BYTES, PIECE_BYTES = 256 * 2**20, 2**20
ONE_ROW_LIMIT = 0.8
MANY_ROWS, MANY_ROWS_LIMIT = 64, 0.65
ROW_LIMIT = 0.85  # of many rows where an output has one scale
ROW = -1
FMA, BYTES, WIDE = range(3)


@dataclass(frozen=True)
class Format:
    """`bits` 16 and 32: dense. `group`: inputs that share a scale, or ROW."""

    bits: int
    group: int = 0
    minimum: bool = False

    @property
    def arithmetic(self) -> int:
        if not self.group:
            return FMA
        return WIDE if self.bits == 8 else BYTES

    def weight(self, out: int, size_in: int) -> Linear:
        if not self.group:
            dtype = torch.float32 if self.bits == 32 else torch.bfloat16
            return Linear(torch.randn(out, size_in).to(dtype))
        low, high, dtype = (0, 16, torch.uint8) if self.bits == 4 else (-128, 128, torch.int8)
        codes = torch.randint(low, high, (out, size_in), dtype=dtype)
        group = size_in if self.group == ROW else self.group
        scale = (torch.rand(out, size_in // group) + 0.5).half().float()
        part = Quantised(codes, scale, scale.neg() if self.minimum else None, group, self.bits)
        return Linear(torch.empty((out, size_in), device="meta"), None, (part,))


FORMATS = {
    "fp32": Format(32),
    "bf16": Format(16),
    "w4g32": Format(4, 32, minimum=True),
    "w8g32": Format(8, 32),
    "w8g16": Format(8, 16),
    "w8row": Format(8, ROW),
}


class Limits:
    """What the machine does at best, right now."""

    def __init__(self, ops: NativeOps, threads: int) -> None:
        folder = tempfile.TemporaryDirectory()
        library = Path(folder.name) / "limits.so"
        sources = [str(ROOT / "bench" / "limits.c"), str(SOURCES / "pool.c")]
        flags = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", f"-I{SOURCES}")
        command = ["cc", *flags, *SETS[ops.context.isa], "-DAE_ISA=limit", *sources, "-o", str(library)]
        subprocess.run(command, check=True)
        self._library, self._folder = ctypes.CDLL(str(library)), folder
        for name, result, arguments in (
            ("limit_pool", ctypes.c_void_p, [ctypes.c_int]),
            ("limit_read", ctypes.c_double, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]),
            ("limit_gops", ctypes.c_double, [ctypes.c_void_p, ctypes.c_int]),
        ):
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        self._pool = self._library.limit_pool(threads)
        self._block = WeightMemory(ops.context.library).take(READ_BYTES)
        self._least = [float("inf")] * (READ_BYTES // PIECE_BYTES)
        self._next = -1
        ctypes.memset(self._block.address, 1, READ_BYTES)

    def read_gbs(self, pieces: int = 1) -> float:
        """After reading so many pieces more: each piece's least time so far, summed, as the kernels' calls are."""
        for _ in range(pieces):
            index = self._next = (self._next + 1) % len(self._least)
            rate = self._library.limit_read(self._pool, self._block.address + index * PIECE_BYTES, PIECE_BYTES)
            self._least[index] = min(self._least[index], PIECE_BYTES / rate / 1e9)
        return READ_BYTES / sum(self._least) / 1e9

    def gops(self, kind: int) -> float:
        return float(self._library.limit_gops(self._pool, kind))


class Calls(NativeOps):
    """Keeps what would be called, with outputs in memory that is written again and again, as a captured step does."""

    def __init__(self, ops: NativeOps) -> None:
        super().__init__(ops.context)
        self._kept: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self.last: Callable[[], int] = lambda: 0

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        key = (tuple(shape), dtype)
        if key not in self._kept:
            self._kept[key] = torch.zeros(key[0], dtype=dtype)
        return self._kept[key]

    def _run(self, name: str, args: bytes) -> None:
        self.last = partial(self._operations[name], args)

    def linear_call(self, x: torch.Tensor, w: Linear) -> Callable[[], int]:
        self.linear(x, w)
        return self.last


@dataclass(frozen=True)
class Measured:
    seconds: float
    bytes: int
    operations: float
    share: float  # of the limit
    limit: float

    @property
    def gbs(self) -> float:
        return self.bytes / self.seconds / 1e9

    @property
    def gops(self) -> float:
        return self.operations / self.seconds / 1e9


def measure(
    ops: Calls,
    weights: list[Linear],
    rows: int,
    seconds: float,
    limit: Callable[[], float],
    clock: Callable[[], float],
) -> Measured:
    """All weights in turn, again and again. `limit`: in 1e9 bytes a second for one row, else in 1e9 operations."""
    x = {w.weight.shape[1]: torch.randn(rows, w.weight.shape[1]) for w in weights}
    calls = [ops.linear_call(x[w.weight.shape[1]], w) for w in weights]
    sizes = [float(w.packed.block.size) for w in weights]
    operations = [2.0 * rows * w.weight.numel() for w in weights]
    work = sizes if rows == 1 else operations
    least, limits = [float("inf")] * len(weights), []
    end = time.perf_counter() + seconds
    for turn in itertools.count():
        for index, call in enumerate(calls):
            limits.append(limit())
            began = clock()
            call()
            least[index] = min(least[index], clock() - began)
        if turn and time.perf_counter() > end:
            break
    seconds = sum(least)
    return Measured(seconds, int(sum(sizes)), sum(operations), sum(work) / seconds / 1e9 / max(limits), max(limits))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", default="1,4,16,64,256")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each format and number of rows")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "aengine-kernels-cpu")
    options = parser.parse_args()
    names, rows = options.formats.split(","), [int(r) for r in options.rows.split(",")]
    torch.set_num_threads(1)
    loaded = load_native_ops(options.cache, options.threads)
    if isinstance(loaded, Unavailable):
        print(loaded.reason)
        return 1
    ops, limits = Calls(loaded), Limits(loaded, options.threads)
    report = Report(
        "kernels_cpu",
        f"1 row reads at {ONE_ROW_LIMIT:.0%} of memory's rate, {MANY_ROWS} compute at {MANY_ROWS_LIMIT:.0%} of peak",
        {"isa": loaded.context.isa, "threads": options.threads, "rows": options.rows, "seconds": options.seconds},
    )
    read = limits.read_gbs(20 * READ_BYTES // PIECE_BYTES)
    for kind, name in ((FMA, "fp32 fma"), (BYTES, "4-bit x 8-bit"), (WIDE, "16-bit x 16-bit")):
        print(f"limit {name}: {max(limits.gops(kind) for _ in range(100)):.0f} Gop/s")
    print(f"limit read: {read:.1f} GB/s")
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    for name in names:
        fmt = FORMATS[name]
        weights = [ops.prepare(fmt.weight(*shape)) for _ in range(LAYERS) for shape in LAYER]
        weights.append(ops.prepare(fmt.weight(*HEAD)))
        for count in rows:
            # Of many rows three layers say as much as all: arithmetic, not memory, sets the time.
            some = weights if count < MANY_ROWS else weights[: 3 * len(LAYER)]
            with quiet_gc():
                limit = limits.read_gbs if count == 1 else lambda kind=fmt.arithmetic: limits.gops(kind)
                m = measure(ops, some, count, options.seconds, limit, clock)
            print(
                f"{name} M={count} {m.seconds * 1e3:8.2f} ms  {m.gbs:5.1f} GB/s  {m.gops:6.1f} Gop/s  "
                f"{m.share:4.0%} of {m.limit:.1f}",
                flush=True,
            )
            report.figures[f"{name} M={count}"] = {"gbs": m.gbs, "gops": m.gops, "share": m.share, "limit": m.limit}
            if count == 1:
                report.at_least(f"{name} one row: share of the read rate", m.share, ONE_ROW_LIMIT)
            if count >= MANY_ROWS:
                least = ROW_LIMIT if fmt.group == ROW else MANY_ROWS_LIMIT
                report.at_least(f"{name} {count} rows: share of peak", m.share, least)
    return 0 if report.close() else 1


if __name__ == "__main__":
    raise SystemExit(main())
