"""Claim: 64 streams get their tokens evenly, and the event loop stays responsive while steps run back to back.

Starts `aengine serve` on a free port of 127.0.0.1, opens 64 concurrent SSE streams, and prints ITL, the share of chunks
that carry exactly one token, and the event loop's wake-up lag as the server's own timeline saw it.

    python bench/streaming.py [--clients 64] [--tokens 64] [--serve-args "--kernels native"]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.e2e.serving import Server, serve


async def stream(session: aiohttp.ClientSession, url: str, i: int, tokens: int) -> list[tuple[float, int]]:
    """(time, tokens) of each chunk."""
    body = {
        "prompt": f"Story number {i}: once upon a time",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    seen: list[tuple[float, int]] = []
    async with session.post(url + "/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                ids = [t for choice in json.loads(line[6:])["choices"] for t in choice.get("token_ids") or []]
                if ids:
                    seen.append((time.perf_counter(), len(ids)))
    return seen


async def load(url: str, clients: int, tokens: int) -> list[list[tuple[float, int]]]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=900)) as session:
        return list(await asyncio.gather(*(stream(session, url, i, tokens) for i in range(clients))))


def loop_lags_ms(server: Server, seconds: float) -> list[float]:
    """How late the event loop woke its watcher, every 0.1 s of the last `seconds` (30 at most): from its timeline, for
    the buckets of the server's histogram are as wide as what is asked for here."""
    trace = json.loads(server.get(f"/debug/trace?seconds={min(seconds, 30.0):.3f}"))
    return [event["dur"] / 1e3 for event in trace["traceEvents"] if event["name"] == "loop lag" and event["ph"] == "X"]


def percentile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--serve-args", default="")
    args = parser.parse_args()
    with serve("--max-num-seqs", str(args.clients), *shlex.split(args.serve_args)) as server:
        asyncio.run(load(server.url, args.clients, 4))
        began = time.perf_counter()
        streams = asyncio.run(load(server.url, args.clients, args.tokens))
        wall = time.perf_counter() - began
        lags = loop_lags_ms(server, wall)
        gaps = [b[0] - a[0] for seen in streams for a, b in itertools.pairwise(seen)]
        sizes = [size for seen in streams for _, size in seen]
        out = {
            "bench": "streaming",
            "clients": args.clients,
            "tokens_per_s": sum(sizes) / wall,
            "itl_p50_ms": 1e3 * statistics.median(gaps),
            "itl_p99_ms": 1e3 * percentile(gaps, 0.99),
            "itl_max_ms": 1e3 * max(gaps),
            "one_token_chunks": sizes.count(1) / len(sizes),
            "loop_lags": len(lags),
            **{f"loop_lag_p{q}_ms": percentile(lags, q / 100) for q in (50, 90, 99)},
            "loop_lag_max_ms": max(lags),
            "steps_overlapped": server.metric("aengine:steps_overlapped_total") / server.metric("aengine:steps_total"),
        }
    for name, value in out.items():
        print(f"{name:26} {value:.3f}" if isinstance(value, float) else f"{name:26} {value}")
    print(json.dumps(out))


if __name__ == "__main__":
    main()
