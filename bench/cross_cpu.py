"""Claim: cross-attention in C takes a small part of the time of the plain torch reference, token by token.

One cross layer of Llama 3.2 Vision (32 query, 8 key-value heads of 128), rows that see images of 1 to 4 tiles (1,601
entries each), one thread: CPU time in milliseconds, the least of repeats, turn by turn.

    python bench/cross_cpu.py [--seconds 2]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import Report, quiet_gc

from aengine.kernels.native import Unavailable, load_native_ops
from aengine.kernels.ops import AttentionSpec, CrossBatch, CrossItem, CrossSpan, LayerKV, StepBatch
from aengine.kernels.reference_cross import cross_attention

PAGE = 16
SPEC = AttentionSpec(0, 0, 32, 8, 128, 128**-0.5, cross=True)
# rows, tokens of each, entries of its image, whether rows see the same image
CASES = ((1, 1, 1601, False), (1, 1, 6404, False), (8, 1, 1601, False), (8, 1, 1601, True), (1, 256, 6404, False))


def make_batch(rows: int, tokens: int, entries: int, shared: bool, dtype: torch.dtype) -> StepBatch:
    images, size = 1 if shared else rows, -(-entries // PAGE)
    kv = LayerKV(*torch.randn(2, images * size, PAGE, SPEC.kv_heads, SPEC.head_dim).to(dtype))
    pages = torch.randperm(images * size).split(size)
    spans = tuple(
        CrossSpan(row * tokens, tokens, (CrossItem(pages[0 if shared else row], entries),)) for row in range(rows)
    )
    none = torch.empty(0, dtype=torch.int32)
    return StepBatch(
        ids=none, positions=none, row_offsets=none, context=none, tables=(), kv=(kv,), max_context=0, host_counts=(),
        host_starts=(), cross=CrossBatch(torch.arange(rows * tokens), spans),
    )  # fmt: skip


def least(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    times, end = [float("inf")] * len(calls), time.perf_counter() + seconds
    while time.perf_counter() < end or times[-1] == float("inf"):
        for index, call in enumerate(calls):
            began = time.thread_time()
            call()
            times[index] = min(times[index], time.thread_time() - began)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each case")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "aengine-kernels-cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ops = load_native_ops(options.cache, 1)
    if isinstance(ops, Unavailable):
        print(ops.reason)
        return 1
    report = Report("cross_cpu", "native cross-attention takes at most half of the reference's time", {"isa": ops.name})
    for dtype in (torch.float32, torch.bfloat16):
        for rows, tokens, entries, shared in CASES:
            batch, q = make_batch(rows, tokens, entries, shared, dtype), torch.randn(rows * tokens, 32, 128).to(dtype)
            assert batch.cross is not None
            with quiet_gc():
                native, plain = least(
                    [
                        lambda q=q, batch=batch: ops.cross_attention(q, SPEC, batch),
                        lambda q=q, batch=batch: cross_attention(q, batch.kv[0], SPEC, batch.cross, 1),
                    ],
                    options.seconds,
                )
            name = f"{str(dtype)[6:]} {rows} x {tokens} tokens, {entries} entries{', shared' if shared else ''}"
            print(
                f"{name}: native {native * 1e3:.2f} ms, reference {plain * 1e3:.2f} ms, {plain / native:.1f} x",
                flush=True,
            )
            report.figures[name] = {"native_ms": native * 1e3, "reference_ms": plain * 1e3}
            report.at_least(f"{name}: times faster", plain / native, 2.0)
    return 0 if report.close() else 1


if __name__ == "__main__":
    raise SystemExit(main())
