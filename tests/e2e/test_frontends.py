"""`aengine serve --frontends 2` as processes: what they cost, a kill in mid-stream, a drain, one set of counters."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.serving import Server, serve
from tests.waiting import DEADLINE_S, until

SIM = ("--device", "sim", "--max-model-len", "512", "--max-num-seqs", "64", "--frontends", "2")
STEP = ("--sim-step-s", "0.01")
STREAMS = 16
BODY = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(*SIM, *STEP) as running:
        yield running


def children(server: Server) -> list[int]:
    pid = server.process.pid
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def alive(pid: int) -> bool:
    """A process that ended and was not reaped is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def health(url: str) -> int | None:
    """Over a connection of its own; None: it was refused."""
    try:
        async with aiohttp.ClientSession() as session, session.get(url + "/health") as response:
            return response.status
    except aiohttp.ClientError:
        return None


async def stream(url: str, i: int, tokens: int, seen: set[int] | None = None) -> list[int] | None:
    """Token ids over a connection of its own; None: it broke, or an error ended it. `seen` gets `i` with the first of
    them."""
    ids: list[int] = []
    body = {**BODY, "prompt": [100 + i, 7, i], "max_tokens": tokens}
    try:
        async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        ids += choice["token_ids"]
                    if seen is not None:
                        seen.add(i)
    except aiohttp.ClientError:
        return None
    return ids


def test_front_ends_hold_no_torch_and_little_memory(server: Server) -> None:
    assert len(children(server)) == 2
    for pid in children(server):
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        assert found
        assert int(found[1]) < 130_000
    assert any("2 front-end processes" in line for line in server.output)


async def test_a_killed_front_end_costs_its_own_streams_and_is_restarted(server: Server) -> None:
    whole = await asyncio.gather(*(stream(server.url, i, 300) for i in range(STREAMS)))
    before = await asyncio.to_thread(server.metric, "vllm:generation_tokens_total")
    seen: set[int] = set()
    running = [asyncio.create_task(stream(server.url, i, 300, seen)) for i in range(STREAMS)]
    await until(lambda: len(seen) == STREAMS)
    victim = children(server)[0]
    os.kill(victim, signal.SIGKILL)
    ended = await asyncio.gather(*running)
    broken = [ids for ids in ended if ids is None]
    assert 0 < len(broken) < STREAMS
    assert all(ids == whole[i] for i, ids in enumerate(ended) if ids is not None)
    again = await asyncio.gather(*(stream(server.url, i, 5) for i in range(STREAMS)))
    assert again == [ids[:5] for ids in whole if ids]  # nobody is refused while it is restarted
    await until(lambda: victim not in children(server) and len(children(server)) == 2)
    await asyncio.to_thread(server.wait_idle)
    metrics = await asyncio.to_thread(server.get, "/metrics")
    assert re.search(r"^aengine:frontends_lost_total\S* 1\.0$", metrics, re.M)
    assert re.search(rf'^vllm:request_success_total{{finished_reason="abort"\S* {len(broken)}\.0$', metrics, re.M)
    assert await asyncio.to_thread(server.metric, "vllm:generation_tokens_total") >= before + 5 * STREAMS
    lines = [line for line in server.output if f"{len(broken)} sequences aborted" in line]
    assert len(lines) == 1
    assert "SIGKILL" in lines[0]


async def test_a_stopped_front_end_goes_on_and_nobody_loses_a_token(server: Server) -> None:
    seen: set[int] = set()
    running = [asyncio.create_task(stream(server.url, i, 40, seen)) for i in range(8)]
    await until(lambda: seen)
    pids = children(server)
    os.kill(pids[0], signal.SIGSTOP)
    late = [asyncio.create_task(stream(server.url, i, 5)) for i in range(8)]  # some come to the stopped one
    async with asyncio.timeout(DEADLINE_S):
        assert [len(ids or ()) for ids in await asyncio.gather(*running, *late)] == [40] * 8 + [5] * 8
    assert children(server) == pids
    metrics = await asyncio.to_thread(server.get, "/metrics")
    assert re.search(r'^aengine:faults_total{kind="frontend_stopped"\S* 1\.0$', metrics, re.M)
    assert sum("was stopped by a signal" in line for line in server.output) == 1


def test_any_front_end_tells_the_counters_of_all(server: Server) -> None:
    seen = {server.metric("vllm:generation_tokens_total") for _ in range(8)}  # a connection each
    assert len(seen) == 1


TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"town": {"enum": ["Rome", "Oslo"]}}}}
TOOL["parameters"] |= {"required": ["town"], "additionalProperties": False}  # type: ignore[operator]
SCHEMA = TOOL["parameters"]
ASKED = [{"role": "user", "content": "Where to?"}]


def test_every_api_works_through_a_front_end(server: Server) -> None:
    for _ in range(3):  # a connection each: the front-ends take turns
        form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
        chat = {"messages": ASKED, "max_tokens": 60, "response_format": form}
        answer: Any = server.post("/v1/chat/completions", chat)
        assert json.loads(answer["choices"][0]["message"]["content"])["town"] in ("Rome", "Oslo")
        chat = {"messages": ASKED, "max_tokens": 60, "tools": [{"type": "function", "function": TOOL}]}
        answer = server.post("/v1/chat/completions", {**chat, "tool_choice": "required"})
        (call, *_) = answer["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["town"] in ("Rome", "Oslo")
        answer = server.post("/v1/responses", {"input": "Where to?", "max_output_tokens": 16})
        assert answer["usage"]["output_tokens"] > 0
        assert answer["object"] == "response"
        answer = server.post("/v1/messages", {"model": "smollm2-135m", "messages": ASKED, "max_tokens": 16})
        assert answer["usage"]["output_tokens"] > 0
        assert answer["type"] == "message"


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["a second SIGTERM", "SIGKILL"])
async def test_front_ends_are_gone_when_the_engine_process_is(end: signal.Signals) -> None:
    with serve(*SIM, *STEP) as running:
        seen: set[int] = set()
        streams = [asyncio.create_task(stream(running.url, i, 400, seen)) for i in range(4)]
        await until(lambda: len(seen) == 4)
        pids = children(running)
        assert len(pids) == 2
        if end is signal.SIGTERM:
            running.process.send_signal(end)
            await until(lambda: any("draining" in line for line in running.output))
            assert sum("draining" in line for line in running.output) == 1
        running.process.send_signal(end)
        await asyncio.to_thread(running.process.wait, 120)
        if end is signal.SIGKILL:  # the system kills them: at once, but not before
            await until(lambda: not any(map(alive, pids)))
        assert not any(map(alive, pids))
        assert await asyncio.gather(*streams) == [None] * 4


async def test_sigterm_drains_all_front_ends() -> None:
    with serve(*SIM, "--sim-step-s", "0.005") as running:
        seen: set[int] = set()
        streams = [asyncio.create_task(stream(running.url, i, 120, seen)) for i in range(STREAMS)]
        longest = asyncio.create_task(stream(running.url, STREAMS, 400, seen))
        await until(lambda: len(seen) == STREAMS + 1)
        pids = children(running)
        running.process.send_signal(signal.SIGTERM)
        assert [len(ids or ()) for ids in await asyncio.gather(*streams)] == [120] * STREAMS
        await until(lambda: not all(map(alive, pids)))  # one front-end has nothing left and goes
        told = await asyncio.wait_for(asyncio.gather(*(health(running.url) for _ in range(8))), DEADLINE_S)
        assert set(told) <= {503, None}  # nobody waits at the socket of the one that went
        assert len(await longest or ()) == 400
        assert await asyncio.to_thread(running.process.wait, 120) == 0
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
