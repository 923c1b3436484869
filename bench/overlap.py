"""Claim: planning step N + 1 while step N runs hides the host's work behind the device's.

Runs the same closed-loop load at depth 0 (synchronous) and depth 1 (overlapped), in turn A B A B, on one engine each,
and prints host ms, device ms and achieved ms per step, tokens/s, and the share of steps launched while another ran.

    python bench/overlap.py [--device cpu|sim] [--rows 16] [--tokens 64] [--repeats 3] [--sim-step-ms 10]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import time
from dataclasses import replace

from aengine import AsyncEngine, EngineConfig, SamplingParams
from aengine.config import DeviceConfig, ModelConfigArgs, SchedulerConfig


async def load(engine: AsyncEngine, rows: int, tokens: int, salt: int) -> float:
    """`rows` prompts of 64 tokens at once, `tokens` output tokens each; seconds."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    async def one(i: int) -> None:
        prompt = [(salt * 7919 + i * 104729 + j * 31) % 40_000 + 100 for j in range(64)]
        async for _ in engine.generate(prompt, params):
            pass

    began_s = time.perf_counter()
    await asyncio.gather(*(one(i) for i in range(rows)))
    return time.perf_counter() - began_s


async def measure(config: EngineConfig, rows: int, tokens: int, salt: int) -> dict[str, float]:
    async with AsyncEngine(config) as engine:
        await load(engine, rows, 8, salt + 1000)  # warm-up
        before = engine.stats()
        wall_s = await load(engine, rows, tokens, salt)
        after = engine.stats()
        steps = after.steps - before.steps
        device_ms = 1e3 * (after.device_s - before.device_s) / steps
        achieved_ms = 1e3 * wall_s / steps
        return {
            "steps": steps,
            "device_ms": device_ms,
            "achieved_ms": achieved_ms,
            "exposed_host_ms": achieved_ms - device_ms,
            "tokens_per_s": rows * tokens / wall_s,
            "overlapped": (after.steps_overlapped - before.steps_overlapped) / steps,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu", choices=["cpu", "sim"])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sim-step-ms", type=float, default=10.0)
    args = parser.parse_args()
    base = EngineConfig(
        model=ModelConfigArgs(model=args.model, max_model_len=2048),
        scheduler=SchedulerConfig(max_num_seqs=max(args.rows, 1)),
        device=DeviceConfig(device=args.device, sim_step_s=args.sim_step_ms / 1e3),
    )
    runs: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    for repeat in range(args.repeats):
        for depth in (0, 1):
            config = replace(base, scheduler=replace(base.scheduler, depth=depth))
            runs[depth].append(asyncio.run(measure(config, args.rows, args.tokens, repeat)))
    medians = {
        f"depth{depth}": {key: statistics.median(run[key] for run in each) for key in each[0]}
        for depth, each in runs.items()
    }
    for name, row in medians.items():
        print(name, "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    gain = medians["depth1"]["tokens_per_s"] / medians["depth0"]["tokens_per_s"]
    print(f"depth 1 / depth 0 tokens per second: {gain:.3f}")
    line = {"bench": "overlap", "args": vars(args), "machine": platform.processor(), **medians, "gain": gain}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
