"""openai-python: every endpoint it has a method for and the server an answer."""

from __future__ import annotations

import time
from enum import StrEnum

import openai
from common import BASE, FRUIT, MODEL, TOOL, WEATHER, check, run_checks, valid_weather
from pydantic import BaseModel

client = openai.OpenAI(base_url=BASE, api_key="any", max_retries=0, timeout=120)


class Unit(StrEnum):
    celsius = "celsius"
    fahrenheit = "fahrenheit"


class Answer(BaseModel):
    unit: Unit
    degrees: int
    sure: bool


@check
def chat_and_stream_agree():
    asked = {"model": MODEL, "messages": FRUIT, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(text) > 10
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.choices[0].finish_reason in ("length", "stop")


@check
def choices_seeds_and_logprobs():
    asked = {"model": MODEL, "messages": FRUIT, "max_tokens": 6, "n": 3, "seed": 7, "temperature": 1.0}
    first, second = (client.chat.completions.create(**asked, logprobs=True, top_logprobs=2) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1
    for choice in first.choices:
        assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


@check
def named_tool():
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(
        model=MODEL, messages=FRUIT, tools=[TOOL], tool_choice=choice, max_tokens=200
    ).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls[0].function.name == "get_weather"
    valid_weather(answer.message.tool_calls[0].function.arguments)


@check
def required_tool_streamed_and_answered():
    messages = [{"role": "user", "content": "The weather in Rome?"}]
    asked = {"model": MODEL, "tools": [TOOL], "temperature": 0}
    with client.chat.completions.stream(
        **asked, messages=messages, tool_choice="required", parallel_tool_calls=False, max_tokens=200
    ) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    call = message.tool_calls[0]
    valid_weather(call.function.arguments)
    arguments = {"name": call.function.name, "arguments": call.function.arguments}
    messages += [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call.id, "type": "function", "function": arguments}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "20 degrees, sunny"},
    ]
    answer = client.chat.completions.create(**asked, messages=messages, max_tokens=16)
    assert answer.usage.completion_tokens > 0


@check
def strict_schema_through_pydantic():
    answer = client.chat.completions.parse(model=MODEL, messages=FRUIT, response_format=Answer, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, Answer)


@check
def schema_that_cannot_be_kept_is_refused():
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(a"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    try:
        client.chat.completions.create(model=MODEL, messages=FRUIT, response_format=form, max_tokens=5)
    except openai.BadRequestError as error:
        assert error.param, error
    else:
        raise AssertionError("accepted")


@check
def responses():
    asked = {"model": MODEL, "input": "Name three fruits.", "max_output_tokens": 24, "temperature": 0}
    whole = client.responses.create(**asked)
    assert len(whole.output_text) > 10
    assert whole.usage.output_tokens > 0
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == sorted(event.sequence_number for event in events)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert final.output_text == whole.output_text


@check
def responses_with_schema_and_tool():
    parsed = client.responses.parse(model=MODEL, input="Name a fruit.", text_format=Answer, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Answer)
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    called = client.responses.create(
        model=MODEL, input="Rome?", tools=[tool], tool_choice="required", max_output_tokens=300
    )
    call = next(item for item in called.output if item.type == "function_call")
    assert call.name == "get_weather"
    valid_weather(call.arguments)


@check
def completions():
    asked = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**asked, logprobs=2)
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
    assert text == whole.choices[0].text
    assert "Paris" in text, text
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens


@check
def models():
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def typed_errors():
    for call, kind in (
        (lambda: client.embeddings.create(model=MODEL, input="x"), openai.InternalServerError),
        (lambda: client.chat.completions.create(model="unknown", messages=FRUIT), openai.NotFoundError),
        (lambda: client.chat.completions.create(model=MODEL, messages=FRUIT, n=0), openai.BadRequestError),
        (lambda: client.completions.create(model=MODEL, prompt="word " * 20_000), openai.BadRequestError),
    ):
        try:
            call()
        except kind as error:
            assert error.request_id.startswith("req-"), error
            assert error.body["message"], error
        else:
            raise AssertionError(f"no {kind.__name__}")


@check
def a_timeout_frees_the_server():
    impatient = client.with_options(timeout=0.5)
    try:
        impatient.completions.create(model=MODEL, prompt="Once", max_tokens=3000, extra_body={"ignore_eos": True})
    except openai.APITimeoutError:
        pass
    else:
        raise AssertionError("no timeout")
    before = time.monotonic()
    client.completions.create(model=MODEL, prompt="Once", max_tokens=2)
    assert time.monotonic() - before < 20


@check
async def async_client_streams_many_at_once():
    import asyncio

    async with openai.AsyncOpenAI(base_url=BASE, api_key="any", max_retries=0, timeout=120) as many:

        async def one(limit):
            stream = await many.chat.completions.create(
                model=MODEL, messages=FRUIT, max_tokens=limit, stream=True, extra_body={"ignore_eos": True}
            )
            return [chunk.choices[0].finish_reason async for chunk in stream][-1]

        assert await asyncio.gather(*(one(4 + i) for i in range(8))) == ["length"] * 8


run_checks()
