"""Claims about structured output: every answer validates; hostile grammars are answered or refused within 2 s while
others' tokens flow; 20 % structured requests leave at least 97 % of the throughput.

    python bench/structured.py schemas --count 1000
    python bench/structured.py hostile
    python bench/structured.py throughput --device sim

Each prints its claim, the figures and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

from aengine import (
    AengineError,
    AsyncEngine,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    Grammar,
    ModelConfigArgs,
    OutputDelta,
    SamplingParams,
    SchedulerConfig,
)
from bench.random_schemas import random_schema

PROFILE = "h100-llama8b"  # the modelled device, at its own speed: 8.3 ms a step of 512 decoding rows


def engine_config(device: str, rows: int, *, kv: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfigArgs(model="smollm2-135m", max_model_len=1024),
        scheduler=SchedulerConfig(max_num_seqs=rows, max_batched_tokens=max(512, 2 * rows), max_waiting=4096),
        cache=CacheConfig(kv_bytes=kv),
        device=DeviceConfig(device=device, sim_profile=PROFILE if device == "sim" else None),  # type: ignore[arg-type]
    )


async def answer(engine: AsyncEngine, prompt: Any, sampling: SamplingParams) -> Any:
    last = None
    async for output in engine.generate(prompt, sampling):
        last = output
    assert last is not None
    return last.outputs[0]


async def schemas(count: int, first: int) -> dict[str, Any]:
    """Every other one greedy, every fourth with seeded sampling and log-probabilities."""
    from jsonschema import Draft202012Validator

    told: dict[str, Any] = {"schemas": count, "valid": 0, "cut": 0, "refused": 0, "invalid": []}
    gate = asyncio.Semaphore(64)
    async with AsyncEngine(engine_config("cpu", 32, kv=300 * 2**20)) as engine:

        async def one(seed: int) -> None:
            schema = random_schema(seed)
            sampling = SamplingParams(
                max_tokens=400,
                temperature=float(seed % 2),
                seed=seed,
                logprobs=1 if seed % 4 == 1 else None,
                grammar=Grammar("json_schema", json.dumps(schema)),
            )
            async with gate:
                try:
                    made = await answer(engine, f"Example number {seed} of the data:\n", sampling)
                except AengineError as error:
                    told["refused"] += 1
                    told.setdefault("refusals", []).append(f"{seed}: {error}"[:160])
                    return
            if made.finish_reason != "stop":
                told["cut"] += 1
            elif Draft202012Validator(schema).is_valid(json.loads(made.text)):
                told["valid"] += 1
            else:
                told["invalid"].append((seed, made.text))

        began_s = time.monotonic()
        await asyncio.gather(*(one(seed) for seed in range(first, first + count)))
        stats = engine.stats()
        told["seconds"] = round(time.monotonic() - began_s, 1)
        told["overlapped"] = round(stats.steps_overlapped / stats.steps, 4)
        told["forced_tokens"] = stats.forced_tokens
    return told


def hostile_grammars() -> dict[str, Grammar]:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    deeper = '{"type":"array","items":' * 5000 + "{}" + "}" * 5000
    tree = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    enums = {"enum": [f"value {i} {i * 7919 % 104729}" for i in range(10_000)]}
    many = {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": f"a{i}+"} for i in range(3000)}}
    return {
        "recursion": Grammar("json_schema", json.dumps(tree)),
        "reference loop": Grammar("json_schema", json.dumps(loop)),
        "enum of 10,000": Grammar("json_schema", json.dumps(enums)),
        "enum of 100,000": Grammar("json_schema", json.dumps({"enum": [f"v{i}" for i in range(100_000)]})),
        "nested 60": Grammar("json_schema", json.dumps(deep)),
        "nested 5,000": Grammar("json_schema", deeper),
        "3,000 patterns": Grammar("json_schema", json.dumps(many)),
        "(a+)+b": Grammar("regex", "(a+)+b"),
        "(.*a){30}": Grammar("regex", "(.*a){30}"),
        "a{1,100000}": Grammar("regex", "a{1,100000}"),
        "(a{1,500}){1,500}": Grammar("regex", "(a{1,500}){1,500}"),
        "(x+x+)+y with classes": Grammar("regex", r"(\w+\s*\w+)+[^\w]{50}y"),
        ".*a.{40}": Grammar("regex", ".*a.{40}b"),
        "ambiguous grammar": Grammar("lark", 'start: e\ne: e e | "a" | "a" e | e "a"'),
        "left recursion": Grammar("lark", 'start: start start start | "b"?'),
    }


async def hostile() -> dict[str, Any]:
    """One stream goes on beside each grammar; its widest gap between tokens is told."""
    told: dict[str, Any] = {}
    async with AsyncEngine(engine_config("cpu", 8, kv=100 * 2**20)) as engine:
        await answer(engine, "x", SamplingParams(max_tokens=1, grammar=Grammar("json_object")))  # reads the vocabulary
        for name, grammar in hostile_grammars().items():
            gaps: list[float] = []
            beside = asyncio.create_task(_watch(engine, gaps))
            await asyncio.sleep(0.2)
            began_s = time.monotonic()
            try:
                made = await answer(engine, "x", SamplingParams(max_tokens=16, temperature=0, grammar=grammar))
                end = str(made.finish_reason)
            except AengineError as error:
                end = f"{type(error).__name__}: {error}"[:90]
            seconds = time.monotonic() - began_s
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
            told[name] = {"s": round(seconds, 3), "gap_ms": round(1e3 * max(gaps, default=0)), "end": end}
            print(f"{name:24} {seconds:7.3f} s, widest gap beside it {1e3 * max(gaps, default=0):5.0f} ms: {end}")
    return told


async def _watch(engine: AsyncEngine, gaps: list[float]) -> None:
    last_s = None
    async for _ in engine.generate("Once", SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)):
        now_s = time.monotonic()
        if last_s is not None:
            gaps.append(now_s - last_s)
        last_s = now_s


# Grammars that go on, and force no tokens, so that all requests have the same length and number of steps.
LONG = {
    # every text ends at its limit, for the modelled device draws tokens evenly: the dearest masks
    "limited": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 500},
    # tokens are drawn within one text of any length
    "text": {"type": "array", "items": {"type": "string"}, "minItems": 500},
    # a choice at nearly every token
    "values": {"type": "array", "items": {"enum": [*range(0, 1000, 7), True, None]}, "minItems": 500},
}


async def length(engine: AsyncEngine, prompt: list[int], sampling: SamplingParams) -> int:
    """Tokens of one request, whose deltas are taken as the server takes them: without a task switch."""
    await engine.prepare(sampling)
    tokens = 0

    def take(delta: OutputDelta) -> bool:
        nonlocal tokens
        tokens += len(delta.token_ids)
        return True

    stream = engine.submit(prompt, sampling, request_id=str(prompt))
    stream.tap(take)
    async for delta in stream:
        take(delta)
    return tokens


async def throughput(device: str, rows: int, tokens: int, pairs: int, name: str) -> dict[str, Any]:
    """Pairs of runs without and with 20 % structured requests, all of one length. `ratio`: the median of the pairs'."""
    grammar = Grammar("json_schema", json.dumps(LONG[name]))
    plain = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    ruled = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, grammar=grammar)
    rates: dict[str, list[float]] = {"none": [], "structured": []}
    told = {"device": PROFILE if device == "sim" else device, "rows": rows, "tokens": tokens, "grammar": name}
    print(f"structured output against none: {told}, prompts of 3 tokens, in one process, no sockets")
    async with AsyncEngine(engine_config(device, rows, kv=2**30 if device == "cpu" else 2**28)) as engine:
        for number in range(2 * pairs + 2):
            kind = "structured" if number % 2 else "none"
            each = [ruled if kind == "structured" and i % 5 == 0 else plain for i in range(rows)]
            before, began_s, cpu_s = engine.stats(), time.monotonic(), time.process_time()
            made = await asyncio.gather(*(length(engine, [100 + i, 200, 300], s) for i, s in enumerate(each)))
            seconds, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
            assert made == [tokens] * rows, f"answers of {min(made)} to {max(made)} tokens"
            rate = sum(made) / seconds
            if number >= 2:  # the first pair warms up
                rates[kind].append(rate)
            stats = engine.stats()
            steps = stats.steps - before.steps
            overlapped = (stats.steps_overlapped - before.steps_overlapped) / steps
            device_s = stats.device_s - before.device_s
            print(
                f"{kind:10} {rate:9.0f} tokens/s, {steps} steps of {1e3 * seconds / steps:.1f} ms (device"
                f" {1e3 * device_s / steps:.1f}, process's CPU {1e3 * cpu_s / steps:.1f}), overlapped {overlapped:.3f}"
            )
    best = {kind: round(max(values)) for kind, values in rates.items()}
    ratios = [round(ruled / none, 4) for none, ruled in zip(rates["none"], rates["structured"], strict=True)]
    return {**told, "best": best, "ratios": ratios, "ratio": round(statistics.median(ratios), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claim", choices=("schemas", "hostile", "throughput"))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "sim"))
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--grammar", default="limited", choices=sorted(LONG))
    args = parser.parse_args()
    if args.claim == "schemas":
        told = asyncio.run(schemas(args.count, args.first))
    elif args.claim == "hostile":
        told = asyncio.run(hostile())
    else:
        rows = args.rows or (512 if args.device == "sim" else 32)
        tokens = args.tokens or (256 if args.device == "sim" else 64)
        told = asyncio.run(throughput(args.device, rows, tokens, args.pairs, args.grammar))
    print(json.dumps({"claim": args.claim, **told}, ensure_ascii=False))


if __name__ == "__main__":
    main()
