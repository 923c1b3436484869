"""Claim: pages of several sizes waste at most 3 % of KV memory on mixed layouts, and run at least as many requests.

Replays saturated first-come-first-served serving, with lengths of public traces and no prefix reuse, through the
project's planner, pool and prefix cache, and through two schemes of equal-size pages (see bench/schemes.py):
`all-layers` (one table for all layers; `max-page` for models with recurrent state) and `padded` (equal pages per group
of layers, as mixed models are served today). A request is admitted when its prompt fits, is computed in chunks, then
grows; when pages are short the youngest starts over later. The queue is never empty.

Waste: bytes held that nobody reads (page tails, window slack, padding, free slots of slabs in use, the null page, what
the arena's size leaves over) per arena byte. Free: bytes that any group may have, cached pages included. Pinned: cached
pages that only their own group may have, because requests use other pages of their large page. All are means over
steps, as is the number of requests that run. `multi-size, cache on` also publishes pages, so that the arena is full of
evictable ones. Moved MB: copied per request to keep live pages together.

    python bench/memory.py [--quick] [--only jamba,gemma] [--traces DIR] [--plans]
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import shapes
import traces
from report import Report
from schemes import Job, MultiSize, Scheme, all_layers, needed_bytes, padded
from traces import Traced

from aengine.memory import GroupSpec

SEED = 20231116
GB = 10**9
VISION_SHARE = 0.7
MOST_TILES = 4
WASTE_LIMIT = 0.03
CACHED_LIMIT = 0.97  # evictable pages should cost no room; placement differs a little
TIE = 0.995  # two schemes without a difference still differ by where the arena's edge falls: half a per cent


@dataclass(frozen=True)
class Case:
    """`requests` end in a full run; a quarter of them warm up."""

    name: str
    specs: Callable[[], list[GroupSpec]]
    budget_bytes: int
    trace: str
    requests: int
    vision: bool = False


CASES = (
    Case("llama-3.2-11b-vision 20 GB azure, 70 % vision", shapes.llama_32_vision, 20 * GB, "azure", 3000, vision=True),
    Case("gemma-3-27b 30 GB azure", shapes.gemma_3_27b, 30 * GB, "azure", 3000),
    Case("gemma-3-27b 60 GB mooncake", shapes.gemma_3_27b, 60 * GB, "mooncake", 1500),
    Case("gpt-oss-120b 8 GB azure", shapes.gpt_oss_120b, 8 * GB, "azure", 4000),
    Case("jamba-52b 8 GB azure", shapes.jamba_52b, 8 * GB, "azure", 5000),
    Case("qwen3-next-80b 20 GB azure", shapes.qwen3_next_80b, 20 * GB, "azure", 5000),
)


@dataclass
class Measured:
    """One scheme's run of one case: means over steps after the warm-up."""

    waste: list[float] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    pinned: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    preempted: int = 0
    ended: int = 0
    moved_bytes: int = 0

    def figures(self) -> dict[str, float]:
        return {
            "waste": statistics.fmean(self.waste),
            "waste_worst": max(self.waste),
            "free": statistics.fmean(self.free),
            "pinned": statistics.fmean(self.pinned),
            "concurrency": statistics.fmean(self.running),
            "preempted_per_request": self.preempted / self.ended,
            "moved_mb_per_request": self.moved_bytes / self.ended / 1e6,
        }


class Serving:
    """The same loop for every scheme: oldest first, prompts whole, `stride` tokens of every running job a step."""

    def __init__(self, scheme: Scheme, specs: Sequence[GroupSpec], jobs: Iterator[Job], stride: int) -> None:
        self._scheme = scheme
        self._specs = specs
        self._jobs = jobs
        self._stride = stride
        self._running: list[Job] = []  # by age
        self._again: deque[Job] = deque()  # preempted, by age
        self.measured = Measured()

    def run(self, requests: int, budget_bytes: int) -> Measured:
        """Until `requests` have ended; the last three quarters are measured."""
        out = self.measured
        while out.ended < requests:
            if self._advance_all() == 0:  # a step that preempted does not admit: the pages would be fought for again
                self._admit()
            if out.ended >= requests // 4:
                held = self._scheme.held_bytes()
                out.waste.append((held - needed_bytes(self._specs, self._running)) / budget_bytes)
                pinned = self._scheme.pinned_bytes()
                out.free.append(1 - (held + pinned) / budget_bytes)
                out.pinned.append(pinned / budget_bytes)
                out.running.append(len(self._running))
        out.moved_bytes = self._scheme.moved_bytes()
        return out

    def _advance_all(self) -> int:
        """One step of every running job; returns how many were preempted."""
        before = self.measured.preempted
        at = 0
        while at < len(self._running):
            job = self._running[at]
            upto = min(job.length + self._stride, job.total)
            while not self._scheme.advance(job, upto):
                if self._preempt_youngest() is job:
                    break
            else:
                job.length = upto
                at += 1
        for job in [job for job in self._running if job.length == job.total]:
            self._running.remove(job)
            self._scheme.release(job)
            self.measured.ended += 1
        self._scheme.end_step()
        return self.measured.preempted - before

    def _preempt_youngest(self) -> Job:
        victim = self._running.pop()
        self._scheme.release(victim)
        self._again.appendleft(victim)
        self.measured.preempted += 1
        return victim

    def _admit(self) -> None:
        while True:
            job = self._again[0] if self._again else next(self._jobs)
            if self._scheme.admit(job):
                self._running.append(job)
                if self._again:
                    self._again.popleft()
            else:
                if not self._again:
                    self._again.append(job)
                return


def make_jobs(traced: Sequence[Traced], *, vision: bool, accepts: Callable[[Job], bool]) -> Iterator[Job]:
    """Jobs without end, in a fixed shuffled order; the same ones for every scheme."""
    rng = random.Random(SEED)
    number = 0
    while True:
        for request in rng.sample(traced, len(traced)):
            tiles = rng.randint(1, MOST_TILES) if vision and rng.random() < VISION_SHARE else 0
            media = (tiles * shapes.TILE_TOKENS,) if tiles else ()
            number += 1
            job = Job(number, request.prompt, request.prompt + request.output, media)
            if accepts(job):
                yield job


def load(trace: str, folder: Path) -> list[Traced]:
    """Mooncake prompts are cut off at 32k tokens: longer ones are left out."""
    if trace == "azure":
        return traces.azure(folder)
    return [request for request in traces.mooncake(folder) if request.prompt <= 32_768]


def run_case(case: Case, traced: Sequence[Traced], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    specs = case.specs()
    made: list[Callable[[], Scheme]] = [
        lambda: all_layers(specs, case.budget_bytes, args.chunk),
        lambda: padded(specs, case.budget_bytes, args.chunk),
        lambda: MultiSize(specs, case.budget_bytes, args.chunk, caching=False),
        lambda: MultiSize(specs, case.budget_bytes, args.chunk, caching=True),
    ]
    judges = [make() for make in made[:3]]
    requests = max(20, int(case.requests * args.scale))
    out = {}
    for make in made:
        scheme = make()
        jobs = make_jobs(traced, vision=case.vision, accepts=lambda job: all(s.fits_alone(job) for s in judges))
        out[scheme.name] = Serving(scheme, specs, jobs, args.stride).run(requests, case.budget_bytes).figures()
        if isinstance(scheme, MultiSize) and args.plans and not scheme.cache.enabled:
            print(scheme.plan.describe())
    return out


def show(case: Case, rows: dict[str, dict[str, float]]) -> None:
    ours = rows["multi-size"]["concurrency"]
    heads = "".join(f"{head:>10}" for head in ("waste %", "worst %", "free %", "pinned %", "running", "ours / it"))
    print(f"\n{case.name}\n  {'scheme':22}{heads}  preempted  moved MB")
    for name, row in rows.items():
        cells = "".join(f"{100 * row[key]:10.2f}" for key in ("waste", "waste_worst", "free", "pinned"))
        cells += f"{row['concurrency']:10.1f}{ours / row['concurrency']:10.3f}"
        print(f"  {name:22}{cells}{row['preempted_per_request']:11.3f}{row['moved_mb_per_request']:10.2f}", flush=True)


def judge(report: Report, case: Case, rows: dict[str, dict[str, float]]) -> None:
    ours = rows["multi-size"]
    report.at_most(f"{case.name}: waste", ours["waste"], WASTE_LIMIT)
    cached = rows["multi-size, cache on"]["concurrency"] / ours["concurrency"]
    report.at_least(f"{case.name}: concurrency, cache on against off", cached, CACHED_LIMIT)
    for name, row in rows.items():
        if not name.startswith("multi-size"):
            ratio = ours["concurrency"] / row["concurrency"]
            report.at_least(f"{case.name}: concurrency against {name}", ratio, TIE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    traces.add_option(parser)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests, 16 tokens a step")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of requests")
    parser.add_argument("--stride", type=int, default=1, help="tokens that every running request gains in a step")
    parser.add_argument("--chunk", type=int, default=2048, help="prompt tokens in flight")
    parser.add_argument("--only", default="", help="comma-separated parts of case names")
    parser.add_argument("--plans", action="store_true", help="also print the page plans")
    args = parser.parse_args()
    if args.quick:
        args.scale, args.stride = args.scale * 0.1, 16
    chosen = [case for case in CASES if any(part in case.name for part in args.only.split(","))]
    folders = {case.trace: load(case.trace, args.traces) for case in chosen}
    config = {"seed": SEED, "scale": args.scale, "stride": args.stride, "chunk": args.chunk, "page_tokens": 16}
    report = Report("memory", (__doc__ or "").split("\n", 1)[0].removeprefix("Claim: "), config)
    for case in chosen:
        rows = run_case(case, folders[case.trace], args)
        show(case, rows)
        judge(report, case, rows)
        report.figures[case.name] = rows
    print()
    report.close()


if __name__ == "__main__":
    main()
