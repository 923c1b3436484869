"""Native paged attention against the machine's limits and against torch.

    python -m bench.attention_cpu [--quick] [--threads N]

Shape of SmolLM2-135M: 9 query and 3 key-value heads of 64, pages of 16 tokens from an arena with 30 layers, so that a
layer's pages lie as far apart as in an engine. Every step uses the next layer of the arena: what one reads does not lie
in cache for the next. "shared": all rows name the same pages for all but the last 64 positions. GB/s counts the KV that
rows read, shared pages as often as rows read them; "of peak" is arithmetic per second of CPU time against one
core's multiply-adds. "torch": gather of the pages and scaled_dot_product_attention.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.config import usable_home
from aengine.engine.build_cpu import available_cores
from aengine.kernels.native import NativeOps, Unavailable, load_native_ops
from aengine.kernels.ops import AttentionSpec, LayerKV, StepBatch
from aengine.memory import Full, attention_group, plan
from aengine.memory.arena import Arena
from bench.limits import Limits
from bench.report import Report

HEADS, KV_HEADS, DIM, PAGE, LAYERS = 9, 3, 64, 16, 30
OWN_TOKENS = 64
DECODE = ((1, 256), (1, 1024), (1, 8192), (16, 256), (16, 1024), (16, 8192), (64, 256), (64, 1024), (64, 8192))
QUICK = ((1, 1024), (16, 1024), (64, 256))
PREFILL = ((256, 2048), (512, 8192))
MOST_BYTES = 3 * 2**30
KINDS = ("float32", "bfloat16", "int8")
SPEC = AttentionSpec(0, 0, HEADS, KV_HEADS, DIM, DIM**-0.5)


@dataclass(frozen=True)
class Case:
    """`rows` rows of `count` new tokens each that end at `context`; `shared`: with a common prefix."""

    rows: int
    count: int
    context: int
    kind: str
    shared: bool

    @property
    def name(self) -> str:
        how = "decode" if self.count == 1 else f"prefill {self.count}"
        return f"{how} B={self.rows} ctx={self.context} {self.kind}" + (" shared" if self.shared else "")

    @property
    def pages(self) -> int:
        own = OWN_TOKENS if self.shared else self.context
        return 1 + (self.context // PAGE if self.shared else 0) + self.rows * -(-own // PAGE)

    @property
    def bytes(self) -> int:
        item = {"float32": 4, "bfloat16": 2, "int8": 1}[self.kind]
        scale = 4 if self.kind == "int8" else 0
        return 2 * self.rows * self.context * KV_HEADS * (DIM * item + scale)

    @property
    def flops(self) -> float:
        seen = self.context - (self.count - 1) / 2
        return 4.0 * self.rows * self.count * HEADS * DIM * seen


def layers_of(case: Case) -> tuple[LayerKV, ...]:
    """Written pages of as many layers as fit into MOST_BYTES, at least one and at most LAYERS."""
    group = attention_group("full", Full(), LAYERS, kv_heads=KV_HEADS, head_dim=DIM, dtype=case.kind)
    layers = max(1, min(LAYERS, MOST_BYTES // (case.pages * group.payload_bytes // LAYERS)))
    group = attention_group("full", Full(), layers, kv_heads=KV_HEADS, head_dim=DIM, dtype=case.kind)
    size = case.pages * (group.payload_bytes + 4096) + 64 * 2**20
    arena = Arena(plan([group], size))
    kv = arena.layer_kv([(0, layer) for layer in range(layers)])
    for views in kv:
        for pages in (views.k, views.v):
            used = pages[: case.pages]
            used.copy_(torch.randint(-127, 128, used.shape) if case.kind == "int8" else torch.randn(used.shape))
        for scales in (views.k_scale, views.v_scale):
            if scales is not None:
                scales[: case.pages] = 0.01
    return kv


def batch_of(case: Case, kv: tuple[LayerKV, ...]) -> StepBatch:
    order = (torch.randperm(case.pages - 1) + 1).to(torch.int32).tolist()
    columns = -(-case.context // PAGE)
    common = (case.context - OWN_TOKENS) // PAGE if case.shared else 0
    prefix = [order.pop() for _ in range(common)]
    tables = [prefix + [order.pop() for _ in range(columns - common)] for _ in range(case.rows)]
    start = case.context - case.count
    return StepBatch(
        ids=torch.zeros(case.rows * case.count, dtype=torch.int32),
        positions=torch.arange(start, case.context, dtype=torch.int32).repeat(case.rows),
        row_offsets=torch.arange(0, case.rows * case.count + 1, case.count, dtype=torch.int32),
        context=torch.full((case.rows,), case.context, dtype=torch.int32),
        tables=(torch.tensor(tables, dtype=torch.int32),),
        kv=kv,
        max_context=case.context,
        host_counts=(case.count,) * case.rows,
        host_starts=(start,) * case.rows,
    )


def best_ms(work: Callable[[int], object], seconds: float) -> tuple[float, float]:
    """Least milliseconds of a call, and of CPU time of the process; call i works on layer i."""
    best, best_cpu, step, end_s = float("inf"), float("inf"), 0, time.perf_counter() + seconds
    while step < 6 or time.perf_counter() < end_s:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        work(step)
        best, best_cpu = min(best, time.perf_counter() - began_s), min(best_cpu, time.process_time() - began_cpu_s)
        step += 1
    return best * 1e3, best_cpu * 1e3


def gather_and_attend(q: Tensor, kv: LayerKV, batch: StepBatch, case: Case) -> Tensor:
    shape = (case.rows, -1, KV_HEADS, DIM)
    table = batch.tables[0].flatten()
    k, v = (pages.index_select(0, table).view(shape)[:, : case.context].transpose(1, 2) for pages in (kv.k, kv.v))
    queries = q.view(case.rows, case.count, HEADS, DIM).transpose(1, 2).to(k.dtype)
    seen = torch.ones(case.count, case.context, dtype=torch.bool).tril(case.context - case.count)
    return F.scaled_dot_product_attention(queries, k, v, attn_mask=seen, enable_gqa=True)


def measure(ops: NativeOps, case: Case, seconds: float, torch_threads: int) -> dict[str, float]:
    kv = layers_of(case)
    batch = batch_of(case, kv)
    q = torch.randn(case.rows * case.count, HEADS, DIM)
    k = torch.randn(case.rows * case.count, KV_HEADS, DIM)
    specs = [AttentionSpec(layer, 0, HEADS, KV_HEADS, DIM, SPEC.scale) for layer in range(len(kv))]
    ms, cpu_ms = best_ms(lambda i: ops.attention(q, k, k, specs[i % len(kv)], batch), seconds)
    found = {"ms": ms, "gb_s": case.bytes / ms / 1e6, "cpu_ms": cpu_ms, "gflop_s": case.flops / cpu_ms / 1e6}
    if case.kind != "int8" and case.bytes * case.count < 2**30:
        torch.set_num_threads(torch_threads)
        found["torch_ms"], _ = best_ms(lambda i: gather_and_attend(q, kv[i % len(kv)], batch, case), seconds)
        torch.set_num_threads(1)
    return found


def cases(quick: bool, kinds: tuple[str, ...]) -> list[Case]:
    out = []
    for rows, context in QUICK if quick else DECODE:
        for kind in kinds:
            made = [Case(rows, 1, context, kind, False)] + [Case(rows, 1, context, kind, True)] * (rows > 1)
            out += [c for c in made if c.bytes <= MOST_BYTES or c.shared]
    return out + [Case(1, count, context, kind, False) for count, context in PREFILL for kind in kinds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three decode shapes only")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--seconds", type=float, default=0.6, help="time for each figure")
    parser.add_argument("--kinds", default=",".join(KINDS), help="KV element types")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ops = load_native_ops(usable_home() / "native", args.threads)
    if isinstance(ops, Unavailable):
        print(ops.reason)
        return 1
    config = {"threads": args.threads, "kernels": ops.name, "seconds": args.seconds}
    report = Report("attention_cpu", "decode attention reads KV near the rate of one stream", config)
    limits = Limits(args.threads)
    group = attention_group("full", Full(), 1, kv_heads=KV_HEADS, head_dim=DIM, dtype="float32")
    buffer = Arena(plan([group], 512 * 2**20)).buffer[: 256 * 2**20].fill_(1)
    read, peak = limits.read_gb_s(buffer), limits.gflop_s()
    report.figures |= {"read_gb_s": read, "peak_gflop_s": peak}
    print(f"limits: read {read:.1f} GB/s, multiply-add {peak:.0f} GFLOP/s a core")
    print(f"{'ms a layer':44} {'ms':>9} {'cpu ms':>9} {'GB/s':>7} {'of peak':>7} {'torch ms':>9}")
    for case in cases(args.quick, tuple(args.kinds.split(","))):
        found = measure(ops, case, args.seconds, args.threads)
        report.figures[case.name] = found
        other = f"{found['torch_ms']:9.3f}" if "torch_ms" in found else f"{'-':>9}"
        print(
            f"{case.name:44} {found['ms']:9.3f} {found['cpu_ms']:9.3f} {found['gb_s']:7.1f} "
            f"{found['gflop_s'] / peak:7.0%} {other}",
            flush=True,
        )
    report.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
