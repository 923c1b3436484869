"""What this machine can do at most, to set measured kernels against.

Owns: compiling plain_limits.c, stream reads from huge pages, fused multiply-adds of eight fp32 lanes.
Does not know: kernels.
Invariants: best of several repeats; reads are wall time of all threads at once, arithmetic is CPU time of one; on a
machine without AVX2 and FMA the second figure is that of the compiler's own code.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

FLOPS_A_ROUND = 192


class Limits:
    """Reads are shared by `threads` threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "limits.so"
            source = Path(__file__).with_name("plain_limits.c")
            flags = ["-O3", "-march=native", "-shared", "-fPIC"]
            subprocess.run(["cc", *flags, str(source), "-o", str(target)], check=True)
            self._library = ctypes.CDLL(str(target))
        self._library.read_stream.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._library.multiply_add.argtypes = [ctypes.c_int64, ctypes.c_float]

    def read_gb_s(self, buffer: Tensor, repeats: int = 15) -> float:
        """GB/s of reading `buffer` (written before, at a 64-byte border), each thread its share."""
        share = buffer.numel() * buffer.element_size() // self._threads // 128 * 128
        starts = [buffer.data_ptr() + i * share for i in range(self._threads)]
        seconds = self._best(lambda i: self._library.read_stream(starts[i], share), repeats)
        return share * self._threads / seconds / 1e9

    def gflop_s(self, repeats: int = 40, rounds: int = 100_000) -> float:
        """GFLOP/s of one core."""
        best = float("inf")
        for _ in range(repeats):
            began_s = time.thread_time()
            self._library.multiply_add(rounds, 0.5)
            best = min(best, time.thread_time() - began_s)
        return rounds * FLOPS_A_ROUND / best / 1e9

    def _best(self, work: Callable[[int], object], repeats: int) -> float:
        """Least seconds in which every thread has done its share."""
        best = float("inf")
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(work, range(self._threads)))
            for _ in range(repeats):
                began_s = time.perf_counter()
                list(pool.map(work, range(self._threads)))
                best = min(best, time.perf_counter() - began_s)
        return best
