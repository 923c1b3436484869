"""anthropic-python against /v1/messages."""

from __future__ import annotations

import anthropic
from common import FRUIT, MODEL, URL, WEATHER, check, run_checks, valid_weather

client = anthropic.Anthropic(base_url=URL, api_key="any", max_retries=0, timeout=120)
TOOL = {"name": "get_weather", "description": "The weather in a city.", "input_schema": WEATHER}


@check
def message_and_stream_agree():
    asked = {"model": MODEL, "max_tokens": 24, "messages": FRUIT, "system": "Be brief."}
    whole = client.messages.create(**asked, extra_body={"temperature": 0})
    with client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].text == text
    assert len(text) > 10
    assert final.usage.output_tokens == whole.usage.output_tokens > 0
    assert whole.stop_reason == final.stop_reason in ("max_tokens", "end_turn")


@check
def count_tokens():
    counted = client.messages.count_tokens(model=MODEL, messages=FRUIT).input_tokens
    used = client.messages.create(model=MODEL, max_tokens=1, messages=FRUIT).usage
    assert counted == used.input_tokens + (used.cache_read_input_tokens or 0)


@check
def tool_streamed_and_answered():
    messages = [{"role": "user", "content": "The weather in Rome?"}]
    choice = {"type": "tool", "name": "get_weather"}
    asked = {"model": MODEL, "max_tokens": 200, "tools": [TOOL]}
    with client.messages.stream(**asked, messages=messages, tool_choice=choice) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    assert "input_json" in kinds
    assert message.stop_reason == "tool_use"
    call = next(block for block in message.content if block.type == "tool_use")
    valid_weather(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "20 degrees"}
    messages += [
        {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**(asked | {"max_tokens": 16}), messages=messages)
    assert answer.usage.output_tokens > 0


@check
def typed_errors():
    for fields, kind in (
        ({"model": "unknown"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**({"model": MODEL, "max_tokens": 5, "messages": FRUIT} | fields))
        except kind as error:
            assert error.body["type"] == "error", error.body
            assert error.body["error"]["message"], error.body
        else:
            raise AssertionError(f"no {kind.__name__}")


run_checks()
