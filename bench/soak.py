"""Claim: hours of mixed load leave a server as it was: memory flat within 2 %, no page held, no request unanswered.

Starts `aengine serve`, writes to every KV page once (memory that was never written is not resident), and sends it, for
--minutes, what servers meet: short and long prompts and answers, streams and whole answers, several choices, chats,
JSON and schemas, forced calls of tools, clients that leave in the middle, bad requests, pauses. Each request must end
in exactly one way, and what a schema or a tool asked for must be it. Prints a table and a line of JSON; ends with 1
when the claim does not hold.

    python bench/soak.py [--minutes 6] [--clients 24] [--serve-args "--device sim --sim-step-s 0.005"]
    python bench/soak.py --clients 8 --most-tokens 40 --serve-args "--kv-bytes 100MiB --max-model-len 4096"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shlex
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.e2e.serving import Server, serve

KINDS = (
    *("stream", "stream", "whole", "choices", "chat", "json", "schema", "tool", "leave", "leave", "bad", "long"),
    "pause",
)
CHATS = ("chat", "json", "schema", "tool")
FILL_PROMPT = 500  # tokens
FORM = {
    "type": "object",
    "properties": {"town": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 30]}},
    "required": ["town", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": FORM}}
EXTRAS: dict[str, dict[str, Any]] = {
    "choices": {"n": 3},
    "json": {"response_format": {"type": "json_object"}, "ignore_eos": False},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": FORM}}},
    "tool": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
}
WORDS = ("river", "stone", "cloud", "seven", "engine", "paper", "light", "over", "under", "winter", "table", "green")
WARM_UP = 0.25  # of the time; caches fill and the allocator finds its size
FLAT = 0.02
SIM = "--device sim --sim-step-s 0.005 --max-model-len 4096 --kv-bytes 80KiB"  # 5,000 tokens: rows are preempted


class Soak:
    """`ends`: how requests ended, by kind; `wrong`: those that ended as none may."""

    def __init__(self, server: Server, most_tokens: int) -> None:
        self.server = server
        self.ends: Counter[str] = Counter()
        self.sent = 0
        self.tokens = 0
        self.wrong: list[str] = []
        self.rss: list[tuple[float, int]] = []
        self._most = most_tokens
        self._began_s = time.monotonic()

    async def run(self, clients: int, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            self.server.url, connector=connector, timeout=aiohttp.ClientTimeout(total=180)
        ) as session:
            watch = asyncio.create_task(self._watch())
            await asyncio.gather(*(self._client(session, number, until_s) for number in range(clients)))
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            self.rss.append((time.monotonic() - self._began_s, resident_kb(self.server.process.pid)))
            await asyncio.sleep(1.0)

    async def _client(self, session: aiohttp.ClientSession, number: int, until_s: float) -> None:
        rng = random.Random(number)
        while time.monotonic() < until_s:
            kind = rng.choice(KINDS)
            if kind == "pause":
                await asyncio.sleep(rng.random())
                continue
            self.sent += 1
            try:
                end = await self._one(session, kind, rng)
            except Exception as error:
                end = "lost"
                self.wrong.append(f"{kind}: {error!r}")
            self.ends[f"{kind}: {end}"] += 1

    async def _one(self, session: aiohttp.ClientSession, kind: str, rng: random.Random) -> str:
        if kind == "bad":
            return await self._bad(session, rng)
        length = 1_200 if kind == "long" else rng.choice((3, 20, 120))
        text = " ".join(rng.choice(WORDS) for _ in range(length))
        body: dict[str, Any] = {"max_tokens": rng.randint(1, self._most), "ignore_eos": True, "stream": True}
        path = "/v1/completions"
        if kind in CHATS:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        body |= EXTRAS.get(kind, {})
        if kind in ("schema", "tool"):
            body["max_tokens"] = 200  # enough for the whole of it
        if kind in ("whole", "long", "schema", "tool"):
            body["stream"] = False
        async with session.post(path, json=body) as response:
            if response.status != 200:
                return self._refused(kind, response.status, await response.json())
            if not body["stream"]:
                answer = await response.json()
                self.tokens += answer["usage"]["completion_tokens"]
                if kind in ("schema", "tool"):
                    return "ok" if _keeps_form(answer["choices"][0]["message"]) else self._torn(kind, answer)
                return "ok" if answer["usage"]["completion_tokens"] == body["max_tokens"] else self._torn(kind, answer)
            return await self._read(response, kind, body.get("n", 1), rng)

    async def _read(self, response: aiohttp.ClientResponse, kind: str, n: int, rng: random.Random) -> str:
        leave_after = rng.randint(1, 8) if kind == "leave" else 0
        ends: list[str] = []
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                ends.append("done")
            elif line.startswith(b"data: "):
                self.tokens += 1
                event = json.loads(line[6:])
                ends += ["error"] * ("error" in event)
                ends += [c["finish_reason"] for c in event.get("choices", []) if c["finish_reason"]]
                leave_after -= 1
                if leave_after == 0:
                    response.close()
                    return "left"
        whole = len(ends) == n + 1 and ends[-1] == "done" and set(ends[:-1]) <= {"length", "stop"}
        return "ok" if whole else self._torn(kind, ends)

    async def _bad(self, session: aiohttp.ClientSession, rng: random.Random) -> str:
        bodies = (b"{", b"[" * 10_000, b'{"prompt": 7}', b"\xff\xfe", b'{"prompt": "x", "max_tokens": 99999999}')
        async with session.post("/v1/completions", data=rng.choice(bodies)) as response:
            await response.read()
            return str(response.status) if response.status == 400 else self._torn("bad", response.status)

    def _refused(self, kind: str, status: int, answer: Any) -> str:
        return "429" if status == 429 else self._torn(kind, answer)

    def _torn(self, kind: str, what: object) -> str:
        self.wrong.append(f"{kind}: {what}"[:200])
        return "torn"

    def flatness(self) -> tuple[float, float, float]:
        """(MiB after warm-up, MiB in the end, change): medians of a tenth of the time each."""
        seconds = self.rss[-1][0]
        first = [kb for at_s, kb in self.rss if WARM_UP <= at_s / seconds < WARM_UP + 0.1]
        last = [kb for at_s, kb in self.rss if at_s / seconds >= 0.9]
        before, after = statistics.median(first) / 1024, statistics.median(last) / 1024
        return before, after, after / before - 1


def _keeps_form(message: dict[str, Any]) -> bool:
    """Whether an answer or a forced call is what FORM says."""
    calls = message.get("tool_calls")
    value = json.loads(calls[0]["function"]["arguments"] if calls else message["content"])
    return (calls is None or len(calls) == 1) and set(value) == {"town", "days"} and value["town"] in ("Rome", "Oslo")


def fill(server: Server, tokens: int) -> None:
    """Write to every page of a pool of so many tokens: free pages are taken before cached ones."""
    for first in range(0, tokens, FILL_PROMPT):
        server.post("/v1/completions", {"prompt": [1000 + first + i for i in range(FILL_PROMPT)], "max_tokens": 1})


def resident_kb(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1])


def quantile_ms(server: Server, name: str, q: float) -> float:
    """Upper bound of the bucket that holds the q-quantile; infinite beyond the last."""
    found = re.findall(rf'^{name}_bucket\{{.*?le="([^"]+)".*?\}} (\S+)', server.get("/metrics"), re.M)
    counts = [(float(bound.replace("+Inf", "inf")), float(count)) for bound, count in found]
    total = counts[-1][1]
    return 1e3 * min((bound for bound, count in counts if count >= q * total), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--most-tokens", type=int, default=120)
    parser.add_argument("--fill-tokens", type=int, default=6000, help="at least as many as the KV pool holds")
    parser.add_argument("--serve-args", default=SIM)
    args = parser.parse_args()
    with serve(*shlex.split(args.serve_args)) as server:
        fill(server, args.fill_tokens)
        soak = Soak(server, args.most_tokens)
        asyncio.run(soak.run(args.clients, args.minutes * 60))
        server.wait_idle(30)
        before, after, change = soak.flatness()
        row = {
            "minutes": args.minutes,
            "requests": soak.sent,
            "ended": sum(soak.ends.values()),
            "wrong": len(soak.wrong),
            "stream_events_and_tokens": soak.tokens,
            "preemptions": server.metric("vllm:num_preemptions_total"),
            "kv_in_use_after": server.metric("vllm:kv_cache_usage_perc"),
            "faults": server.metric("aengine:faults_total"),
            "rss_mib_warm": round(before, 1),
            "rss_mib_end": round(after, 1),
            "rss_change_percent": round(100 * change, 2),
            "loop_lag_p99_ms": quantile_ms(server, "aengine:loop_lag_seconds", 0.99),
            "gc_pauses": server.metric("aengine:gc_pause_seconds_count"),
            "gc_pause_p50_ms": quantile_ms(server, "aengine:gc_pause_seconds", 0.5),
            "gc_pause_p99_ms": quantile_ms(server, "aengine:gc_pause_seconds", 0.99),
            "gc_pause_max_ms": quantile_ms(server, "aengine:gc_pause_seconds", 1.0),
        }
    for kind, count in sorted(soak.ends.items()):
        print(f"{kind:<24}{count:>8}")
    print("─" * 32)
    for name, value in row.items():
        print(f"{name:<26}{value:>12}")
    print(json.dumps(row))
    for line in soak.wrong[:20]:
        print("WRONG", line)
    holds = not soak.wrong and row["requests"] == row["ended"] and not row["kv_in_use_after"] and abs(change) <= FLAT
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
