"""pydantic-ai: an agent's typed output by tool call and by native schema, its text stream, a tool's round trip."""

from __future__ import annotations

from typing import Literal

from common import BASE, MODEL, check, run_checks
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=BASE, api_key="any")
model = OpenAIChatModel(MODEL, provider=provider)
LIMIT = {"max_tokens": 200, "temperature": 0.0}


class Answer(BaseModel):
    kind: Literal["cat", "dog"]
    old: bool


@check
async def typed_output_by_tool():
    result = await Agent(model, output_type=Answer, model_settings=LIMIT).run("A pet, please.")
    assert isinstance(result.output, Answer)
    assert result.all_messages()[-2].parts[-1].part_kind == "tool-call"


@check
async def typed_output_by_schema():
    result = await Agent(model, output_type=NativeOutput(Answer), model_settings=LIMIT).run("A pet, please.")
    assert isinstance(result.output, Answer)


@check
async def text_streams():
    agent = Agent(model, model_settings=LIMIT | {"max_tokens": 24}, instructions="Be brief.")
    whole = (await agent.run("Name three fruits.")).output
    async with agent.run_stream("Name three fruits.") as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == whole
    assert len(pieces) > 1


@check
async def a_tool_offered_is_no_fault():
    """The model decides whether to call; whatever it does, the run ends with an answer."""
    agent = Agent(model, model_settings=LIMIT | {"max_tokens": 32})

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return "sunny"

    result = await agent.run("Say hello.")
    assert isinstance(result.output, str)


@check
async def responses_model():
    agent = Agent(OpenAIResponsesModel(MODEL, provider=provider), model_settings=LIMIT | {"max_tokens": 24})
    assert len((await agent.run("Name three fruits.")).output) > 10


run_checks()
