"""Streamed chats: the exact bytes and their order."""

from __future__ import annotations

import asyncio
import json

import pytest
from server_fakes import FakeEngine

from aengine.errors import EngineDead
from aengine.server.sse import LOOKS
from aengine.types import FinishReason
from tests.waiting import turns, until

URL = "/v1/chat/completions"


async def test_golden_bytes(serve, chat_body, monkeypatch):
    client, _ = await serve()
    monkeypatch.setattr("aengine.server.jobs.time.time", lambda: 1_800_000_000.9)
    monkeypatch.setattr("aengine.server.jobs.uuid.uuid4", lambda: type("U", (), {"hex": "0" * 32}))
    monkeypatch.setattr("aengine.server.context.server_version", lambda: "1")
    response = await client.post(URL, json=chat_body(stream=True, stream_options={"include_usage": True}))
    head = (
        b'data: {"id":"chatcmpl-00000000000000000000000000000000","object":"chat.completion.chunk",'
        b'"created":1800000000,"model":"fake-model","system_fingerprint":"fp_7a1e9caf74",'
    )
    choice = head + b'"choices":[{"index":0,"delta":'
    expected = [
        choice + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}',
        choice + b'{"content":"Hel"},"logprobs":null,"finish_reason":null}],"usage":null}',
        choice + b'{"content":"lo"},"logprobs":null,"finish_reason":null}],"usage":null}',
        choice + b'{"content":"!"},"logprobs":null,"finish_reason":null}],"usage":null}',
        choice + b'{},"logprobs":null,"finish_reason":"stop","stop_reason":null}],"usage":null}',
        head + b'"choices":[],"usage":{"prompt_tokens":20,"completion_tokens":7,"total_tokens":27,'
        b'"prompt_tokens_details":{"cached_tokens":3}}}',
        b"data: [DONE]",
    ]
    import re

    body = re.sub(rb"fp_[0-9a-f]{10}", b"fp_7a1e9caf74", await response.read())
    assert body == b"\n\n".join(expected) + b"\n\n"
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"
    assert response.headers["x-request-id"].startswith("req-")


async def test_usage_only_when_asked(serve, chat_body, events):
    client, _ = await serve()
    plain = events(await (await client.post(URL, json=chat_body(stream=True))).text())
    assert all("usage" not in chunk for chunk in plain[:-1])
    assert plain[-1] == "[DONE]"
    options = {"include_usage": True, "continuous_usage_stats": True}
    running = events(await (await client.post(URL, json=chat_body(stream=True, stream_options=options))).text())
    counts = [chunk["usage"]["completion_tokens"] for chunk in running[:-1]]
    assert counts[-1] == 7
    assert counts == sorted(counts)
    assert running[-2]["choices"] == []


async def test_choices_interleave_each_with_role_and_finish(serve, chat_body, events):
    client, _ = await serve()
    chunks = events(await (await client.post(URL, json=chat_body(stream=True, n=3))).text())[:-1]
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == "Hello!"
        assert mine[-1]["delta"] == {}
        assert [c["finish_reason"] for c in mine][-2:] == [None, "stop"]
    order = [c["choices"][0]["index"] for c in chunks]
    assert order[:6] == [0, 1, 2, 0, 1, 2]
    assert len({c["id"] for c in chunks}) == 1


async def test_unicode_passes_whole(serve, chat_body, events):
    reply = ["日本", "👩‍👩‍👧", "e\u0301", '"\\\n\u2028']
    client, _ = await serve(FakeEngine(reply=reply))
    chunks = events(await (await client.post(URL, json=chat_body(stream=True))).text())[:-1]
    assert [c["choices"][0]["delta"].get("content") for c in chunks[1:-1]] == reply


async def test_logprobs_and_token_ids(serve, chat_body, events):
    client, _ = await serve(FakeEngine(reply=["A\xe9"]))
    body = chat_body(stream=True, logprobs=True, top_logprobs=3, return_token_ids=True)
    chunks = events(await (await client.post(URL, json=body)).text())[:-1]
    assert chunks[0]["prompt_token_ids"] == list(b"<user>hi\n<assistant>")
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    first = chunks[1]["choices"][0]
    assert first["token_ids"] == [65, 0xC3, 0xA9]
    entry = first["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("A", [65], -1.5)
    assert [t["token"] for t in entry["top_logprobs"]] == ["B", "A", "C"]
    assert entry["top_logprobs"][2]["logprob"] == -9999.0
    assert first["logprobs"]["content"][1]["bytes"] == [0xC3]
    eos = chunks[2]["choices"][0]  # no text of its own, but its id and log-probability were asked for
    assert (eos["delta"], eos["token_ids"]) == ({"content": ""}, [257])
    assert chunks[3]["choices"][0]["delta"] == {}


async def test_empty_answer_has_role_and_finish(serve, chat_body, events):
    client, _ = await serve(FakeEngine(reply=[]))
    chunks = events(await (await client.post(URL, json=chat_body(stream=True))).text())
    assert [c["choices"][0]["delta"] for c in chunks[:-1]] == [{"role": "assistant", "content": ""}, {}]


async def test_role_first_then_keep_alive_only_after_idle(serve, chat_body, keepers):
    client, engine = await serve(FakeEngine(gate=asyncio.Semaphore(0)))
    asked = asyncio.create_task(client.post(URL, json=chat_body(stream=True)))
    await keepers.look(LOOKS - 1)
    assert not asked.done()
    await keepers.look(1 + 2 * (LOOKS + 1))
    for _ in range(9):
        engine.gate.release()
    body = await (await asked).text()
    frames = body.split("\n\n")
    assert json.loads(frames[0][6:])["choices"][0]["delta"]["role"] == "assistant"
    assert frames.count(": keep-alive") == 2
    assert frames[1:3] == [": keep-alive"] * 2
    assert body.count('"role"') == 1
    assert body.endswith("data: [DONE]\n\n")


async def test_busy_stream_has_no_comments(serve, chat_body, keepers):
    """Longer under way than the interval, in all, but never still for so long."""
    client, engine = await serve(FakeEngine(reply=["x"] * 20, gate=asyncio.Semaphore(0)))
    asked = asyncio.create_task(client.post(URL, json=chat_body(stream=True)))
    await until(lambda: engine.streams)
    for tokens in range(1, 21):
        engine.gate.release()
        await until(lambda tokens=tokens: engine.streams[0].completion_tokens == tokens)
        await turns()
        await keepers.look(LOOKS)
    engine.gate.release()
    body = await (await asked).text()
    assert body.count('"content":"x"') == 20
    assert "keep-alive" not in body


async def test_headers_wait_for_the_first_frame(serve, chat_body):
    client, engine = await serve(FakeEngine(hold_after=0))
    asked = asyncio.ensure_future(client.post(URL, json=chat_body(stream=True)))
    await until(lambda: engine.streams)
    await turns(1000)
    assert not asked.done()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked


@pytest.mark.parametrize("stream", [False, True])
async def test_error_before_first_frame_is_an_http_error(serve, chat_body, envelope, stream):
    client, _ = await serve(FakeEngine(reply=[], finish=FinishReason.ERROR, error="NaN logits"))
    engine_error = await envelope(await client.post(URL, json=chat_body(stream=stream)), 500, code="step_failed")
    assert "NaN logits" in engine_error["message"]


@pytest.mark.parametrize(
    ("engine", "code"),
    [
        (FakeEngine(finish=FinishReason.ERROR, error="NaN logits"), "step_failed"),
        (FakeEngine(finish=FinishReason.ABORT), "not_ready"),
        (FakeEngine(raises=EngineDead("boom")), "engine_dead"),
        (FakeEngine(raises=ValueError("secret detail")), None),
    ],
)
async def test_error_behind_sent_headers_is_a_frame(serve, chat_body, events, engine, code):
    client, _ = await serve(engine)
    response = await client.post(URL, json=chat_body(stream=True))
    assert response.status == 200
    text = await response.text()
    chunks = events(text)
    assert set(chunks[-2]) == {"error"}
    assert set(chunks[-2]["error"]) == {"message", "type", "param", "code"}
    assert chunks[-2]["error"]["code"] == code
    assert chunks[-1] == "[DONE]"
    assert "secret" not in text
    assert not engine.open


async def test_one_write_for_the_end(serve, chat_body, monkeypatch):
    """Finish, usage and [DONE] leave together; each delta is one write."""
    from aiohttp import web

    writes = []
    plain = web.StreamResponse.write

    async def record(self, data):
        writes.append(bytes(data))
        await plain(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", record)
    client, _ = await serve()
    await (await client.post(URL, json=chat_body(stream=True, stream_options={"include_usage": True}))).read()
    assert len(writes) == 4
    assert writes[0].count(b"data: ") == 2  # the role and the first text
    assert writes[-1].count(b"data: ") == 3
