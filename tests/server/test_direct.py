"""Frames that go to the socket without the handler's task: the same bytes, and no more than the socket takes."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from server_fakes import FakeEngine

from aengine.config import ServerConfig
from aengine.engine.stream import RequestStream
from aengine.server import create_app
from aengine.types import FinishReason, OutputDelta
from tests.waiting import turns, until


class Wire(asyncio.Transport):
    def __init__(self):
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = []
        self.closing = False

    def write(self, data):
        self.written.append(bytes(data))

    def writelines(self, parts):
        self.write(b"".join(parts))

    def is_closing(self):
        return self.closing

    def close(self):
        self.closing = True

    abort = close

    def pause_reading(self):
        pass

    resume_reading = pause_reading

    @property
    def chunks(self):
        """Payloads of the answer's chunks, and whether the end has come."""
        _, _, body = b"".join(self.written).partition(b"\r\n\r\n")
        out = []
        while body:
            size, _, body = body.partition(b"\r\n")
            length = int(size, 16)
            assert body[length : length + 2] == b"\r\n"
            if not length:
                return out, True
            out.append(body[:length])
            body = body[length + 2 :]
        return out, False


class PushedEngine(FakeEngine):
    def submit(self, prompt_ids, sampling, *, request_id, **_):
        stream = RequestStream(request_id, list(prompt_ids), sampling.n, lambda: self.aborted.append(request_id))
        self.streams.append(stream)
        return stream


@pytest.fixture
async def connection():
    """`protocol, wire, stream = await connection(path, body)` of a request whose deltas the test pushes."""
    runners = []

    async def make(path, body):
        engine = PushedEngine()
        runner = web.AppRunner(create_app(engine, ServerConfig()), handler_cancellation=True)
        await runner.setup()
        runners.append(runner)
        protocol, wire = runner.server(), Wire()
        protocol.connection_made(wire)
        sent = json.dumps({"stream": True, **body}).encode()
        protocol.data_received(b"POST %b HTTP/1.1\r\nHost: x\r\n" % path.encode())
        protocol.data_received(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(sent), sent))
        await until(lambda: engine.streams)
        await turns()
        return protocol, wire, engine.streams[0]

    yield make
    for runner in runners:
        await runner.cleanup()


def text_of(chunks):
    """The answer's text, and how many frames had some."""
    frames = [json.loads(f[6:]) for f in b"".join(chunks).decode().split("\n\n") if f.startswith("data: {")]
    pieces = [c.get("text") or c.get("delta", {}).get("content") or "" for f in frames for c in f["choices"]]
    return "".join(pieces), sum(map(bool, pieces))


CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
COMPLETION = ("/v1/completions", {"prompt": "hi"})
WITH_IDS = ("/v1/completions", {"prompt": "hi", "return_token_ids": True})


@pytest.mark.parametrize(
    ("path", "body"), [CHAT, COMPLETION, (COMPLETION[0], {"prompt": "hi", "return_token_ids": True})]
)
async def test_one_write_a_token_and_no_task_between(connection, path, body):
    _, wire, stream = await connection(path, body)
    stream.push(OutputDelta(0, "é0", (1,)))
    await turns()
    before = len(wire.written)
    for i in range(1, 6):
        stream.push(OutputDelta(0, f"é{i}", (i,)))
        assert len(wire.written) == before + i  # already, before any task had a turn
    stream.push(OutputDelta(0, "end", (9,), None, FinishReason.STOP))
    await turns()
    chunks, ended = wire.chunks
    assert text_of(chunks) == ("é0é1é2é3é4é5end", 7)
    assert ended
    assert chunks[-1].endswith(b"data: [DONE]\n\n")


async def test_a_full_socket_gets_merged_deltas_once_it_takes_more(connection):
    protocol, wire, stream = await connection(*CHAT)
    stream.push(OutputDelta(0, "a", (1,)))
    await turns()
    protocol.pause_writing()
    for i in range(50):
        stream.push(OutputDelta(0, f"{i},", (i,)))
        await asyncio.sleep(0)
    stalled = len(wire.written)
    protocol.resume_writing()
    await turns()
    stream.push(OutputDelta(0, "", (9,), None, FinishReason.STOP))
    await turns()
    text, frames = text_of(wire.chunks[0])
    assert text == "a" + "".join(f"{i}," for i in range(50))
    assert stalled <= 3
    assert frames <= 4


async def test_a_client_that_left_is_not_written_to(connection):
    protocol, wire, stream = await connection(*CHAT)
    stream.push(OutputDelta(0, "a", (1,)))
    await turns()
    before = len(wire.written)
    protocol.connection_lost(None)
    stream.push(OutputDelta(0, "b", (1,)))
    await turns()
    assert len(wire.written) == before
