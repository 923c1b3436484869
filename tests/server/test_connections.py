"""Connections that say nothing, read nothing or send nonsense; bodies that come slowly: what is cut, and who is not."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import struct
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import uvloop
from aiohttp import web
from server_fakes import FakeEngine, FakeModel

from aengine.config import ServerConfig
from aengine.server import create_app
from aengine.server.connections import GRACE_S, REFUSALS, Backlog, Gate, GatedRunner, Room, room_for_connections
from aengine.server.context import CONTEXT
from aengine.server.counters import Counters
from tests.waiting import DEADLINE_S, turns, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@asynccontextmanager
async def gated(engine=None, most=8, patience=32, **settings):
    """(port, counters, gate) of a server in this loop."""
    config = ServerConfig(port=0, **settings)
    app = create_app(engine or FakeEngine(), config)
    gate = Gate(app[CONTEXT].counters, room=Room(most, patience), stall_s=config.stall_timeout_s)
    runner = GatedRunner(app, gate, idle_s=config.idle_timeout_s, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1], app[CONTEXT].counters, gate
    finally:
        await runner.cleanup()


async def send(port, data, *, limit=2**16):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    writer.write(data)
    return reader, writer


async def answer(reader):
    """(status, envelope's inside) of a small answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    body = json.loads(await reader.readexactly(length))
    return int(head.split()[1]), body.get("error"), head


def post(**fields):
    body = json.dumps({"prompt": "hi", **fields}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.fixture
def no_grace(monkeypatch):
    monkeypatch.setattr("aengine.server.connections.GRACE_S", 0.0)


async def test_silent_connections_make_room_and_busy_ones_stay(caplog, no_grace):
    engine = FakeEngine(hold_after=3)
    async with gated(engine, most=4) as (port, counters, _):
        busy, kept = await send(port, post(stream=True))
        await busy.readuntil(b"data: ")
        silent = [await send(port, b"GET / HT") for _ in range(20)]
        await until(lambda: counters.events["evicted"] >= 17)
        assert counters.events["evicted"] == 17  # 21 came, 4 may stay
        assert (counters.connections, counters.busy) == (4, 1)
        assert await asyncio.wait_for(silent[0][0].read(), DEADLINE_S) == b""
        reader, _ = await send(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await answer(reader))[0] == 200
        assert len(engine.streams) == 1
        assert not engine.aborted
        kept.close()
    assert sum("longest idle" in record.message for record in caplog.records) == 1


async def test_a_burst_beyond_the_limit_gets_answers_and_no_resets():
    engine = FakeEngine(reply=["x"], gate=asyncio.Semaphore(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aengine.server.connections.GRACE_S", 3600.0)  # nobody is silent for long
        await _burst(engine)


async def _burst(engine):
    async with gated(engine, most=8, patience=64) as (port, counters, _):
        clients = await asyncio.gather(*(send(port, b"") for _ in range(40)))
        for _, writer in clients:
            writer.write(post())
        await until(lambda: counters.events["refused"] == 32 and len(engine.streams) == 8)
        for _ in range(8 * 4):
            engine.gate.release()
        statuses = [(await answer(reader))[0] for reader, _ in clients]
        assert sorted(set(statuses)) == [200, 503]
        assert statuses.count(200) == 8
        assert counters.events["refused"] == statuses.count(503)
        assert counters.events["evicted"] == 0
        for _, writer in clients:
            writer.close()


async def test_who_is_asking_is_no_victim(monkeypatch):
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr("aengine.server.connections.time", SimpleNamespace(monotonic=lambda: clock.now_s))
    async with gated(most=2) as (port, counters, gate):
        answered, writer = await send(port, post())
        assert (await answer(answered))[0] == 200
        asking = socket.create_connection(("127.0.0.1", port))
        await until(lambda: gate.open == 2)
        clock.now_s += 1.25 * GRACE_S  # both have been silent for long
        asking.sendall(b"GET /hea")  # not read by the server yet
        assert gate.admit()  # the other one leaves
        assert await asyncio.wait_for(answered.read(), DEADLINE_S) == b""
        _, kept = await send(port, b"")
        await until(lambda: gate.open == 2)
        assert not gate.admit()  # one begins to ask, one has just come
        clock.now_s += 0.75 * GRACE_S
        asking.sendall(b"lth HTTP/1.1\r\n")  # a head that trickles gains no time
        await until(lambda: not any(connection.unread_bytes() for connection in gate._fresh))
        await turns()
        clock.now_s += 0.5 * GRACE_S
        assert gate.admit()
        asking.setblocking(False)
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(asking, 1), DEADLINE_S) == b""
        assert (counters.events["evicted"], counters.events["refused"]) == (2, 1)
        for each in (writer, asking, kept):
            each.close()


async def test_when_all_are_busy_new_ones_are_refused_at_once():
    async with gated(FakeEngine(hold_after=3), most=2) as (port, counters, _):
        held = [await send(port, post(stream=True)) for _ in range(2)]
        for reader, _ in held:
            await reader.readuntil(b"data: ")
        reader, _ = await send(port, post())
        status, error, head = await answer(reader)
        assert (status, error["code"]) == (503, "busy")
        assert b"Retry-After: 1" in head
        assert counters.events["refused"] == 1
        held[0][1].close()
        await until(lambda: counters.busy < 2)
        reader, _ = await send(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await answer(reader))[0] == 200


async def test_a_refused_client_gets_the_answer_to_a_request_it_sends_late_and_in_parts(monkeypatch, no_grace):
    monkeypatch.setattr("aengine.server.connections.REFUSE_S", 0.3)
    async with gated(FakeEngine(hold_after=3), most=1) as (port, _, gate):
        held, busy = await send(port, post(stream=True))
        await held.readuntil(b"data: ")
        silent, kept = await send(port, b"")
        await until(lambda: gate.counters.events["refused"] == 1)
        monkeypatch.setattr("aengine.server.connections.REFUSE_S", DEADLINE_S)  # this one is slow, but not silent
        reader, writer = await send(port, b"")
        await until(lambda: gate.counters.events["refused"] == 2)
        writer.write(post()[:20])
        assert (await answer(reader))[0] == 503
        writer.write(b" " * 2**20)  # a body that is still on its way resets nothing
        await writer.drain()
        assert await reader.read() == b""
        assert await asyncio.wait_for(silent.read(), DEADLINE_S) == b""
        for each in (busy, kept, writer):
            each.close()


async def test_patience_with_those_who_are_refused_has_an_end():
    async with gated(FakeEngine(hold_after=3), most=1, patience=2) as (port, counters, _):
        held = [await send(port, post(stream=True))]
        await held[0][0].readuntil(b"data: ")
        held += [await send(port, b"") for _ in range(3)]
        assert (await answer(held[-1][0]))[0] == 503  # at once, before it has asked
        assert counters.events["refused"] == 3
        for _, writer in held:
            writer.close()


async def test_a_head_that_does_not_come_ends_the_connection():
    async with gated(idle_timeout_s=0.2) as (port, counters, _):
        readers = [(await send(port, data))[0] for data in (b"", b"POST /v1/comp", HEAD)]
        for reader in readers:
            assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
        await until(lambda: counters.connections == 0)


async def test_a_body_that_does_not_come_is_told():
    async with gated(body_timeout_s=0.1) as (port, counters, _):
        reader, _ = await send(port, HEAD + b"Content-Length: 100\r\n\r\n" + b"{" * 7)
        status, error, _ = await answer(reader)
        assert (status, error["code"]) == (408, "body_timeout")
        assert "7 bytes of the body came in 0.1 s" in error["message"]
        assert counters.events["body_timeout"] == 1


async def test_slow_uploads_share_a_budget_and_small_requests_pass():
    async with gated(max_body_bytes=2**20, max_upload_bytes=2**20) as (port, counters, _):
        part = b" " * (700 * 2**10)
        first, writer = await send(port, HEAD + b"Content-Length: 1000000\r\n\r\n" + part)
        await until(lambda: counters.upload_bytes >= 600 * 2**10)
        second, _ = await send(port, HEAD + b"Content-Length: 1000000\r\n\r\n" + part)
        status, error, _ = await answer(second)
        assert (status, error["code"]) == (429, "queue_full")
        assert counters.events["uploads_full"] == 1
        small, _ = await send(port, post())
        assert (await answer(small))[0] == 200
        writer.write(b" " * (1_000_000 - len(part)))
        assert (await answer(first))[0] == 400  # only blanks: no JSON
        assert counters.upload_bytes == 0


async def test_a_client_that_takes_nothing_is_cut_and_its_request_aborted():
    engine = FakeEngine(reply=["x" * 2**14] * 200, model=FakeModel(max_model_len=2**24))
    async with gated(engine) as (port, counters, gate):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", port))
        await until(lambda: gate.open)
        for connection in gate._fresh:
            connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sock.sendall(post(stream=True, max_tokens=2**23))
        await until(lambda: sum(c.transport.get_write_buffer_size() for c in gate._busy) > 0)
        for now_s in (0.0, 1.0, 119.0):
            gate.cut_stalled(now_s)
        assert counters.events["stalled"] == 0
        gate.cut_stalled(121.0)
        assert counters.events["stalled"] == 1
        await until(lambda: engine.aborted)
        assert len(engine.aborted) == 1
        await until(lambda: counters.connections == 0)
        sock.close()


async def test_an_answer_that_nobody_reads_keeps_its_connection_busy_and_is_cut():
    async with gated(FakeEngine(reply=["x" * 2**14] * 600, model=FakeModel(max_model_len=2**24))) as (
        port,
        counters,
        gate,
    ):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", port))
        sock.sendall(post(max_tokens=2**23).replace(b"Host", b"Connection: close\r\nHost"))
        await until(lambda: gate._busy and next(iter(gate._busy)).unwritten_bytes())
        assert gate.open == 1
        gate.cut_stalled(0.0)
        gate.cut_stalled(119.0)
        assert (counters.events["stalled"], counters.busy) == (0, 1)
        gate.cut_stalled(121.0)
        await until(lambda: not counters.connections)
        assert (counters.events["stalled"], counters.connections) == (1, 0)
        sock.close()


def test_a_backlog_that_shrinks_is_no_standstill():
    backlog = Backlog()
    assert [backlog.still_s(n, t) for t, n in enumerate((0, 9, 9, 8, 8, 12, 0, 5))] == [0, 0, 1, 0, 1, 2, 0, 0]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00 a TLS hello\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"b" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 5_000 + b"\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"X: evil\rINFO all is well\r\n\r\n",
    ],
)
async def test_what_is_no_request_gets_one_small_answer_and_no_line(data, caplog):
    async with gated() as (port, counters, _):
        reader, _ = await send(port, data)
        status, error, head = await answer(reader)
        assert status == 400
        assert error["message"] == "this is not a valid HTTP request"
        assert b"aiohttp" not in head
        assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
        assert counters.events["malformed"] == 1
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


async def test_who_leaves_before_it_may_send_its_body_writes_no_line(caplog):
    async with gated(most=64) as (port, counters, _):
        for _ in range(20):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
            sock.close()
        reader, writer = await send(port, HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert (await answer(reader))[0] == 400
        assert counters.connections == 1
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


async def test_a_compressed_bomb_ends_at_the_limit():
    bomb = gzip.compress(b" " * (64 * 2**20))
    async with gated(max_body_bytes=2**20) as (port, counters, _):
        reader, _ = await send(port, HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb) + bomb)
        assert (await answer(reader))[0] == 413
        assert counters.upload_bytes == 0


async def test_counters_are_on_the_metrics_page():
    async with gated() as (port, _, _gate):
        reader, _ = await send(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
    assert 'aengine:http_faults_total{kind="malformed",model_name="fake"} 0.0' in text
    assert 'aengine:http_connections_busy{model_name="fake"} 1.0' in text


def test_the_gate_asks_the_system_first(monkeypatch):
    limits = {"now": (1024, 4096)}
    monkeypatch.setattr("aengine.server.connections.resource.getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(
        "aengine.server.connections.resource.setrlimit", lambda _, pair: limits.update(now=pair), raising=True
    )
    assert room_for_connections(2000) == (2000, REFUSALS)
    assert limits["now"] == (2000 + REFUSALS + 64, 4096)
    assert room_for_connections(16384) == (4096 - 64 - REFUSALS, REFUSALS)
    assert limits["now"] == (4096, 4096)
    limits["now"] = (256, 256)
    assert room_for_connections(16384) == (256 - 64 - 16, 16)


def test_events_are_told_once_a_minute(caplog):
    gate = Gate(Counters(), room=Room(1, 1), stall_s=1.0)
    for _ in range(5):
        gate.note("refused", "full")
    assert gate.counters.events["refused"] == 5
    assert [record.message for record in caplog.records] == ["full"]


@pytest.mark.parametrize(
    "tested",
    [
        test_a_burst_beyond_the_limit_gets_answers_and_no_resets,
        test_when_all_are_busy_new_ones_are_refused_at_once,
        test_a_client_that_takes_nothing_is_cut_and_its_request_aborted,
    ],
)
def test_so_it_is_on_the_loop_that_serves(tested):
    """uvloop's transports are none of asyncio's classes."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(tested())
