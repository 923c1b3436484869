"""The request bodies of `/v1/messages` and its count_tokens.

Owns: field names and types.
Does not know: what they mean (anthropic_input.py).
Invariants: as in schemas.py. A content block is one struct with the fields of all kinds; a kind that is not known here
is refused by its type.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from aengine.server.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP_STRINGS,
    MAX_TOOLS,
    NonEmpty,
    SamplingFields,
    Tokens,
    told,
)

ROLES = ("user", "assistant", "system")


class ImageSource(msgspec.Struct, frozen=True, kw_only=True):
    """`base64` with its media type, or `url`."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class InnerBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block of a tool's result, or of the system prompt."""

    type: str
    text: str | None = None
    source: ImageSource | None = None


class ContentBlock(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None
    source: ImageSource | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[InnerBlock], msgspec.Meta(max_length=MAX_PARTS)] | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    role: Annotated[str, told(enum=ROLES)]
    content: str | Annotated[list[ContentBlock], msgspec.Meta(max_length=MAX_PARTS)]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """`type` is absent or `custom` for the client's own tools."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """auto, any, tool (with its name) or none."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """enabled, adaptive or disabled."""

    type: str
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    format: dict[str, Any] | None = None
    effort: str | None = None


class CountBody(SamplingFields, frozen=True, kw_only=True):
    """`/v1/messages/count_tokens`, which takes what a message may have."""

    messages: Annotated[list[Turn], msgspec.Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})]
    model: str | None = None
    system: str | Annotated[list[InnerBlock], msgspec.Meta(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """`/v1/messages`."""

    max_tokens: Tokens
    stop_sequences: Annotated[list[NonEmpty], told(maxItems=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
