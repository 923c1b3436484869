"""The serving process: listens before it loads, drains on a signal, ends at once on the second, fails loudly."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import socket
import sys
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from server_fakes import FakeEngine

from aengine.config import ServerConfig
from aengine.errors import ConfigError, ModelLoadError
from aengine.frontends.parent import listening_sockets
from aengine.server import run, run_server
from aengine.server.counters import Counters
from aengine.server.run import cannot_listen
from tests.waiting import DEADLINE_S

HERE = Path(__file__).parent
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@asynccontextmanager
async def process(engine=None, **server):
    """A serving child process and its base URL."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "serve_fake.py"),
        json.dumps(engine or {}),
        json.dumps(server),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=HERE.parent.parent,
        env={"PYTHONPATH": str(HERE.parent.parent)},
    )
    try:
        url = (await child.stdout.readline()).decode().strip()
        async with aiohttp.ClientSession(url or None) as session:
            yield child, session
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def until_health(session, status):
    async with asyncio.timeout(DEADLINE_S):
        while (await session.get("/health")).status != status:
            await asyncio.sleep(0.02)


async def until_ready(session):
    await until_health(session, 200)


async def until_draining(session):
    """A server that was ready and is told to stop."""
    await until_health(session, 503)


async def ended(child):
    """Its exit code; the time limit is for a process that never ends."""
    return await asyncio.wait_for(child.wait(), DEADLINE_S)


async def test_listens_at_once_and_says_the_phase(tmp_path):
    loading = tmp_path / "loading"
    loading.touch()
    async with process({"load_while": str(loading)}) as (child, session):
        response = await session.post("/v1/chat/completions", json=BODY)
        assert response.status == 503
        assert "loading model" in (await response.json())["error"]["message"]
        assert response.headers["Retry-After"]
        assert (await session.get("/")).status == 200
        loading.unlink()
        await until_ready(session)
        assert (await session.post("/v1/chat/completions", json=BODY)).status == 200
        child.send_signal(signal.SIGTERM)
        assert await ended(child) == 0
        assert b"closed" in await child.stdout.read()


async def test_the_vocabulary_of_grammars_is_read_when_no_request_is_open(monkeypatch):
    monkeypatch.setattr(run, "LOOK_EVERY_S", 0.005)
    monkeypatch.setattr(run, "QUIET_S", 0.02)
    prepared, engine, counters = [], FakeEngine(), Counters()

    async def prepare(sampling):
        prepared.append(sampling.grammar.kind)

    engine.prepare = prepare
    counters.busy = 1
    reading = asyncio.create_task(run._read_vocabulary(engine, counters))
    await asyncio.sleep(0.1)
    assert not prepared
    counters.busy = 0
    async with asyncio.timeout(DEADLINE_S):
        await reading
    assert prepared == ["json_object"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_drains_running_streams_and_refuses_new_ones(number, tmp_path):
    held = tmp_path / "held"
    held.touch()
    fields = {"reply": ["x"] * 30, "hold_while": str(held), "hold_from": 3}
    async with process(fields, shutdown_timeout_s=DEADLINE_S) as (child, session):
        await until_ready(session)
        running = await session.post("/v1/chat/completions", json=BODY)
        child.send_signal(number)
        await until_draining(session)
        refused = await session.post("/v1/chat/completions", json=BODY)
        assert refused.status == 503
        assert "draining" in (await refused.json())["error"]["message"]
        assert refused.headers["Retry-After"]
        assert refused.headers["Connection"] == "close"
        assert (await session.get("/health")).status == 503
        held.unlink()
        text = await running.text()
        assert text.count('"content":"x"') == 30
        assert text.endswith("data: [DONE]\n\n")
        assert await ended(child) == 0


async def test_drain_has_an_end():
    async with process({"hold_after": 3}, shutdown_timeout_s=0.3) as (child, session):
        await until_ready(session)
        running = await session.post("/v1/chat/completions", json=BODY)
        child.send_signal(signal.SIGTERM)
        assert await ended(child) == 0  # though its stream never ends
        running.close()


async def test_second_signal_ends_at_once():
    async with process({"hold_after": 3}, shutdown_timeout_s=3600.0) as (child, session):
        await until_ready(session)
        running = await session.post("/v1/chat/completions", json=BODY)
        child.send_signal(signal.SIGTERM)
        await until_draining(session)
        assert child.returncode is None
        child.send_signal(signal.SIGTERM)
        assert await ended(child) == 128 + signal.SIGTERM
        running.close()


async def test_signal_while_loading_ends():
    async with process({"load_s": 3600}) as (child, session):
        assert (await session.get("/health")).status == 503
        child.send_signal(signal.SIGINT)
        assert await ended(child) == 0


async def test_failed_start_fails_the_process():
    async with process({"load_error": "no such file: /x/model.gguf"}) as (child, _):
        assert await ended(child) == 1
        assert b"no such file: /x/model.gguf" in await child.stderr.read()


async def test_failed_start_raises_and_leaves_nothing():
    engine = FakeEngine(phase="created", load_error=ModelLoadError("broken"))
    urls = []
    before = asyncio.all_tasks()
    with pytest.raises(ModelLoadError, match="broken"):
        await run_server(engine, ServerConfig(port=0), on_listening=urls.append)
    assert engine.phase == "closed"
    assert asyncio.all_tasks() == before
    port = int(urls[0].rpartition(":")[2])
    with pytest.raises(OSError, match="Connect"):
        await asyncio.open_connection("127.0.0.1", port)


async def test_taken_port_is_said_before_loading():
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        engine = FakeEngine(phase="created")
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            await run_server(engine, ServerConfig(port=port))
        assert engine.phase == "created"


async def on_one(config):
    await run_server(FakeEngine(phase="created"), config)


async def on_shared(config):
    with ExitStack() as closing:
        listening_sockets(config, closing)


@pytest.mark.parametrize("listen", [on_one, on_shared])
async def test_an_address_that_cannot_be_had_is_one_clear_error(listen):
    """192.0.2.1 is nobody's, and a name with an empty part can be nobody's."""
    for host, why in (("192.0.2.1", "no such address"), ("a..b", "no address is known")):
        with pytest.raises(ConfigError, match=why) as raised:
            await listen(ServerConfig(host=host, port=8123))
        assert raised.value.message.startswith(f"cannot listen on {host}:8123: ")
        assert raised.value.param == "host"
        assert "asyncio" not in raised.value.message
        assert "error while" not in raised.value.message


@pytest.mark.parametrize(
    ("error", "param", "why"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "host", "no address is known by that name"),
        (PermissionError(errno.EACCES, "error while attempting to bind"), "port", "this user may not"),
        (OSError(errno.EADDRINUSE, "error while attempting to bind"), "port", "another program listens there"),
        (OSError(errno.ENETDOWN, "error while attempting to bind"), "host", "Network is down"),
    ],
)
def test_faults_of_listening_name_what_to_change(error, param, why):
    told = cannot_listen(ServerConfig(host="h", port=80), error)
    assert told.message.startswith(f"cannot listen on h:80: {why}")
    assert told.param == param
