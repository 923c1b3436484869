"""Claim: planning and committing a step costs at most 0.1 ms at 256 decoding rows and 0.5 ms at 1,024.

Steady decode with the prefix cache on: prompts of 64 to 79 tokens, so that a sixteenth of the rows cross a page in
every step, take a page and publish the one before. Plan N + 1 is made before step N commits, as the engine does at
depth 1. Then bursts of arrivals while rows decode, and prompts of 128k tokens. Results are made up; no device runs.

The pool is as after long use: every page has been used before. `full` also has every page cached, so that each page
taken evicts one.

CPU time of this process. Every step does the same work: the claim is about the median; the least says what a step
costs on a quiet core.

--vllm-python and --vllm-script run another engine's scheduler beside it, with that engine's own interpreter.

    python bench/scheduler.py [--rows 64,256,1024,4096] [--steps 160] [--profile 1024]
                              [--vllm-python PYTHON --vllm-script SCRIPT --vllm-model DIR]
"""

from __future__ import annotations

import argparse
import cProfile
import io
import os
import pstats
import statistics
import subprocess
import time
from collections import deque

import numpy as np
from report import TIMING, Report, quiet_gc

from aengine.memory import Pool, uniform_plan
from aengine.prefix_cache import PrefixCache
from aengine.scheduler import Scheduler
from aengine.types import Request, SamplingParams, StepPlan, StepResult, TokenRules

PAGE = 16
WARM_STEPS = 48
TARGETS_MS = {256: 0.1, 1024: 0.5}
GROWTH = 4.5


def make_scheduler(rows: int, max_tokens: int, pages: int, budget: int, *, caching: bool = True) -> Scheduler:
    cache = PrefixCache(Pool(uniform_plan(pages, PAGE)), enabled=caching)
    return Scheduler(cache, max_seqs=rows, budget_tokens=budget, max_tokens=max_tokens, page_tokens=PAGE)


def request(handle: int, prompt: int, output: int) -> Request:
    return Request(
        handle=handle,
        id=str(handle),
        prompt_ids=np.random.default_rng(handle).integers(10, 50_000, prompt, np.int32),
        sampling=SamplingParams(max_tokens=output),
        rules=TokenRules(stop_ids=(2,)),
        max_total_tokens=prompt + output,
        seed=0,
    )


def result_of(plan: StepPlan) -> StepResult:
    rows = len(plan.slots)
    return StepResult(plan.step, np.full((rows, 1), 7, np.int32), np.minimum(plan.samples, 1))


def wear(pool: Pool, *, cached: bool) -> None:
    """Use every page once: page objects are made on first use. `cached`: leave each in the cache, to be evicted."""
    for number, page in enumerate(pool.take(pool.plan.capacity)[0]):
        if cached:
            pool.publish(page, number.to_bytes(32, "big"))
        pool.drop(page, 0)


class Timed:
    """A scheduler at depth 1: microseconds of CPU time of each plan and commit."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.plan_us: list[float] = []
        self.commit_us: list[float] = []
        self.rows: list[int] = []
        self._in_flight: deque[StepPlan] = deque()

    def step(self) -> bool:
        """Plan a step, then commit the one before; False when there was nothing to do."""
        began_ns = time.process_time_ns()
        plan = self.scheduler.plan()
        self.plan_us.append((time.process_time_ns() - began_ns) / 1e3)
        if plan is not None:
            self._in_flight.append(plan)
        self.rows.append(0 if plan is None else len(plan.slots))
        if len(self._in_flight) < 2 and plan is not None:
            self.commit_us.append(0.0)
            return True
        if not self._in_flight:
            self.commit_us.append(0.0)
            return False
        result = result_of(self._in_flight.popleft())
        began_ns = time.process_time_ns()
        self.scheduler.commit(result)
        self.commit_us.append((time.process_time_ns() - began_ns) / 1e3)
        return True

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def forget(self) -> None:
        self.plan_us.clear()
        self.commit_us.clear()
        self.rows.clear()


# ---- steady decode


def steady(rows: int, steps: int, *, caching: bool = True, full: bool = False) -> Timed:
    """`rows` rows that decode, warmed up: every row has crossed pages."""
    output = steps + WARM_STEPS + 64
    pages = rows * (-(-(80 + output) // PAGE) + 1)
    budget = 80 * rows  # all prompts in one step: over several, shortest first would bring all rows to one page phase
    timed = Timed(make_scheduler(rows, 80 + output, pages, budget, caching=caching))
    wear(timed.scheduler.cache.pool, cached=full)
    for handle in range(1, rows + 1):
        timed.scheduler.submit(request(handle, 64 + handle % PAGE, output))
    while int((timed.scheduler.columns.known >= 65).sum()) < rows:
        timed.step()
    timed.steps(WARM_STEPS)
    timed.forget()
    return timed


def steady_figures(
    rows: int, steps: int, repeats: int, *, caching: bool = True, full: bool = False
) -> dict[str, float]:
    plans: list[float] = []
    commits: list[float] = []
    for _ in range(repeats):
        timed = steady(rows, steps, caching=caching, full=full)
        with quiet_gc():
            timed.steps(steps)
        assert min(timed.rows) == rows, f"{min(timed.rows)} of {rows} rows in some step"
        plans += timed.plan_us
        commits += timed.commit_us
    both = sorted(plan + commit for plan, commit in zip(plans, commits, strict=True))
    return {
        "plan_us": min(plans),
        "commit_us": min(commits),
        "sum_us": both[0],
        "sum_p10_us": both[len(both) // 10],
        "sum_median_us": statistics.median(both),
        "sum_mean_us": statistics.fmean(both),
        "sum_p99_us": both[int(0.99 * len(both))],
    }


def measure_steady(report: Report, counts: list[int], steps: int, repeats: int) -> None:
    print(f"\nsteady decode, us a step ({repeats} runs of {steps} steps)")
    heads = "".join(f"{head:>8}" for head in ("plan", "commit", "sum", "p10", "median", "mean", "p99"))
    print(f"  {'rows':>6}{'pool':>10}{heads}{'ns a row':>10}")
    kinds = {"free": {}, "full": {"full": True}, "cache off": {"caching": False}}
    for rows in counts:
        for kind, options in kinds.items():
            row = steady_figures(rows, steps, repeats, **options)
            report.figures[f"steady_{rows}_{kind.replace(' ', '_')}"] = row
            values = "".join(f"{value:8.0f}" for value in row.values())
            print(f"  {rows:6}{kind:>10}{values}{1e3 * row['sum_us'] / rows:10.0f}", flush=True)
            if rows in TARGETS_MS and kind == "free":
                report.at_most(f"plan + commit at {rows} rows", row["sum_median_us"] / 1e3, TARGETS_MS[rows], "ms")


# ---- arrivals


def burst_figures(rows: int, arrivals: int, prompt: int, repeats: int) -> dict[str, float]:
    """`arrivals` prompts arrive at once while `rows` rows decode, with a budget that takes them all in one step."""
    best: dict[str, float] = {}
    for repeat in range(repeats):
        budget = rows + arrivals * prompt
        pages = (rows + arrivals) * (max(prompt, 128) // PAGE + 32)
        timed = Timed(make_scheduler(rows + arrivals, max(prompt, 128) + 400, pages, budget))
        wear(timed.scheduler.cache.pool, cached=False)
        for handle in range(1, rows + 1):
            timed.scheduler.submit(request(handle, 64 + handle % PAGE, 300))
        timed.steps(WARM_STEPS)
        timed.forget()
        for handle in range(arrivals):
            timed.scheduler.submit(request(10_000 * (repeat + 1) + handle, prompt, 64))
        with quiet_gc():
            timed.steps(2)
        figures = {"plan_us": timed.plan_us[0], "commit_us": timed.commit_us[1]}
        figures["us_per_arrival"] = (figures["plan_us"] + figures["commit_us"]) / arrivals
        assert timed.rows[0] == rows + arrivals
        if not best or figures["us_per_arrival"] < best["us_per_arrival"]:
            best = figures
    return best


def long_figures(prompt: int, budget: int, repeats: int) -> dict[str, float]:
    """One prompt from submission to its first token, in chunks of `budget` tokens."""
    best: dict[str, float] = {}
    for repeat in range(repeats):
        timed = Timed(make_scheduler(4, prompt + 16, prompt // PAGE + 64, budget))
        asked = request(repeat + 1, prompt, 1)
        with quiet_gc():
            timed.scheduler.submit(asked)
            while timed.scheduler.has_unfinished:
                timed.step()
        both = [plan + commit for plan, commit in zip(timed.plan_us, timed.commit_us, strict=True)]
        figures = {"total_ms": sum(both) / 1e3, "worst_step_ms": max(both) / 1e3, "steps": len(both)}
        if not best or figures["total_ms"] < best["total_ms"]:
            best = figures
    return best


def measure_arrivals(report: Report, repeats: int, long_prompt: int) -> None:
    print("\narrivals while 256 rows decode, in one step (submission and the prompt's own tokens left out)")
    for arrivals, prompt in ((64, 512), (256, 512), (256, 64)):
        row = burst_figures(256, arrivals, prompt, repeats)
        report.figures[f"burst_{arrivals}x{prompt}"] = row
        costs = f"plan {row['plan_us']:8.0f} us  commit {row['commit_us']:7.0f} us"
        print(f"  {arrivals:4} prompts of {prompt:4} tokens: {costs}  {row['us_per_arrival']:6.1f} us each", flush=True)
    for budget in (2048, 8192, long_prompt):
        row = long_figures(long_prompt, budget, repeats)
        report.figures[f"long_{long_prompt}_by_{budget}"] = row
        costs = f"{row['total_ms']:6.1f} ms in all, worst step {row['worst_step_ms']:6.2f} ms"
        print(f"  one prompt of {long_prompt:,} tokens, {budget:,} a step: {costs}", flush=True)


# ---- where the time goes, and the peer


def profile(rows: int, steps: int) -> None:
    timed = steady(rows, steps)
    profiler = cProfile.Profile(time.process_time)
    profiler.enable()
    timed.steps(steps)
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(25)
    print(text.getvalue())


def measure_growth(report: Report) -> None:
    few, many = (report.figures.get(f"steady_{rows}_free") for rows in (1024, 4096))
    if few and many:
        report.at_most("4,096 rows against 1,024", many["sum_median_us"] / few["sum_median_us"], GROWTH, "times")


def run_peer(report: Report, args: argparse.Namespace) -> None:
    """Print and keep what the other engine's own script says; it runs in its own interpreter."""
    if not args.vllm_script:
        raise SystemExit("--vllm-python needs --vllm-script: the script to run with it, given row counts as arguments")
    env = {**os.environ, "MODEL": args.vllm_model} if args.vllm_model else dict(os.environ)
    command = [args.vllm_python, args.vllm_script, *(str(rows) for rows in args.rows)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    lines = [line for line in done.stdout.splitlines() if "rows=" in line]
    print("\nthe other scheduler, on this machine, wall time")
    print("\n".join(f"  {line}" for line in lines), flush=True)
    report.figures["peer"] = lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda s: [int(x) for x in s.split(",")], default=[64, 256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=160, help="steps measured per run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of everything")
    parser.add_argument("--long-prompt", type=int, default=131_072, help="tokens of the long prompt")
    parser.add_argument("--quick", action="store_true", help="few steps, one repeat")
    parser.add_argument("--profile", type=int, metavar="ROWS", help="profile steady decode at ROWS rows, nothing else")
    parser.add_argument("--vllm-python", help="interpreter with vLLM")
    parser.add_argument("--vllm-script", help="script that prints lines with rows= for row counts given as arguments")
    parser.add_argument("--vllm-model", help="model folder, given to the script as MODEL")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.repeats = 64, 1
    if args.profile:
        profile(args.profile, args.steps)
        return
    config = {"rows": args.rows, "steps": args.steps, "page_tokens": PAGE, "depth": 1, "prefix_cache": "on"}
    report = Report("scheduler", (__doc__ or "").split("\n", 1)[0].removeprefix("Claim: "), config)
    print(TIMING)
    measure_steady(report, args.rows, args.steps, args.repeats)
    measure_growth(report)
    measure_arrivals(report, args.repeats, args.long_prompt)
    if args.vllm_python:
        run_peer(report, args)
    print()
    report.close()


if __name__ == "__main__":
    main()
