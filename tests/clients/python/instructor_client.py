"""instructor: typed answers by tools, by strict schema and by JSON mode; partial objects while streaming."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from common import BASE, FRUIT, MODEL, check, run_checks
from pydantic import BaseModel


class Answer(BaseModel, extra="forbid"):
    kind: Literal["cat", "dog"]
    age: Literal[1, 2, 3]  # a weak model writes digits for ever
    old: bool


def client(mode):
    return instructor.from_openai(openai.OpenAI(base_url=BASE, api_key="any", timeout=120), mode=mode)


def ask(mode):
    answer = client(mode).chat.completions.create(
        model=MODEL, messages=FRUIT, response_model=Answer, max_retries=0, max_tokens=200
    )
    assert isinstance(answer, Answer)


@check
def by_tools():
    ask(instructor.Mode.TOOLS)


@check
def by_strict_tools():
    ask(instructor.Mode.TOOLS_STRICT)


@check
def by_json_schema():
    ask(instructor.Mode.JSON_SCHEMA)


@check
def partial_objects():
    stream = client(instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(
        model=MODEL, messages=FRUIT, response_model=Answer, max_retries=0, max_tokens=200
    )
    parts = list(stream)
    assert len(parts) > 1
    assert parts[-1].kind in ("cat", "dog")
    assert parts[-1].old in (True, False)


run_checks()
