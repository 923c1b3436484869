"""Claim: sparse retention keeps nearly all prefix hits of a real trace, and the cache costs microseconds.

Hits: replays the prompts of the Mooncake conversation trace, one after another in order of arrival, through PrefixCache
with 512-token pages (the granularity the trace records): a full-attention model, and models that also have a sliding
window of 1,024 tokens or a recurrent state, whose pages are kept only at retention points; then dense full attention
over falling capacity. Token hit rate = hit tokens / prompt tokens. A checkpoint is one kept state, or one kept window.

Costs, with 16-token pages: acquire, grow, commit, evict, release, hashing, take and drop. CPU time of this process, the
least of several repeats.

--engine: a workload without hits, on the CPU device, cache on against cache off, in turn. Runs on a shared machine
differ by 10 % and more, so the claim of 1 % is put to what the cache makes plan and commit cost more (CPU time, the
least of repeats), as a share of the time the engine took for the same workload.

    python bench/prefix_cache.py [--quick] [--engine] [--model FILE.gguf] [--traces DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import traces
from report import TIMING, Report, cpu_us, quiet_gc
from scheduler import Timed, make_scheduler, request
from traces import BLOCK_TOKENS, Traced, expand

from aengine.memory import Full, GroupSpec, LayerSpec, Part, Pool, State, Window, attention_group, plan, uniform_plan
from aengine.prefix_cache import Lease, PrefixCache
from aengine.prefix_cache.keys import TokenChain

CHUNK = 8192  # prompt tokens a step
WINDOW = 1024
CAPACITIES_M = (0.5, 2.6, 5.1, 10.0, 25.0)  # million tokens
DENSE_RATE = 0.3725  # 0.373 and 0.369, both given to three decimals
SPARSE_RATE = 0.3685
PAGE = 16
LONG = 131_072


# ---- hits


def tiny(name: str, lifetime: Full | Window) -> GroupSpec:
    """A group whose entries are a few bytes: only the number of pages matters here."""
    return attention_group(name, lifetime, 1, kv_heads=1, head_dim=4, tokens_per_page=BLOCK_TOKENS)


def state() -> GroupSpec:
    """A state as large as a page of `tiny`, so that a large page holds one of either."""
    part = Part("state", (BLOCK_TOKENS * 8,), "bfloat16")
    return GroupSpec("state", State(), (LayerSpec("state", (part,)),), tokens_per_page=BLOCK_TOKENS)


LAYOUTS: dict[str, Callable[[], list[GroupSpec]]] = {
    "dense": lambda: [tiny("full", Full())],
    "window": lambda: [tiny("full", Full()), tiny("window", Window(WINDOW))],
    "state": lambda: [tiny("full", Full()), state()],
}


def make_cache(specs: Sequence[GroupSpec], tokens: int, grid_tokens: int | None = None) -> PrefixCache:
    """A cache whose arena holds `tokens` tokens of full attention (and as many pages again of every other group)."""
    large = max(spec.payload_bytes for spec in specs)
    pages = -(-tokens // BLOCK_TOKENS) * len(specs)
    pool = Pool(plan(specs, large * (pages + 2), large_bytes=large))
    return PrefixCache(pool) if grid_tokens is None else PrefixCache(pool, grid_tokens=grid_tokens)


def replay(cache: PrefixCache, requests: Sequence[Traced]) -> float:
    """Prompts one after another; returns CPU microseconds per request, expanding ids to tokens left out."""
    spent_ns = 0
    for step, traced in enumerate(requests, start=1):
        tokens = expand(traced)
        began_ns = time.process_time_ns()
        compute(cache, cache.acquire(step, tokens, len(tokens)), step)
        spent_ns += time.process_time_ns() - began_ns
    return spent_ns / 1e3 / len(requests)


def compute(cache: PrefixCache, lease: Lease, step: int) -> None:
    """Run a leased prompt to its end and release it."""
    at = lease.cached_tokens
    while at < lease.known:
        upto = min(at + CHUNK, lease.known, lease.next_boundary(at))
        grown = cache.grow(lease, upto, step, lease.known, start=at)
        if grown.short:
            raise SystemExit(f"a prompt of {lease.known} tokens does not fit: short of {grown.short} pages")
        cache.commit(lease, upto, lease.known, step)
        at = upto
    cache.release(lease, last_step=step)
    cache.retire(step)


def hit_figures(cache: PrefixCache, requests: Sequence[Traced], us: float) -> dict[str, float]:
    stats = cache.stats()
    figures = {
        "hit_rate": stats.hit_tokens / stats.query_tokens,
        "lost_to_sparse": stats.lost_to_sparse_tokens / stats.query_tokens,
        "us_per_request": us,
    }
    for group, spec in zip(stats.pool.groups, (g.spec for g in cache.pool.plan.groups), strict=True):
        figures[f"{spec.name}_pages_per_request"] = (group.cached + group.evicted) / len(requests)
    return figures


def checkpoints(name: str, figures: dict[str, float]) -> float:
    """Kept states per request; kept windows per request (a window is WINDOW / BLOCK_TOKENS pages)."""
    pages = figures[f"{name}_pages_per_request"]
    return pages if name == "state" else pages * BLOCK_TOKENS / WINDOW


def measure_hits(report: Report, requests: Sequence[Traced], *, full_trace: bool) -> None:
    total = sum(traced.prompt for traced in requests)
    print(f"\nhits, unlimited cache, {len(requests):,} requests, {total / 1e6:.1f} M prompt tokens")
    for name, specs in LAYOUTS.items():
        cache = make_cache(specs(), total)
        figures = hit_figures(cache, requests, replay(cache, requests))
        line = f"  {name:8} hit rate {figures['hit_rate']:.4f}  {figures['us_per_request']:6.0f} us a request"
        if name != "dense":
            figures["checkpoints"] = checkpoints(name, figures)
            line += f"  checkpoints a request {figures['checkpoints']:.2f}"
            line += f"  lost to sparse retention {figures['lost_to_sparse']:.4f}"
            report.at_most(f"{name}: checkpoints a request", figures["checkpoints"], 2.5)
        if full_trace:
            report.at_least(
                f"{name}: token hit rate", figures["hit_rate"], DENSE_RATE if name == "dense" else SPARSE_RATE
            )
        print(line, flush=True)
        report.figures[f"hits_{name}"] = figures


def measure_curve(report: Report, requests: Sequence[Traced], capacities_m: Sequence[float]) -> None:
    print("\nhits over capacity, dense, LRU")
    curve = {}
    for millions in capacities_m:
        cache = make_cache(LAYOUTS["dense"](), int(millions * 1e6))
        figures = hit_figures(cache, requests, replay(cache, requests))
        curve[str(millions)] = figures["hit_rate"]
        print(f"  {millions:5.1f} M tokens: {figures['hit_rate']:.4f}", flush=True)
    report.figures["hit_rate_by_million_tokens"] = curve


# ---- costs


def prompt(seed: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, tokens, np.int32)


def measure_costs(report: Report, repeats: int) -> None:
    """Microseconds of each verb, on prompts of 2,048 tokens in a pool that is full of cached pages."""
    print(f"\ncosts ({TIMING})")
    figures = {**pool_costs(repeats), **verb_costs(repeats), **hash_costs(repeats)}
    for name, value in figures.items():
        print(f"  {name:32} {value:10.2f}")
    report.figures["costs"] = figures
    report.at_most("hash a 128k-token prompt", figures["hash_128k_ms"], 20.0, "ms")
    report.at_most("take and drop a page", figures["take_drop_us"], 3.0, "us")
    report.at_most("take a page by evicting another, publish and drop it", figures["take_evict_drop_us"], 3.0, "us")


def pool_costs(repeats: int) -> dict[str, float]:
    pool = Pool(uniform_plan(20_000, PAGE))
    pages = 10_000

    def take_drop() -> int:
        for page in [pool.take_one(0) for _ in range(pages)]:
            assert page is not None
            pool.drop(page, 0)
        return pages

    def in_bulk() -> int:
        for page in pool.take([pages])[0]:
            pool.drop(page, 0)
        return pages

    out = {"take_drop_us": cpu_us(take_drop, repeats), "take_drop_in_bulk_us": cpu_us(in_bulk, repeats)}
    names = iter(range(10**9))

    def cached() -> int:
        taken = [pool.take_one(0) for _ in range(pages)]
        for page in taken:
            assert page is not None
            pool.publish(page, next(names).to_bytes(32, "little"))
            pool.drop(page, 0)
        return pages

    for _ in range(3):
        cached()  # from now on every page is cached, so each take evicts
    out["take_evict_drop_us"] = cpu_us(cached, repeats)
    return out


def verb_costs(repeats: int) -> dict[str, float]:
    """One prompt of 2,048 tokens = 128 pages: per verb, and per page where that is what scales."""
    tokens, pages = 2048, 128
    cache = PrefixCache(Pool(uniform_plan(4096, PAGE)))
    seeds = iter(range(10**9))
    known = prompt(next(seeds), tokens)
    compute(cache, cache.acquire(0, known, tokens), 1)
    leases: list[Lease] = []
    step = 2
    count = 16

    def acquire(make: Callable[[], np.ndarray]) -> Callable[[], int]:
        def work() -> int:
            leases.extend(cache.acquire(1, ids, tokens) for ids in batch)
            return count

        batch = [make() for _ in range(count)]
        return work

    def drop_all() -> None:
        for lease in leases:
            cache.release(lease, last_step=0)
        leases.clear()

    out = {
        "acquire_hit_us_per_page": cpu_us(acquire(lambda: known), repeats, drop_all) / pages,
        "acquire_miss_us": cpu_us(acquire(lambda: prompt(next(seeds), tokens)), repeats, drop_all),
    }
    drop_all()

    def open_new() -> None:
        nonlocal step
        drop_all()
        cache.retire(step)
        step += 1
        leases.extend(cache.acquire(1, prompt(next(seeds), tokens), tokens) for _ in range(count))

    def grow() -> int:
        for lease in leases:
            cache.grow(lease, tokens, step, tokens, start=0)
        return count * pages

    for _ in range(4):  # fill the pool: from now on growing evicts
        open_new()
        grow()
    out["grow_publish_evict_us_per_page"] = cpu_us(grow, repeats, open_new)

    def open_grown() -> None:
        open_new()
        grow()

    def commit() -> int:
        for lease in leases:
            cache.commit(lease, tokens, tokens, step)
        return count

    def release() -> int:
        for lease in leases:
            cache.release(lease, last_step=0)
        leases.clear()
        return count * pages

    out["commit_us"] = cpu_us(commit, repeats, open_grown)
    out["release_us_per_page"] = cpu_us(release, repeats, open_grown)
    out |= decode_costs(repeats)
    return out


def decode_costs(repeats: int) -> dict[str, float]:
    """What a decoding row costs each time it crosses a page: one grow, one commit that publishes the page before."""
    cache = PrefixCache(Pool(uniform_plan(40_000, PAGE)))
    rows, crossings = 64, 32
    leases: list[Lease] = []

    def open_rows() -> None:
        for lease in leases:
            cache.release(lease, last_step=0)
        leases.clear()
        for row in range(rows):
            lease = cache.acquire(row, prompt(row, 16 + crossings * PAGE), PAGE)
            cache.grow(lease, PAGE, 1, PAGE, start=0)
            leases.append(lease)

    def cross() -> int:
        for at in range(PAGE, PAGE * (crossings + 1), PAGE):
            for lease in leases:
                cache.grow(lease, at + 1, 1, at, start=at)
                cache.commit(lease, at, at, 1)
        return rows * crossings

    return {"decode_grow_commit_us_per_page": cpu_us(cross, repeats, open_rows)}


def hash_costs(repeats: int) -> dict[str, float]:
    tokens = prompt(1, LONG)

    def work() -> int:
        TokenChain(b"root", tokens, PAGE).extend(LONG // PAGE)
        return 1

    return {"hash_128k_ms": cpu_us(work, repeats) / 1e3}


# ---- the engine, cache on against off


def measure_engine(report: Report, model: str, repeats: int, rows: int) -> None:
    from aengine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfigArgs, SchedulerConfig

    base = EngineConfig(
        model=ModelConfigArgs(model=model, max_model_len=1024),
        scheduler=SchedulerConfig(max_num_seqs=rows),
        device=DeviceConfig(device="cpu"),
    )
    configs = {on: replace(base, cache=CacheConfig(prefix_caching=on, kv_bytes=256 * 2**20)) for on in (True, False)}
    print(f"\nno hits, {rows} prompts of 64 tokens, 64 generated each, CPU device, interleaved, {repeats} pairs")
    host_us = {on: min(host_cost_us(rows, on, repeat) for repeat in range(15)) for on in (True, False)}
    runs = asyncio.run(_alternate(configs, repeats, rows))
    on, off = runs[True], runs[False]
    tokens = rows * 64
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    figures = {
        "tokens_per_s_on": tokens / min(on),
        "tokens_per_s_off": tokens / min(off),
        "cost_of_best": min(on) / min(off) - 1,
        "cost_median_of_pairs": statistics.median(ratios) - 1,
        "pairs_quartiles": statistics.quantiles([r - 1 for r in ratios], n=4) if repeats > 1 else [],
        "plan_commit_ms_on": host_us[True] / 1e3,
        "plan_commit_ms_off": host_us[False] / 1e3,
        "cost_of_plan_commit": (host_us[True] - host_us[False]) / 1e6 / min(off),
    }
    for name, value in figures.items():
        print(f"  {name:24} {value}")
    report.figures["engine"] = figures
    report.at_most("cost of the cache without hits, share of time", figures["cost_of_plan_commit"], 0.01)


def host_cost_us(rows: int, caching: bool, salt: int) -> float:
    """CPU time of all plans and commits of the workload, without a device."""
    timed = Timed(make_scheduler(rows, 128, rows * 10, 512, caching=caching))
    for handle in range(1, rows + 1):
        timed.scheduler.submit(request(1000 * salt + handle, 64, 64))
    with quiet_gc():
        while timed.scheduler.has_unfinished:
            timed.step()
    return sum(timed.plan_us) + sum(timed.commit_us)


async def _alternate(configs, repeats: int, rows: int) -> dict[bool, list[float]]:
    """Seconds of each run, both engines alive, in turn A B B A, so that drift of the machine hits both alike."""
    from aengine import AsyncEngine

    runs: dict[bool, list[float]] = {True: [], False: []}
    async with AsyncEngine(configs[True]) as on, AsyncEngine(configs[False]) as off:
        engines = {True: on, False: off}
        for engine in (on, off):
            await _load(engine, rows, 8, 10**6)  # warm-up
        for repeat in range(repeats):
            for kind in (True, False) if repeat % 2 == 0 else (False, True):
                runs[kind].append(await _load(engines[kind], rows, 64, repeat))
        assert on.stats().prefix_hits == 0, "the workload was to have no hits"
    return runs


async def _load(engine, rows: int, tokens: int, salt: int) -> float:
    from aengine import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    rng = np.random.default_rng(salt)

    async def one(ids: list[int]) -> None:
        async for _ in engine.generate(ids, params):
            pass

    prompts = [rng.integers(100, 40_000, 64).tolist() for _ in range(rows)]
    began_s = time.perf_counter()
    await asyncio.gather(*(one(ids) for ids in prompts))
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    traces.add_option(parser)
    parser.add_argument("--quick", action="store_true", help="1,000 requests and few repeats")
    parser.add_argument("--requests", type=int, help="only the first N requests of the trace")
    parser.add_argument("--engine", action="store_true", help="also measure cache on against off on the CPU device")
    parser.add_argument("--only-engine", action="store_true", help="nothing else")
    parser.add_argument("--model", default="smollm2-135m", help="for --engine")
    parser.add_argument("--pairs", type=int, default=9, help="for --engine: runs with the cache on and off")
    parser.add_argument("--rows", type=int, default=16, help="for --engine: requests at once")
    args = parser.parse_args()
    limit = args.requests or (1000 if args.quick else None)
    repeats = 5 if args.quick else 15
    requests = [] if args.only_engine else traces.mooncake(args.traces)
    chosen = requests[:limit]
    config = {"requests": len(chosen), "hit_page_tokens": BLOCK_TOKENS, "cost_page_tokens": PAGE, "chunk": CHUNK}
    report = Report("prefix_cache", (__doc__ or "").split("\n", 1)[0].removeprefix("Claim: "), config)
    if not args.only_engine:
        measure_hits(report, chosen, full_trace=len(chosen) == len(requests))
        measure_curve(report, chosen, CAPACITIES_M[:2] if args.quick else CAPACITIES_M)
        measure_costs(report, repeats)
    if args.engine or args.only_engine:
        measure_engine(report, args.model, args.pairs, args.rows)
    print()
    report.close()


if __name__ == "__main__":
    main()
