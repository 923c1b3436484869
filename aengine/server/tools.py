"""Tools of a request: what is offered, what must be called, and models whose templates know nothing of them.

Owns: the checks of `tools` and `tool_choice`; how tools and their results are written where the template cannot.
Does not know: parsing, grammars' text, HTTP.
Invariants: a well-formed list of tools is never refused, whatever the model; a fault names tools[i] and its field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aengine.errors import InvalidRequest
from aengine.server.envelope import shorten
from aengine.server.parsers.enforce import Tool
from aengine.server.parsers.formats import HERMES, CallFormat, find_format

_NAMES_TOOLS = re.compile(r"\btools\b")
_INTRODUCTION = (
    "You can call the following functions; each line describes one as JSON.\n{tools}\n\n"
    'To call a function, answer with its name and arguments like this:\n<tool_call>\n{{"name": "the name", '
    '"arguments": {{"argument": "value"}}}}\n</tool_call>'
)


class ToolFields(Protocol):
    """The fields of a body that are about tools."""

    @property
    def tools(self) -> list[dict[str, Any]] | None: ...
    @property
    def tool_choice(self) -> str | dict[str, Any] | None: ...
    @property
    def chat_template(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`offered`: what the model is told of. `forced`: one of them must be called (`one`: exactly one). `format`: how
    its calls are read; None: as text. `written`: the template does not know tools, so the prompt must explain them."""

    offered: tuple[Tool, ...] = ()
    forced: bool = False
    one: bool = False
    format: CallFormat | None = None
    written: bool = False


def tool_use(body: ToolFields, template: str | None, setting: str) -> ToolUse:
    """Raises InvalidRequest for malformed tools or a choice that they do not offer."""
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    mode, names = _choice(body.tool_choice)
    known = {tool.name for tool in tools}
    for name in names or ():
        if name not in known:
            raise InvalidRequest(f"tool_choice names {shorten(name, 64)!r}, which is not in tools", param="tool_choice")
    if mode == "none" or not tools:
        if mode == "required":
            raise InvalidRequest("tool_choice asks for a call, but tools is empty", param="tool_choice")
        return ToolUse()
    forced = mode == "required"
    offered = tuple(tool for tool in tools if names is None or tool.name in names)
    if not offered:
        if forced:
            raise InvalidRequest(
                "tool_choice asks for a call, but allows none of the tools: allowed_tools.tools is empty",
                param="tool_choice",
            )
        return ToolUse()
    template = body.chat_template or template
    format = find_format(setting, template)
    blind = not knows_tools(template)
    if blind and setting == "auto":
        format = None
    if format is None and forced:
        format = HERMES
    named = isinstance(body.tool_choice, dict) and body.tool_choice.get("type") == "function"
    return ToolUse(offered, forced, named, format, blind and format is not None)


def knows_tools(template: str | None) -> bool:
    """Whether a chat template writes tools into the prompt."""
    return template is not None and _NAMES_TOOLS.search(template) is not None


def offered_tools(body: ToolFields) -> list[dict[str, Any]] | None:
    """What the template gets."""
    return body.tools if body.tools and _choice(body.tool_choice)[0] != "none" else None


def _choice(choice: str | dict[str, Any] | None) -> tuple[str, tuple[str, ...] | None]:
    """(mode, the names it is limited to or None)."""
    if choice is None or isinstance(choice, str):
        if choice not in (None, "auto", "none", "required"):
            shown = shorten(str(choice), 40)
            raise InvalidRequest(
                f"tool_choice is {shown!r}, not 'none', 'auto', 'required' or a named function", param="tool_choice"
            )
        return choice or "auto", None
    if choice.get("type") == "function":
        return "required", (_named(choice, "tool_choice"),)
    allowed = choice.get("allowed_tools")
    if choice.get("type") == "allowed_tools" and isinstance(allowed, dict) and isinstance(allowed.get("tools"), list):
        mode = allowed.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise InvalidRequest("tool_choice.allowed_tools.mode is not 'auto' or 'required'", param="tool_choice")
        return mode, tuple(_named(tool, "tool_choice.allowed_tools.tools") for tool in allowed["tools"])
    raise InvalidRequest("tool_choice is no {type: 'function', function: {name}}", param="tool_choice")


def _named(value: object, path: str) -> str:
    """The name in {function: {name}}, or in {name} as the Responses API writes it."""
    if isinstance(value, dict):
        inner = value.get("function", value)
        if isinstance(inner, dict) and isinstance(inner.get("name"), str):
            return str(inner["name"])
    raise InvalidRequest(f"{path} does not name a function", param="tool_choice")


def _tool(tool: dict[str, Any], path: str) -> Tool:
    if tool.get("type") != "function":
        raise InvalidRequest(f"{path}.type is not 'function'", param=f"{path}.type")
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"{path}.function.name is missing", param=f"{path}.function.name")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{path}.function.parameters is no JSON schema", param=f"{path}.function.parameters")
    strict = function.get("strict") is True
    kind = (parameters or {}).get("type", "object")
    if strict and kind != "object":
        raise InvalidRequest(
            f"{path}.function.parameters.type is {shorten(json.dumps(kind), 40)}; arguments are an object, and strict"
            " asks that the schema be followed",
            param=f"{path}.function.parameters.type",
        )
    return Tool(function["name"], parameters or {}, strict)


# ---- prompts of models whose templates know no tools


def written_out(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Calls as text of the assistant, results as text of the user; results in a row are one message."""
    out: list[dict[str, Any]] = []
    answering = False
    for message in messages:
        if message["role"] == "tool" and isinstance(message.get("content"), str):
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if answering:
                out[-1] = {"role": "user", "content": out[-1]["content"] + "\n" + result}
            else:
                out.append({"role": "user", "content": result})
            answering = True
            continue
        answering = False
        out.append(_with_calls(message) if message.get("tool_calls") else dict(message))
    return out


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    texts = [message["content"]] if isinstance(message.get("content"), str) and message["content"] else []
    for call in message["tool_calls"]:
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        texts.append(f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>")
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": "\n".join(texts)}


def introduced(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with an explanation of the tools at the end of the system message."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(tools=lines)
    first = messages[0]
    if first["role"] == "system" and isinstance(first.get("content"), str):
        head = {**first, "content": f"{first['content']}\n\n{text}".lstrip()}
        return [head, *(dict(message) for message in messages[1:])]
    return [{"role": "system", "content": text}, *(dict(message) for message in messages)]
