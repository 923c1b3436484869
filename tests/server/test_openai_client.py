"""The openai Python client against a listening server."""

from __future__ import annotations

import openai
import pytest
from server_fakes import FakeEngine

from aengine.errors import QueueFull
from aengine.types import FinishReason
from tests.waiting import DEADLINE_S, until

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def connect(serve):
    """`client, engine = await connect(engine)`; one attempt unless told otherwise."""
    opened = []

    async def make(engine=None, key="k", retries=0, **settings):
        http, engine = await serve(engine, **settings)
        base = str(http.make_url("/v1"))
        client = openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=retries, timeout=DEADLINE_S)
        opened.append(client)
        return client, engine

    yield make
    for client in opened:
        await client.close()


async def test_chat(connect):
    client, _ = await connect()
    answer = await client.chat.completions.create(
        model="fake-model", messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, max_completion_tokens=50, user="u"
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello!", "Hello!"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    entry = answer.choices[0].logprobs.content[0]
    assert (entry.token, entry.bytes, len(entry.top_logprobs)) == ("H", [72], 2)


async def test_chat_stream(connect):
    client, _ = await connect()
    stream = await client.chat.completions.create(
        model="fake-model", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello!"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == 7
    assert all(c.usage is None for c in chunks[:-1])


async def test_stream_helper_accumulates(connect):
    client, _ = await connect()
    async with client.chat.completions.stream(model="fake-model", messages=MESSAGES, logprobs=True) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == "Hello!"
    assert len(final.choices[0].logprobs.content) == 7


async def test_raw_response_headers(connect):
    client, _ = await connect()
    raw = await client.chat.completions.with_raw_response.create(
        model="fake-model", messages=MESSAGES, extra_headers={"x-request-id": "mine"}, extra_body={"made_up": 1}
    )
    assert raw.headers["x-request-id"] == "mine"
    assert raw.headers["x-aengine-ignored"] == "made_up"
    assert raw.parse()._request_id == "mine"


async def test_completions(connect):
    client, _ = await connect()
    answer = await client.completions.create(model="fake-model", prompt=["a", "b"], echo=True, logprobs=1, max_tokens=1)
    assert [choice.text for choice in answer.choices] == ["<s>aH"[3:], "bH"]
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    stream = await client.completions.create(model="fake-model", prompt="a", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello!"


async def test_models(connect):
    client, _ = await connect()
    assert [model.id async for model in client.models.list()] == ["fake-model", "fake-alias"]
    assert (await client.models.retrieve("fake-alias")).id == "fake-alias"


async def test_typed_errors(connect):
    client, _ = await connect(api_key="right")
    with pytest.raises(openai.AuthenticationError) as caught:
        await client.models.list()
    assert caught.value.code == "invalid_api_key"
    client, engine = await connect()
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="other", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="fake-model", messages=MESSAGES, n=0)
    assert (caught.value.param, caught.value.type) == ("n", "invalid_request_error")
    with pytest.raises(openai.InternalServerError) as caught:
        await client.embeddings.create(model="fake-model", input="x")
    assert caught.value.status_code == 501
    engine.model.max_model_len = 10
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="fake-model", messages=MESSAGES)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.request_id.startswith("req-")


async def test_retries_when_the_queue_is_full(connect):
    full = QueueFull("1024 wait; at most 1024 may", retry_after_s=1)
    client, engine = await connect(FakeEngine(refuses=[full]), retries=1)
    answer = await client.chat.completions.create(model="fake-model", messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello!"
    engine.refuses = [full, full]
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(model="fake-model", messages=MESSAGES)


async def test_error_inside_a_stream(connect):
    client, _ = await connect(FakeEngine(finish=FinishReason.ERROR, error="NaN logits"))
    stream = await client.chat.completions.create(model="fake-model", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="NaN logits"):
        async for _ in stream:
            pass


async def test_closing_a_stream_aborts(connect):
    client, engine = await connect(FakeEngine(hold_after=3))
    stream = await client.chat.completions.create(model="fake-model", messages=MESSAGES, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await until(lambda: engine.aborted)
    assert engine.aborted == [engine.streams[0].request_id]
