"""Clients that leave or stall: their requests are aborted at once, nobody else notices."""

from __future__ import annotations

import asyncio
import json

import pytest
from server_fakes import FakeEngine

from aengine.server.sse import LOOKS
from tests.waiting import turns, until

URL = "/v1/chat/completions"


async def connect(client, url, body):
    """A bare socket that has sent a request; small receive buffer."""
    reader, writer = await asyncio.open_connection(client.host, client.port, limit=2**10)
    data = json.dumps(body).encode()
    head = f"POST {url} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("hold_after", [0, 3], ids=["queued", "running"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("url", "prompt"),
    [(URL, {"messages": [{"role": "user", "content": "x"}]}), ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2})],
    ids=["chat", "completions"],
)
async def test_disconnect_aborts(serve, url, prompt, stream, hold_after):
    client, engine = await serve(FakeEngine(hold_after=hold_after))
    _, writer = await connect(client, url, {**prompt, "stream": stream})
    await until(lambda: len(engine.streams) == len(prompt.get("prompt", "x")))
    await turns()
    assert not engine.aborted
    writer.close()
    await until(lambda: not engine.open)
    assert len(engine.aborted) == len(engine.streams)
    await until(lambda: all(stream.closed for stream in engine.streams))
    engine.hold_after = None
    response = await client.post("/v1/completions", json={"prompt": "a"})
    assert response.status == 200


async def test_many_disconnects_leave_no_tasks(serve, chat_body):
    client, engine = await serve(FakeEngine(hold_after=3))
    before = len(asyncio.all_tasks())
    writers = [(await connect(client, URL, chat_body(stream=bool(i % 2))))[1] for i in range(50)]
    await until(lambda: len(engine.open) == 50)
    for writer in writers:
        writer.close()
    await until(lambda: not engine.open)
    await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_a_stalled_client_slows_only_itself(serve, chat_body):
    piece = "x" * 20_000
    engine = FakeEngine(reply=[piece] * 2_000)
    client, _ = await serve(engine)
    _, writer = await connect(client, URL, chat_body(stream=True))
    await until(lambda: engine.streams and engine.streams[0].completion_tokens)
    before = -1
    while engine.streams[0].completion_tokens != before:  # the socket fills, then the stream stands
        before = engine.streams[0].completion_tokens
        await asyncio.sleep(0.1)
        await turns()
    assert before < 2_000 * len(piece) / 2
    engine.reply = ["Hello"]
    answer = await (await client.post(URL, json=chat_body())).json()
    assert answer["choices"][0]["message"]["content"] == "Hello"
    writer.transport.abort()
    await until(lambda: not engine.open)


async def test_keep_alive_does_not_touch_a_full_socket(serve, chat_body, keepers):
    engine = FakeEngine(reply=["x" * 20_000] * 500)
    client, _ = await serve(engine)
    reader, writer = await connect(client, URL, chat_body(stream=True))
    before = -1
    while not engine.streams or engine.streams[0].completion_tokens != before:  # the socket fills
        before = engine.streams[0].completion_tokens if engine.streams else -1
        await asyncio.sleep(0.1)
        await turns()
    await keepers.look(3 * LOOKS)
    raw = b""
    while not raw.endswith(b"0\r\n\r\n"):
        raw += await reader.read(2**20)
    assert b"keep-alive\n" not in raw
    assert b"data: [DONE]" in raw
    writer.close()
