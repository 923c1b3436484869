"""AsyncClient against a server in the same process: what it yields is what the engine itself yields."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from aengine import AsyncClient, AsyncEngine, RequestOutput, SamplingParams, errors
from aengine.client.events import EventReader
from aengine.client.wire import data_url, messages_of, prompt_of, sampling_body
from aengine.config import ServerConfig
from aengine.errors import (
    AengineError,
    AuthenticationFailed,
    ContextLengthExceeded,
    InvalidRequest,
    NotReady,
    QueueFull,
    ServerUnreachable,
    error_from_wire,
)
from aengine.server import create_app
from aengine.types import FinishReason, Grammar
from tests.e2e.conftest import config
from tests.waiting import until

TEXT = "The three primary colours are"
MESSAGES = [{"role": "user", "content": "Name two rivers."}]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@contextlib.asynccontextmanager
async def both() -> AsyncIterator[tuple[AsyncEngine, AsyncClient]]:
    async with AsyncEngine(config(kv_bytes=100 * 2**20, max_num_seqs=8, max_model_len=256)) as engine:
        server = TestServer(create_app(engine, ServerConfig()))
        await server.start_server()
        try:
            async with AsyncClient(str(server.make_url("/"))) as client:
                yield engine, client
        finally:
            await server.close()


async def all_of(outputs: Any) -> list[RequestOutput]:
    return [output async for output in outputs]


def comparable(output: RequestOutput) -> dict[str, Any]:
    """Everything but names and times; cached tokens differ because the other run warmed the cache."""
    return msgspec.to_builtins(
        msgspec.structs.replace(output, request_id="", num_cached_tokens=0, ttft_s=None, e2e_s=None)
    )


SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(seed=2**63 + 7, temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, max_tokens=6),
    "choices": SamplingParams(n=3, seed=5, temperature=1.3, max_tokens=4),
    "logprobs": SamplingParams(temperature=0, max_tokens=4, logprobs=3),
    "chosen logprob only": SamplingParams(seed=1, temperature=1.5, max_tokens=3, logprobs=0),
    "prompt logprobs": SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2),
    "rules": SamplingParams(
        seed=3,
        max_tokens=8,
        min_tokens=2,
        stop=(" and",),
        include_stop_str_in_output=True,
        presence_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias={260: 3.0},
        bad_words=("red",),
        ignore_eos=True,
    ),
    "allowed": SamplingParams(seed=9, max_tokens=4, allowed_token_ids=(260, 261, 262), skip_special_tokens=False),
    "whole context": SamplingParams(temperature=0, max_tokens=None, stop=(".",)),
}


async def test_it_yields_what_the_engine_yields() -> None:
    async with both() as (engine, client):
        ids = await client.encode(TEXT)
        assert await client.decode(ids) == TEXT
        for name, sampling in SAMPLINGS.items():
            here = await all_of(engine.generate(TEXT, sampling))
            there = await all_of(client.generate(TEXT, sampling))
            assert comparable(there[-1]) == comparable(here[-1]), name
            assert [output.finished for output in there] == [False] * (len(there) - 1) + [True], name
        for prompt in (ids, {"prompt_token_ids": ids}, {"prompt": TEXT}):
            last = (await all_of(client.generate(prompt, GREEDY)))[-1]
            assert last.outputs[0].token_ids == (await all_of(engine.generate(prompt, GREEDY)))[-1].outputs[0].token_ids

        for sampling in (GREEDY, SAMPLINGS["logprobs"], SAMPLINGS["choices"]):
            here = await all_of(engine.chat(MESSAGES, sampling))
            there = await all_of(client.chat(MESSAGES, sampling))
            assert comparable(there[-1]) == comparable(here[-1])
            assert comparable((await all_of(client.generate(MESSAGES, sampling)))[-1]) == comparable(here[-1])
        again = (await all_of(client.chat(MESSAGES, GREEDY)))[-1]
        assert again.num_cached_tokens > 0
        assert 0 < (again.ttft_s or 0) <= (again.e2e_s or 0)

        await errors_are_the_engines_own(client)
        await leaving_the_loop_and_aborting_end_the_request(engine, client)


async def errors_are_the_engines_own(client: AsyncClient) -> None:
    with pytest.raises(ContextLengthExceeded) as raised:
        await all_of(client.generate([5] * 3000, GREEDY))
    assert "3000" in str(raised.value) or "3,000" in str(raised.value)
    with pytest.raises(InvalidRequest):
        await all_of(client.generate([10**9], GREEDY))
    with pytest.raises(InvalidRequest):
        await all_of(client.generate({"prompt": TEXT, "images": [b""]}, GREEDY))
    with pytest.raises(InvalidRequest):
        await all_of(client.generate(["two", "texts"], GREEDY))  # type: ignore[arg-type]


async def leaving_the_loop_and_aborting_end_the_request(engine: AsyncEngine, client: AsyncClient) -> None:
    endless = SamplingParams(max_tokens=200, ignore_eos=True)
    async with contextlib.aclosing(client.generate(TEXT, endless)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            assert not output.finished
            break
    await idle(engine)

    reached = []
    async for output in client.generate(TEXT, endless, request_id="mine"):
        reached.append(output)
        if len(reached) == 2:
            assert client.abort("mine")
            assert not client.abort("mine")
    assert reached[-1].outputs[0].finish_reason is FinishReason.ABORT
    assert not client.abort("mine")
    await idle(engine)


async def idle(engine: AsyncEngine) -> None:
    await until(lambda: not engine.stats().running)


# ---- servers that misbehave


@contextlib.asynccontextmanager
async def scripted(answer: Any, **settings: Any) -> AsyncIterator[AsyncClient]:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", answer), web.get("/odd/{_:.*}", answer)])
    app.add_routes([web.post("/odd/{_:.*}", answer)])
    server = TestServer(app)
    await server.start_server()
    try:
        async with AsyncClient(str(server.make_url("/")) + "v1", **settings) as client:
            yield client
    finally:
        await server.close()


async def test_a_busy_server_is_asked_again_only_when_that_was_wanted() -> None:
    calls = []

    async def answer(request: web.Request) -> web.Response:
        calls.append(request)
        if len(calls) < 3:
            error = {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}
            return web.json_response({"error": error}, status=429, headers={"Retry-After": "0"})
        return web.Response(
            text='data: {"choices":[{"text":"hi","finish_reason":"stop","token_ids":[1]}]}\n\ndata: [DONE]\n\n',
            content_type="text/event-stream",
        )

    async with scripted(answer) as client:
        with pytest.raises(QueueFull) as raised:
            await all_of(client.generate("x"))
        assert raised.value.retry_after_s == 0
    calls.clear()
    async with scripted(answer, retries=2) as client:
        assert (await all_of(client.generate("x")))[-1].outputs[0].text == "hi"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('data: {"choices":[{"index":0,"text":"hi"}]}\n\n', ServerUnreachable),  # ends before its end
        ('data: {"choices":[{"index":0,"text":"hi"}]}\n\ndata: [DONE]\n\n', ServerUnreachable),
        ("data: {not json}\n\n", ServerUnreachable),
        ('data: {"error":{"message":"it broke","code":"step_failed"}}\n\ndata: [DONE]\n\n', AengineError),
        ('data: {"choices":[{"index":4,"text":"hi"}]}\n\n', AengineError),
    ],
)
async def test_a_broken_answer_is_a_typed_error(text: str, error: type[Exception]) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=text, content_type="text/event-stream")

    async with scripted(answer) as client:
        with pytest.raises(error):
            await all_of(client.generate("x"))


@pytest.mark.parametrize("body", ["<html>", "[1]", '{"data": null}', '{"data": [{}]}', "", '{"prompt": 3}'])
async def test_what_is_no_answer_is_a_typed_error(body: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=body, content_type="text/html")

    async with scripted(answer) as client:
        for asked in (client.models(), client.encode("a"), client.decode([1])):
            client.base_url += "/odd"
            with pytest.raises(ServerUnreachable, match="answered with text/html that is not as expected"):
                await asked
        with pytest.raises(ServerUnreachable, match=r"not as expected|before its end"):
            await all_of(client.generate("a", SamplingParams(prompt_logprobs=0, max_tokens=1)))


async def test_aborting_before_the_first_byte() -> None:
    arrived = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal arrived
        arrived += 1
        await asyncio.sleep(3600)
        raise AssertionError("the client should have left")

    async with scripted(answer) as client:
        early = asyncio.create_task(all_of(client.generate("x", request_id="early")))
        await until(lambda: arrived == 1)
        client.abort("early")
        outputs = await early
        assert [output.outputs[0].finish_reason for output in outputs] == [FinishReason.ABORT]
        task = asyncio.create_task(all_of(client.generate("x")))
        await until(lambda: arrived == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_no_server_and_no_start() -> None:
    client = AsyncClient("http://127.0.0.1:9", ready_s=0)
    with pytest.raises(ServerUnreachable):
        await client.start()
    await client.close()
    with pytest.raises(NotReady):
        await all_of(AsyncClient().generate("x"))


# ---- the wire


def test_errors_by_code_then_by_status() -> None:
    def kind(status: int, **error: Any) -> type[AengineError]:
        return type(error_from_wire(status, error))

    assert kind(400, code="context_length_exceeded") is ContextLengthExceeded
    assert kind(401) is AuthenticationFailed
    for made in {one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, AengineError)}:
        if made.code is not None:
            assert kind(made.status, code=made.code, message="x") is made
    assert kind(400, code="something_new") is InvalidRequest
    assert kind(422) is InvalidRequest
    assert kind(599) is AengineError
    error = error_from_wire(400, {"message": "n is 0", "param": "n"})
    assert (error.message, error.param) == ("n is 0", "n")


def test_only_what_differs_is_sent() -> None:
    assert sampling_body(SamplingParams()) == {"temperature": 1.0, "max_tokens": 16}
    body = sampling_body(SamplingParams(stop=("a",), logit_bias={3: 1.0}, grammar=Grammar("regex", "a+")))
    assert body["stop"] == ("a",)
    assert body["logit_bias"] == {"3": 1.0}
    assert body["structured_outputs"] == {"regex": "a+"}
    assert sampling_body(SamplingParams(grammar=Grammar("json_schema", '{"type":"object"}')))["structured_outputs"] == {
        "json": {"type": "object"}
    }


def test_images_travel_as_data_urls() -> None:
    png = b"\x89PNG rest"
    messages = messages_of({"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": [png]})
    assert messages is not None
    assert messages[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert data_url("data:image/png;base64,AA==") == "data:image/png;base64,AA=="
    with pytest.raises(InvalidRequest):
        messages_of({"messages": [{"role": "user", "content": "no place"}], "images": [png]})
    with pytest.raises(InvalidRequest):
        data_url(7)
    assert messages_of("text") is None
    assert prompt_of([1, 2]) == [1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_whatever_the_chunks(size: int) -> None:
    stream = b": comment\n\ndata: one\n\nevent: x\ndata:two\ndata: three\n\nid: 4\n\ndata: cut"
    reader = EventReader()
    found = [event for i in range(0, len(stream), size) for event in reader.feed(stream[i : i + size])]
    assert found == [b"one", b"two\nthree"]
    crlf = EventReader()
    assert list(crlf.feed(stream.replace(b"\n", b"\r\n"))) == found
