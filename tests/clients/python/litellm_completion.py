"""litellm as a library: completion, stream, tools, schema, text completion, mapped errors, routes of three dialects."""

from __future__ import annotations

import json

import litellm
from common import BASE, FRUIT, MODEL, TOOL, URL, WEATHER, check, run_checks, valid_weather

litellm.telemetry = False
litellm.suppress_debug_info = True
FIELDS = {"api_base": BASE, "api_key": "any", "num_retries": 0, "temperature": 0, "timeout": 120}


def ask(**fields):
    return litellm.completion(model=f"openai/{MODEL}", messages=FRUIT, **FIELDS, **fields)


@check
def completion_and_stream_agree():
    whole = ask(max_tokens=24)
    chunks = list(ask(max_tokens=24, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == whole.usage.completion_tokens


@check
def hosted_vllm_provider():
    answer = litellm.completion(model=f"hosted_vllm/{MODEL}", messages=FRUIT, max_tokens=8, **FIELDS)
    assert answer.choices[0].message.content


@check
def tools():
    call = ask(max_tokens=200, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    valid_weather(call.function.arguments)


@check
def schema():
    form = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": WEATHER}}
    valid_weather(json.loads(ask(max_tokens=200, response_format=form).choices[0].message.content))


@check
def text_completion():
    prompt = "The capital of France is"
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt=prompt, max_tokens=6, api_base=BASE, api_key="any"
    )
    assert answer.choices[0].text


@check
def responses():
    answer = litellm.responses(
        model=f"openai/{MODEL}", input="Name three fruits.", max_output_tokens=24, api_base=BASE, api_key="any"
    )
    assert answer.output[0].content[0].text


@check
def anthropic_dialect():
    answer = litellm.completion(model=f"anthropic/{MODEL}", messages=FRUIT, max_tokens=16, api_base=URL, api_key="any")
    assert answer.choices[0].message.content


@check
def errors_are_mapped():
    try:
        litellm.completion(model="openai/unknown", messages=FRUIT, **FIELDS)
    except litellm.NotFoundError as error:
        assert MODEL in str(error)  # the message says what is served
    else:
        raise AssertionError("no error")
    try:
        litellm.text_completion(
            model=f"text-completion-openai/{MODEL}", prompt="word " * 20_000, api_base=BASE, api_key="any"
        )
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("no error")


run_checks()
