"""The request body of `/v1/responses`.

Owns: field names and types.
Does not know: what they mean (responses_input.py).
Invariants: as in schemas.py. An item of the input is one struct with the fields of all kinds; a kind that is not known
here is refused by its type, whatever its other fields are.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from aengine.server.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    ContentPart,
    Logprobs,
    SamplingFields,
    Tokens,
    ToolList,
    told,
)

PartList = Annotated[list[ContentPart], msgspec.Meta(max_length=MAX_PARTS)]


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """A message (`type` may be absent), a function call, its output, or reasoning."""

    type: str | None = None
    role: str | None = None
    content: str | PartList | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | PartList | None = None
    summary: PartList | None = None


InputList = Annotated[list[InputItem], msgspec.Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})]


class ResponseText(msgspec.Struct, frozen=True, kw_only=True):
    """`format`: text, json_object or json_schema."""

    format: dict[str, Any] | None = None


class ReasoningWish(msgspec.Struct, frozen=True, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class ResponsesBody(SamplingFields, frozen=True, kw_only=True):
    """`/v1/responses`. The fields about stored responses are here to be refused."""

    input: str | InputList
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    tools: ToolList | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: ReasoningWish | None = None
    include: list[str] | None = None
    top_logprobs: Logprobs | None = None
    stream: bool | None = None
    store: bool | None = None
    background: Annotated[bool, told(const=False)] | None = None
    previous_response_id: Annotated[str, told(maxLength=0)] | None = None
    conversation: Annotated[str, told(maxLength=0)] | Annotated[dict[str, Any], told(maxProperties=0)] | None = None
    prompt: Annotated[dict[str, Any], told(maxProperties=0)] | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
