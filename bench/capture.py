"""Claim: a replayed decode step spends at most 250 us outside of its one foreign call, whatever its rows.

Runs the same decode steps operation by operation and captured, in turn, on one model with two caches: CPU time of the
step's thread outside of foreign calls (measured in steps whose kernels are not run), and wall time of whole steps
(least of all; other programs share the machine).

    python bench/capture.py [--model smollm2-135m] [--rows 1 16 64] [--dtype float32] [--steps 60]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from report import Report, quiet_gc

from aengine.config import home, usable_home
from aengine.kernels.native import NativeOps, Unavailable, load_native_ops
from aengine.kernels.native.capture import Sizes
from aengine.kernels.ops import LayerKV, Model
from aengine.models.loader import load_model
from aengine.models.store import resolve
from aengine.runner.captured_step import CapturedExecutor, CapturedStep
from aengine.runner.native_sampler import NativeSampler
from aengine.runner.torch_step import TorchExecutor
from aengine.types import SamplingParams, SlotSetup, StepPlan, TableDelta, TokenRules

PAGE, CONTEXT = 16, 128
LIMIT_US = 250.0


def make_executor(model: Model, ops: NativeOps, slots: int, how: str) -> TorchExecutor | CapturedExecutor:
    """`how`: "torch sampler" or "native sampler" one operation at a time, or "captured"."""
    pages = 1 + slots * CONTEXT // PAGE
    kv = [
        LayerKV(*(torch.zeros(pages, PAGE, spec.kv_heads, spec.head_dim, dtype=model.dtype) for _ in range(2)))
        for spec in model.attention
    ]
    columns = [CONTEXT // PAGE] * (1 + max(spec.group for spec in model.attention))
    sampler = NativeSampler(ops.context, slots, model.vocab_size, CONTEXT)
    eager = TorchExecutor(model, ops, kv, columns, slots, CONTEXT, sampler=None if how == "torch sampler" else sampler)
    if how != "captured":
        return eager
    with torch.inference_mode():
        step = CapturedStep(model, ops, sampler, eager.state, kv, (), Sizes(512, slots, 0, CONTEXT + 1))
    return CapturedExecutor(eager, step)


def plans(groups: int, rows: int, temperature: float) -> Iterator[StepPlan]:
    """One token a row at rising positions, from its set-up on; every row starts again at the context's end."""
    slots = np.arange(rows, dtype=np.int32)
    ones = np.ones(rows, dtype=np.int32)
    step = 0
    while True:
        for position in range(CONTEXT - 1):
            step += 1
            first = position == 0
            params = SamplingParams(temperature=temperature, top_p=0.95 if temperature else 1.0)
            none = np.zeros(0, np.int32)
            setups = tuple(SlotSetup(slot, slot, 1, params, TokenRules(), slot, none) for slot in range(rows))
            per_row = CONTEXT // PAGE
            deltas = tuple(
                TableDelta.run(slot, group, 0, range(1 + slot * per_row, 1 + (slot + 1) * per_row))
                for slot in range(rows)
                for group in range(groups)
            )
            yield StepPlan(
                step=step, slots=slots, handles=slots.astype(np.int64), starts=ones * position, counts=ones,
                samples=ones, relay=np.full(rows, not first), ids=ones * 7 if first else none,
                tables=deltas if first else (), setups=setups if first else (), decodes=rows,
            )  # fmt: skip


@contextmanager
def idle_kernels(ops: NativeOps) -> Iterator[None]:
    """Foreign calls return at once: what a step costs is then what is not in them."""
    kept, run_program = dict(ops._operations), ops.context.run_program
    try:
        for name in kept:
            ops._operations[name] = lambda args: 0
        ops.context.run_program = lambda calls, count: 0  # type: ignore[method-assign]
        yield
    finally:
        ops._operations.update(kept)
        ops.context.run_program = run_program  # type: ignore[method-assign]


def measure(model: Model, ops: NativeOps, rows: int, steps: int, temperature: float) -> dict[str, dict[str, float]]:
    groups = 1 + max(spec.group for spec in model.attention)
    ways = ("torch sampler", "native sampler", "captured")
    executors = {how: make_executor(model, ops, rows, how) for how in ways}
    streams = {how: plans(groups, rows, temperature) for how in ways}
    wall: dict[str, list[float]] = {how: [] for how in ways}
    outside: dict[str, list[float]] = {how: [] for how in ways}
    for _ in range(steps):
        for how, executor in executors.items():
            staged = executor.stage(next(streams[how]))
            began = time.perf_counter()
            executor.run(staged)
            wall[how].append(1e3 * (time.perf_counter() - began))
    with idle_kernels(ops), quiet_gc():
        for _ in range(steps):
            for how, executor in executors.items():
                staged = executor.stage(next(streams[how]))
                began_ns = time.thread_time_ns()
                executor.run(staged)
                outside[how].append((time.thread_time_ns() - began_ns) / 1e3)
    return {how: {"step_ms": min(wall[how][3:]), "outside_us": float(np.median(outside[how][3:]))} for how in ways}


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: with top_p 0.95")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ops = load_native_ops(usable_home() / "native", args.threads)
    if isinstance(ops, Unavailable):
        raise SystemExit(ops.reason)
    model = load_model(resolve(args.model, home=home(), progress=None), ops, getattr(torch, args.dtype))
    report = Report("capture", (__doc__ or "").splitlines()[0].removeprefix("Claim: "), vars(args))
    for rows in args.rows:
        figures = measure(model, ops, rows, args.steps, args.temperature)
        report.figures[str(rows)] = figures
        for how, figure in figures.items():
            print(f"{rows:3} rows  {how:15} {figure['outside_us']:7.0f} us outside  {figure['step_ms']:7.2f} ms a step")
        report.at_most(f"outside of the call, {rows} rows", figures["captured"]["outside_us"], LIMIT_US, "us")
    return report.close()


if __name__ == "__main__":
    main()
