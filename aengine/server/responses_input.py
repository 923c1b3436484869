"""`/v1/responses`: from its body to that of a chat.

Owns: items, instructions, the flat forms of tools, tool_choice and text.format; what a stateless server refuses.
Does not know: templates, sampling, the answer.
Invariants: every fault names the field that was sent; hosted tools, which nothing here could run, are named as ignored
and never forced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from aengine.errors import InvalidRequest
from aengine.server.drafts import ChatRequest, Drafts
from aengine.server.envelope import shorten
from aengine.server.responses_schema import InputItem, ResponsesBody
from aengine.server.schemas import ChatBody, ContentPart, SamplingFields

LOGPROBS = "message.output_text.logprobs"
# Fields of a chat body, and what they are called here.
SENT_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_ROLES = ("system", "developer", "user", "assistant")
_CHOICES = ("none", "auto", "required")


def chat_request(body: ResponsesBody) -> ChatRequest:
    """Raises InvalidRequest."""
    _check_stateless(body)
    drafts = Drafts()
    if body.instructions:
        drafts.say("instructions", "system", body.instructions)
    if isinstance(body.input, str):
        drafts.say("input", "user", body.input)
    else:
        for i, item in enumerate(body.input):
            _add(drafts, item, f"input[{i}]")
    tools, schemas, dropped = _tools(body.tools or ())
    choice, offered = _tool_choice(body.tool_choice, tools)
    kept = set(map(id, offered))
    schemas = [place for tool, place in zip(tools, schemas, strict=True) if id(tool) in kept]
    logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    extras: dict[str, Any] = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    extras["response_format"] = _response_format(body)
    chat = ChatBody(
        messages=drafts.messages(),
        model=body.model,
        stream=body.stream,
        tools=offered or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        max_completion_tokens=body.max_output_tokens,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs,
        **extras,
    )
    return ChatRequest(chat, drafts.places, schemas, dropped)


def _check_stateless(body: ResponsesBody) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name):
            raise InvalidRequest(
                f"{name}: this server stores no responses, conversations or prompts; send the whole input", param=name
            )
    if body.background:
        raise InvalidRequest("background: this server stores no responses; stream the answer", param="background")


def _add(drafts: Drafts, item: InputItem, path: str) -> None:
    kind = item.type or "message"
    if kind == "message":
        if item.role not in _ROLES:
            role = shorten(str(item.role), 40)
            raise InvalidRequest(f"{path}.role is {role!r}, not one of {', '.join(_ROLES)}", param=f"{path}.role")
        if item.content is None:
            raise InvalidRequest(f"{path}.content is missing", param=f"{path}.content")
        drafts.say(path, item.role, item.content)
    elif kind == "function_call":
        name = _needed(item.name, f"{path}.name")
        drafts.call(path, _needed(item.call_id, f"{path}.call_id"), name, item.arguments or "{}")
    elif kind == "function_call_output":
        call_id = _needed(item.call_id, f"{path}.call_id")
        if item.output is None:
            raise InvalidRequest(f"{path}.output is missing", param=f"{path}.output")
        drafts.result(path, call_id, item.output)
    elif kind == "reasoning":
        drafts.think(path, _thought(item))
    elif kind == "item_reference":
        raise InvalidRequest(f"{path} refers to a stored item; this server stores none", param=path)
    else:
        raise InvalidRequest(f"{path} is of type {shorten(kind, 40)!r}, which is not known here", param=f"{path}.type")


def _needed(value: str | None, path: str) -> str:
    if not value:
        raise InvalidRequest(f"{path} is missing", param=path)
    return value


def _thought(item: InputItem) -> str:
    """What the model thought, else the summary of it. Encrypted reasoning of another server says nothing here."""
    if isinstance(item.content, str):
        return item.content
    parts: Sequence[ContentPart] = item.content or item.summary or ()
    return "\n".join(part.text for part in parts if part.text)


def _tools(tools: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str], tuple[str, ...]]:
    """Function tools in the chat's form, where their schemas stand, and the hosted ones' names for the header."""
    functions, schemas, dropped = [], [], []
    for i, tool in enumerate(tools):
        kind = tool.get("type")
        if kind != "function":
            if not isinstance(kind, str):
                raise InvalidRequest(f"tools[{i}].type is missing", param=f"tools[{i}].type")
            dropped.append(f"tools.{kind}")
            continue
        inner = tool["function"] if isinstance(tool.get("function"), dict) else tool  # some send the chat's form
        name = inner.get("name")
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"tools[{i}].name is missing", param=f"tools[{i}].name")
        kept = {key: value for key, value in inner.items() if key != "type" and value is not None}
        functions.append({"type": "function", "function": kept})
        schemas.append(f"tools[{i}].{'parameters' if inner is tool else 'function.parameters'}")
    return functions, schemas, tuple(dict.fromkeys(dropped))


def _tool_choice(
    choice: str | dict[str, Any] | None, tools: list[dict[str, Any]]
) -> tuple[str | dict[str, Any] | None, list[dict[str, Any]]]:
    if choice is None or isinstance(choice, str):
        if choice is not None and choice not in _CHOICES:
            shown = shorten(choice, 40)
            raise InvalidRequest(f"tool_choice is {shown!r}, not one of {', '.join(_CHOICES)}", param="tool_choice")
        return choice, tools
    kind = choice.get("type")
    if kind == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}, tools
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        allowed = [tool.get("name") for tool in choice["tools"] if isinstance(tool, dict)]
        mode = choice.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise InvalidRequest("tool_choice.mode is neither 'auto' nor 'required'", param="tool_choice.mode")
        return mode, [tool for tool in tools if tool["function"]["name"] in allowed]
    raise InvalidRequest(
        f"tool_choice: {shorten(msgspec.json.encode(choice).decode(), 80)} cannot be honoured here", param="tool_choice"
    )


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    wanted = None if body.text is None else body.text.format
    if body.response_format is not None:
        if wanted is not None:
            raise InvalidRequest("text.format and response_format are the same thing; send one", param="text.format")
        return body.response_format
    if wanted is None or wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {key: value for key, value in wanted.items() if key != "type"}}
