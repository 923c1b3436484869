"""`/v1/messages`: from its body to that of a chat.

Owns: content blocks, the system prompt, the forms of tools, tool_choice, thinking and output_config.
Does not know: templates, sampling, the answer.
Invariants: every fault names the field that was sent; tools that a server would have to run are named as ignored and
never forced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from aengine.errors import InvalidRequest
from aengine.server.anthropic_schema import (
    ROLES,
    ContentBlock,
    CountBody,
    ImageSource,
    InnerBlock,
    MessagesBody,
    Tool,
    ToolChoice,
    Turn,
)
from aengine.server.drafts import ChatRequest, Drafts
from aengine.server.envelope import shorten
from aengine.server.schemas import ChatBody, ContentPart, SamplingFields

# Fields of a chat body, and what they are called here.
SENT_NAMES = {
    "prompt": "messages",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(body: CountBody) -> ChatRequest:
    """Raises InvalidRequest."""
    drafts = Drafts()
    if body.system:
        drafts.say("system", "system", _inner(body.system, "system"))
    for i, turn in enumerate(body.messages):
        _add(drafts, turn, f"messages[{i}]")
    tools, schemas, dropped = _tools(body.tools or ())
    wishes = body.output_config
    messages = drafts.messages()
    if not messages:
        raise InvalidRequest("messages is empty; at least one message is needed", param="messages")
    chat = ChatBody(
        messages=messages,
        continue_final_message=(messages[-1].role == "assistant" and not messages[-1].tool_calls) or None,
        model=body.model,
        tools=tools or None,
        tool_choice=None if body.tool_choice is None else _tool_choice(body.tool_choice),
        parallel_tool_calls=False if body.tool_choice and body.tool_choice.disable_parallel_tool_use else None,
        chat_template_kwargs=_template_kwargs(body),
        reasoning_effort=None if wishes is None else wishes.effort,
        **_sampling(body),
    )
    return ChatRequest(chat, drafts.places, schemas, dropped)


def _sampling(body: CountBody) -> dict[str, Any]:
    fields = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    if isinstance(body, MessagesBody):
        fields |= {"stream": body.stream, "max_completion_tokens": body.max_tokens}
        if body.stop_sequences is not None:
            fields["stop"] = body.stop_sequences
    if body.output_config is not None and body.output_config.format is not None:
        if body.response_format is not None:
            raise InvalidRequest(
                "output_config.format and response_format are the same thing; send one", param="output_config.format"
            )
        fields["response_format"] = _response_format(body.output_config.format)
    return fields


def _template_kwargs(body: CountBody) -> dict[str, Any] | None:
    """Templates of models that can think call the switch `enable_thinking`; the others do not look."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        kwargs.setdefault("enable_thinking", body.thinking.type != "disabled")
    return kwargs or None


def _add(drafts: Drafts, turn: Turn, path: str) -> None:
    if turn.role not in ROLES:
        role = shorten(turn.role, 40)
        raise InvalidRequest(f"{path}.role is {role!r}, not one of {', '.join(ROLES)}", param=f"{path}.role")
    if isinstance(turn.content, str):
        drafts.say(path, turn.role, turn.content)
        return
    said: list[ContentPart] = []  # neighbouring texts and images are one message
    for i, block in enumerate(turn.content):
        where = f"{path}.content[{i}]"
        if block.type in ("text", "image"):
            said.append(_part(block, where))
            continue
        if said:
            drafts.say(path, turn.role, said)
            said = []
        _other(drafts, turn.role, block, where)
    if said or not turn.content:
        drafts.say(path, turn.role, said or "")


def _other(drafts: Drafts, role: str, block: ContentBlock, path: str) -> None:
    """A block that is neither text nor image."""
    kind, whose = block.type, {"tool_result": "user"}.get(block.type, "assistant")
    if kind not in ("thinking", "redacted_thinking", "tool_use", "tool_result"):
        raise InvalidRequest(f"{path} is of type {shorten(kind, 40)!r}, which is not known here", param=f"{path}.type")
    if role != whose:
        raise InvalidRequest(f"{path}: a {kind} block belongs to the {whose}, not to the {role}", param=path)
    if kind == "thinking":
        drafts.think(path, block.thinking or "")
    elif kind == "tool_use":
        arguments = msgspec.json.encode(block.input or {}).decode()
        drafts.call(path, _needed(block.id, f"{path}.id"), _needed(block.name, f"{path}.name"), arguments)
    elif kind == "tool_result":
        content = _inner(block.content or "", f"{path}.content")
        drafts.result(path, _needed(block.tool_use_id, f"{path}.tool_use_id"), content)


def _inner(content: str | Sequence[InnerBlock], path: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    return [_part(block, f"{path}[{i}]") for i, block in enumerate(content)]


def _part(block: ContentBlock | InnerBlock, path: str) -> ContentPart:
    if block.type == "text":
        return ContentPart(type="text", text=_needed_text(block.text, f"{path}.text"))
    if block.type == "image":
        if block.source is None:
            raise InvalidRequest(f"{path}.source is missing", param=f"{path}.source")
        return ContentPart(type="image_url", image_url=_url(block.source, f"{path}.source"))
    kind = shorten(block.type, 40)
    raise InvalidRequest(f"{path} is of type {kind!r}, which is not known here", param=f"{path}.type")


def _url(source: ImageSource, path: str) -> str:
    if source.type == "url":
        return _needed(source.url, f"{path}.url")
    if source.type == "base64":
        media = _needed(source.media_type, f"{path}.media_type")
        return f"data:{media};base64,{_needed(source.data, f'{path}.data')}"
    raise InvalidRequest(f"{path}.type is neither 'base64' nor 'url'", param=f"{path}.type")


def _needed(value: str | None, path: str) -> str:
    if not value:
        raise InvalidRequest(f"{path} is missing", param=path)
    return value


def _needed_text(value: str | None, path: str) -> str:
    if value is None:
        raise InvalidRequest(f"{path} is missing", param=path)
    return value


def _tools(tools: Sequence[Tool]) -> tuple[list[dict[str, Any]], list[str], tuple[str, ...]]:
    """The client's tools in the chat's form, where their schemas stand, and the other kinds' names for the header."""
    functions: list[dict[str, Any]] = []
    schemas, dropped = [], []
    for i, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            dropped.append(f"tools.{tool.type}")
            continue
        function: dict[str, Any] = {"name": _needed(tool.name, f"tools[{i}].name")}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
        if tool.strict is not None:
            function["strict"] = tool.strict
        functions.append({"type": "function", "function": function})
        schemas.append(f"tools[{i}].input_schema")
    return functions, schemas, tuple(dict.fromkeys(dropped))


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": _needed(choice.name, "tool_choice.name")}}
    if choice.type not in _CHOICES:
        shown = shorten(choice.type, 40)
        raise InvalidRequest(
            f"tool_choice.type is {shown!r}, not one of {', '.join(_CHOICES)}, tool", param="tool_choice.type"
        )
    return _CHOICES[choice.type]


def _response_format(wanted: dict[str, Any]) -> dict[str, Any]:
    if wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
        raise InvalidRequest(
            "output_config.format is not {type: 'json_schema', schema: {…}}", param="output_config.format"
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted["schema"], "strict": True}}
