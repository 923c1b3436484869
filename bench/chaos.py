"""Claim: what fails, fails alone: each request ends once, whole answers are right, pages add up, faults are counted.

Two parts. First the parts of an engine on the sim device raise at random (steps, staging, tokenizer, detokenizer) while
clients leave, crawl and send nonsense, for --seconds; all that is planted must be found in the metrics. Then `aengine
serve` meets 5,000 connections that never send, clients that read a byte a second, a KV pool that is far too small for
its load, and SIGTERM under load, while plain streams must come through whole. Ends with 1 when the claim does not hold.

    python bench/chaos.py [--seconds 60] [--seed 1] [--silent 5000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import resource
import shlex
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parent.parent))

import aengine.engine.build
from bench.soak import resident_kb
from tests.chaos.world import Chaos
from tests.e2e.serving import Server, serve

SERVE = "--device sim --sim-step-s 0.01 --max-model-len 2048 --kv-bytes 40KiB --max-num-seqs 32"
STREAM = {"prompt": "once upon a time", "max_tokens": 100, "ignore_eos": True, "stream": True}


async def planted(seconds: float, seed: int) -> list[str]:
    chaos = Chaos(seed)
    aengine.engine.build.build = chaos.sim.build  # type: ignore[assignment]
    async with chaos.serving() as (engine, port):
        for part in range(max(1, int(seconds / 20))):  # the balance must hold in between as well
            await chaos.clients(port, count=24, seconds=min(seconds, 20.0), seed=seed + part)
            await chaos.settle(engine)
            chaos.balance(engine)
        print(f"{chaos.sent} requests, {engine.stats().preemptions} preemptions, planted: {dict(chaos.faults.raised)}")
    for end, count in sorted(chaos.ends.items()):
        print(f"  {end:<36}{count:>7}")
    return chaos.wrong


async def plain(session: aiohttp.ClientSession, ends: Counter[str]) -> None:
    """One stream, whole or not."""
    try:
        async with session.post("/v1/completions", json=STREAM) as response:
            text = await response.text()
    except aiohttp.ClientError as error:
        ends[f"lost: {type(error).__name__}"] += 1
        return
    whole = response.status == 200 and '"finish_reason":"length"' in text and text.endswith("data: [DONE]\n\n")
    ends[
        "whole" if whole else f"status {response.status}, torn" if response.status == 200 else str(response.status)
    ] += 1


async def load(server: Server, count: int, rounds: int = 1) -> Counter[str]:
    ends: Counter[str] = Counter()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, connector=connector) as session:
        for _ in range(rounds):
            await asyncio.gather(*(plain(session, ends) for _ in range(count)))
    return ends


def silent(server: Server, count: int) -> list[socket.socket]:
    host, port = re.findall(r"//([\d.]+):(\d+)", server.url)[0]
    return [socket.create_connection((host, int(port)), timeout=30) for _ in range(count)]


async def crawlers(server: Server, count: int, seconds: float) -> None:
    """Ask for a stream each, and read a byte a second."""
    host, port = re.findall(r"//([\d.]+):(\d+)", server.url)[0]
    body = json.dumps({**STREAM, "max_tokens": 1_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    pairs = [await asyncio.open_connection(host, int(port), limit=1) for _ in range(count)]
    for _, writer in pairs:
        writer.write(head % len(body) + body)
    for _ in range(int(seconds)):
        await asyncio.gather(*(reader.read(1) for reader, _ in pairs))
        await asyncio.sleep(1)
    for _, writer in pairs:
        writer.close()


def row(name: str, ends: Counter[str], server: Server, began_s: float) -> bool:
    kb = resident_kb(server.process.pid)
    print(f"{name:<44}{dict(ends)!s:<36}{time.monotonic() - began_s:>6.1f} s {kb / 1024:>7.1f} MiB")
    return set(ends) == {"whole"}


async def hostile(server: Server, count: int) -> bool:
    began_s = time.monotonic()
    good = row("plain", await load(server, 16), server, began_s)
    began_s = time.monotonic()
    held = silent(server, count)
    good &= row(f"{count} silent connections", await load(server, 16), server, began_s)
    for each in held:
        each.close()
    began_s = time.monotonic()
    crawl = asyncio.create_task(crawlers(server, 16, 8))
    await asyncio.sleep(0.5)
    good &= row("16 clients read a byte a second", await load(server, 16), server, began_s)
    await crawl
    began_s = time.monotonic()
    good &= row("128 streams in a pool for 20, three times", await load(server, 128, 3), server, began_s)
    server.wait_idle(30)
    row("idle again", Counter(), server, time.monotonic())
    faults = [line for line in server.get("/metrics").splitlines() if line.startswith("aengine:http_faults_total")]
    print(*faults, sep="\n")
    began_s = time.monotonic()
    running = asyncio.create_task(load(server, 64))
    await asyncio.sleep(0.4)
    server.process.send_signal(signal.SIGTERM)
    ends = await running
    code = await asyncio.to_thread(server.process.wait, 60)
    print(f"{'SIGTERM under 64 streams':<44}{dict(ends)!s:<36}{time.monotonic() - began_s:>6.1f} s, exit status {code}")
    return good and set(ends) == {"whole"} and code == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--silent", type=int, default=5_000)
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard > 0 else soft, hard))
    with serve(*shlex.split(SERVE)) as server:
        good = asyncio.run(hostile(server, args.silent))
    logging.disable(logging.CRITICAL)  # each planted fault has its line
    wrong = asyncio.run(planted(args.seconds, args.seed))
    for line in wrong[:20]:
        print("WRONG", line)
    sys.exit(0 if good and not wrong else 1)


if __name__ == "__main__":
    main()
