"""A whole server on the sim device whose parts fail at random, and clients that misbehave at random.

Owns: the plan of faults (planted at the borders of executor and tokenizer, where only a program can), the clients, the
tally of how requests ended, and what must hold when all is over.
Does not know: how the engine contains a fault.
Invariants: a fault that was planted is counted here when it is raised, so that the server's own counters can be held
against it. Every answer that was promised whole is compared token by token with what the sim device must say.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

from aengine import AsyncEngine, EngineConfig, SchedulerConfig
from aengine.config import ServerConfig
from aengine.runner.sim import SimExecutor, sim_token
from aengine.server import create_app
from aengine.server.connections import Gate, GatedRunner, Room
from aengine.server.context import CONTEXT
from aengine.types import StepPlan
from tests.engine.conftest import VOCAB, ByteStream, ByteTokenizer, Sim

RATES = {"stage": 0.01, "run": 0.015, "slow": 0.02, "encode": 0.1, "detokenize": 0.002}
COUNTED_AS = {"stage": "step", "run": "step", "encode": "tokenizer", "detokenize": "detokenizer"}
KINDS = ("stream", "stream", "whole", "choices", "text", "leave", "leave", "crawl", "garbage", "too_long", "no_http")


class Planted(Exception):
    """A fault of the plan."""


class Faults:
    """One generator per kind, for each kind is raised on one thread only. `raised` counts."""

    def __init__(self, seed: int) -> None:
        self.raised: Counter[str] = Counter()
        self._random = {kind: random.Random(f"{seed} {kind}") for kind in RATES}
        self.armed = True

    def hit(self, kind: str) -> bool:
        hit = self.armed and self._random[kind].random() < RATES[kind]
        self.raised[kind] += hit
        return hit

    def at(self, kind: str) -> None:
        if self.hit(kind):
            raise Planted(f"planted: {kind}")


class ChaosExecutor(SimExecutor):
    def __init__(self, faults: Faults, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._faults = faults

    def stage(self, plan: StepPlan) -> StepPlan:
        self._faults.at("stage")
        return super().stage(plan)

    def _rows(self, plan: StepPlan) -> list[list[int]]:
        """Behind the tables: an executor that cannot apply those runs no later step, and the engine dies of it."""
        if self._faults.hit("slow"):
            time.sleep(0.02)
        self._faults.at("run")
        return super()._rows(plan)


class ChaosStream(ByteStream):
    def step(self, token: int) -> str | None:
        assert isinstance(self._tokenizer, ChaosTokenizer)
        self._tokenizer.faults.at("detokenize")
        return super().step(token)


class ChaosTokenizer(ByteTokenizer):
    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.faults.at("encode")
        return super().encode(text)

    def stream(self, *, skip_special_tokens: bool = True) -> ByteStream:
        return ChaosStream(self)


def oracle(ids: list[int], n: int) -> list[int]:
    out: list[int] = []
    while len(out) < n:
        out.append(sim_token(ids + out, VOCAB))
    return out


class Chaos:
    """One run. `ends` counts how requests ended, by kind; `wrong` holds what must not be."""

    def __init__(self, seed: int, *, pages: int = 120, step_s: float = 0.0005) -> None:
        self.faults = Faults(seed)
        self.ends: Counter[str] = Counter()
        self.sent = 0
        self.wrong: list[str] = []
        self.sim = Sim(pages=pages, context=256, step_s=step_s)
        self.sim.tokenizer = ChaosTokenizer(self.faults)
        self.sim.executor_type = partial(ChaosExecutor, self.faults)  # type: ignore[assignment]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[tuple[AsyncEngine, int]]:
        """(engine, port); `aengine.engine.build.build` must be this world's `sim.build` meanwhile."""
        config = ServerConfig(port=0, max_body_bytes=2**16)
        engine = AsyncEngine(EngineConfig(scheduler=SchedulerConfig(max_num_seqs=16, max_batched_tokens=64)))
        await engine.start()
        app = create_app(engine, config)
        gate = Gate(app[CONTEXT].counters, room=Room(256, 32), stall_s=60.0)
        runner = GatedRunner(app, gate, idle_s=60.0, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield engine, runner.addresses[0][1]
        finally:
            await engine.close()
            await runner.cleanup()

    async def clients(self, port: int, *, count: int, seconds: float, seed: int) -> None:
        until_s = time.monotonic() + seconds
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as session:

            async def client(number: int) -> None:
                rng = random.Random(f"{seed} client {number}")
                while time.monotonic() < until_s:
                    kind = rng.choice(KINDS)
                    self.sent += 1
                    try:
                        end = await self._one(session, port, kind, rng)
                    except Exception as error:
                        end = f"lost: {type(error).__name__}"
                        self.wrong.append(f"{kind}: {error!r}")
                    self.ends[f"{kind}: {end}"] += 1

            await asyncio.gather(*(client(number) for number in range(count)))

    async def _one(self, session: aiohttp.ClientSession, port: int, kind: str, rng: random.Random) -> str:
        if kind == "no_http":
            return await no_http(port)
        if kind == "garbage":
            async with session.post("/v1/completions", data=rng.randbytes(rng.randint(1, 200))) as response:
                return await self._refused(response, 400)
        prompt = [rng.randrange(4) for _ in range(rng.randint(1, 60))]  # few ids: many prefixes are shared
        most = rng.randint(1, 40)
        body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        if kind == "too_long":
            async with session.post("/v1/completions", json={**body, "max_tokens": 5_000}) as response:
                return await self._refused(response, 400)
        if kind == "text":
            prompt = [ord(letter) for letter in "some text"]
            body["prompt"] = "some text"
        n = 3 if kind == "choices" else 1
        stream = kind in ("stream", "leave", "crawl")
        async with session.post("/v1/completions", json={**body, "n": n, "stream": stream}) as response:
            if response.status != 200:
                return await self._refused(response, 400, 429, 500)
            if not stream:
                answer = await response.json()
                for choice in answer["choices"]:
                    self._same(kind, prompt, most, choice["token_ids"], choice["finish_reason"])
                return "ok"
            return await self._read(response, kind, prompt, most, rng)

    async def _read(
        self, response: aiohttp.ClientResponse, kind: str, prompt: list[int], most: int, rng: random.Random
    ) -> str:
        ids: list[int] = []
        ends: list[str] = []
        stop_after = rng.randint(1, 10) if kind == "leave" else 1_000
        async for line in response.content:
            if kind == "crawl":
                await asyncio.sleep(0.01)
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                ends.append("done")
                continue
            event = json.loads(line[6:])
            if "error" in event:
                ends.append(f"error {event['error']['code']}")
                continue
            for choice in event["choices"]:
                ids += choice.get("token_ids") or []
                ends += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
            stop_after -= 1
            if not stop_after:
                response.close()
                return "left"
        if ends == ["length", "done"]:
            self._same(kind, prompt, most, ids, "length")
            return "ok"
        if len(ends) == 2 and ends[0] == "error step_failed" and ends[1] == "done":
            if ids != oracle(prompt, most)[: len(ids)]:
                self.wrong.append(f"{kind}: wrong tokens before an error")
            return ends[0]
        self.wrong.append(f"{kind}: ended as {ends}")
        return "torn"

    async def _refused(self, response: aiohttp.ClientResponse, *allowed: int) -> str:
        error = (await response.json())["error"]
        if response.status not in allowed:
            self.wrong.append(f"status {response.status}: {error}")
        return f"{response.status} {error['code']}"

    def _same(self, kind: str, prompt: list[int], most: int, ids: list[int], reason: str) -> None:
        if (ids, reason) != (oracle(prompt, most), "length"):
            self.wrong.append(f"{kind}: {len(ids)} of {most} tokens, {reason}, or not those of the device")

    async def settle(self, engine: AsyncEngine) -> None:
        """Until nothing runs; what is left then is a leak."""
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            stats = engine.stats()
            if not (stats.running or stats.waiting or stats.open_streams or stats.in_flight):
                return
            await asyncio.sleep(0.01)
        self.wrong.append(f"not idle after 60 s: {engine.stats()}")

    def balance(self, engine: AsyncEngine) -> None:
        """Free + live + cached + fenced = total, none of it live, and every planted fault is in the metrics."""
        assert engine._parts is not None
        cache = engine._parts.scheduler.cache
        cache.check()
        for group in cache.stats().pool.groups:
            if group.live or group.fenced:
                self.wrong.append(f"group {group.name}: {group.live} pages live, {group.fenced} fenced")
        counted = metric(engine.metrics.render().decode(), "aengine:faults_total", "kind")
        want: Counter[str] = Counter()
        for kind, name in COUNTED_AS.items():
            want[name] += self.faults.raised[kind]
        for name, count in want.items():
            if counted[name] != count:
                self.wrong.append(f"{count} faults of kind {name} were planted, {counted[name]} are in the metrics")
        if sum(self.ends.values()) != self.sent:
            self.wrong.append(f"{self.sent} requests were sent, {sum(self.ends.values())} ended")


async def no_http(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer.split()[1].decode()


def metric(text: str, name: str, label: str) -> Counter[str]:
    """Label value -> value of one counter."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith(name + "{"):
            found[line.split(f'{label}="')[1].split('"')[0]] = int(float(line.split()[-1]))
    return found
