"""LangChain's ChatOpenAI: invoke, stream, structured output by three methods, tools, the Responses API."""

from __future__ import annotations

from typing import Literal

from common import BASE, MODEL, check, run_checks
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """An answer."""

    unit: Literal["celsius", "fahrenheit"]
    degrees: int


@tool
def get_weather(city: Literal["Rome", "Paris"]) -> str:
    """The weather in a city."""
    return "sunny"


def chat(**fields):
    return ChatOpenAI(base_url=BASE, api_key="any", model=MODEL, temperature=0, max_retries=0, timeout=120, **fields)


@check
def invoke_and_stream_agree():
    model = chat(max_tokens=24, stream_usage=True)
    whole = model.invoke([("system", "Be brief."), ("human", "Name three fruits.")])
    chunks = list(model.stream([("system", "Be brief."), ("human", "Name three fruits.")]))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


@check
def structured_output():
    for method in ("json_schema", "function_calling"):
        answer = (
            chat(max_tokens=200).with_structured_output(Answer, method=method, strict=True).invoke("How warm is Rome?")
        )
        assert isinstance(answer, Answer), (method, answer)


@check
def tools():
    bound = chat(max_tokens=200).bind_tools([get_weather], tool_choice="get_weather")
    call = bound.invoke("The weather in Rome?").tool_calls[0]
    assert call["name"] == "get_weather"
    assert call["args"]["city"] in ("Rome", "Paris")
    streamed = None
    for chunk in bound.stream("The weather in Rome?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == call["args"]
    history = [
        HumanMessage("The weather in Rome?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]),
    ]
    assert chat(max_tokens=8).bind_tools([get_weather]).invoke(history).usage_metadata["output_tokens"] > 0


@check
def batch():
    answers = chat(max_tokens=8).batch(["Name a fruit.", "Name a city.", "Name a fruit."])
    assert answers[0].content == answers[2].content


@check
def responses_api():
    model = chat(max_tokens=24, use_responses_api=True)
    whole = model.invoke("Name three fruits.")
    streamed = "".join(chunk.text for chunk in model.stream("Name three fruits."))
    assert whole.text == streamed
    assert len(streamed) > 10


run_checks()
