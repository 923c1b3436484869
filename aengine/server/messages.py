"""Chat messages: from the wire to what a chat template takes.

Owns: roles, content forms and their checks; the arguments of a template call.
Does not know: templates themselves, token ids, sampling.
Invariants: templates get plain dicts with string content, or with text and image parts where there are images; a fault
names messages[i] and its field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

import msgspec

from aengine.errors import InvalidRequest
from aengine.server.envelope import shorten
from aengine.server.schemas import ROLES, ContentPart, Message, ToolCall
from aengine.server.tools import introduced, knows_tools, offered_tools, tool_use, written_out

_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image_url", "input_image")
_RESERVED = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"))


class Templated(Protocol):
    """The fields of a body that say how its messages become a prompt."""

    @property
    def messages(self) -> list[Message] | None: ...
    @property
    def tools(self) -> list[dict[str, Any]] | None: ...
    @property
    def tool_choice(self) -> str | dict[str, Any] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...


class TemplateCall(TypedDict):
    """The keyword arguments of `Text.render_chat` and `Text.encode_chat`."""

    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    kwargs: dict[str, Any] | None


def template_messages(messages: Sequence[Message] | None, images: list[str] | None = None) -> list[dict[str, Any]]:
    """Checked messages as dicts; raises InvalidRequest. The data: URLs of image parts are appended to `images`; None:
    the model takes text only."""
    if not messages:
        raise InvalidRequest("messages is empty; at least one message is needed", param="messages")
    return [_message(message, f"messages[{i}]", images) for i, message in enumerate(messages)]


def template_call(body: Templated) -> TemplateCall:
    """Everything beside the messages that a template takes; raises InvalidRequest."""
    proceed = bool(body.continue_final_message)
    if proceed and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    if proceed and body.messages and body.messages[-1].role != "assistant":
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant", param="continue_final_message"
        )
    tool_use(body, None, "none")  # raises for what is malformed
    generate = not proceed if body.add_generation_prompt is None else body.add_generation_prompt
    return TemplateCall(
        tools=offered_tools(body),
        add_generation_prompt=generate,
        continue_final_message=proceed,
        chat_template=body.chat_template,
        kwargs=_template_kwargs(body),
    )


def conversation(
    body: Templated, template: str | None, images: list[str] | None = None, *, tool_parser: str = "auto"
) -> tuple[list[dict[str, Any]], TemplateCall]:
    """Messages and call for the chat template `template`; raises InvalidRequest.

    A template that knows no tools gets earlier calls and their results as text, and, where calls will be read or must
    be made, an explanation of the tools in the system message."""
    messages, call = template_messages(body.messages, images), template_call(body)
    if knows_tools(body.chat_template or template):
        return messages, call
    messages = written_out(messages)
    if call["tools"] and tool_use(body, template, tool_parser).written:
        messages = introduced(messages, call["tools"])
    return messages, call


def _template_kwargs(body: Templated) -> dict[str, Any] | None:
    kwargs = dict(body.chat_template_kwargs or {})
    if taken := _RESERVED.intersection(kwargs):
        raise InvalidRequest(
            f"chat_template_kwargs: {min(taken)!r} is a field of its own", param="chat_template_kwargs"
        )
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return kwargs or None


def _message(message: Message, path: str, images: list[str] | None) -> dict[str, Any]:
    if message.role not in ROLES:
        role = shorten(message.role, 40)
        raise InvalidRequest(f"{path}.role is {role!r}, not one of {', '.join(ROLES)}", param=f"{path}.role")
    # Templates know "system"; "developer" is OpenAI's later name of the same role.
    role = "system" if message.role == "developer" else message.role
    out: dict[str, Any] = {"role": role, "content": _content(message, path, images)}
    if message.tool_calls:
        out["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            out[name] = value
    thought = message.reasoning_content or message.reasoning
    if thought:
        out["reasoning_content"] = out["reasoning"] = thought
    return out


def _content(message: Message, path: str, images: list[str] | None) -> str | list[dict[str, str]]:
    """One string; or, where a part is an image, the parts."""
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role != "assistant":  # an assistant that only called tools has none
            raise InvalidRequest(f"{path}.content is missing", param=f"{path}.content")
        return ""
    if images is not None and any(part.type in _IMAGE_PARTS for part in content):
        return [_part(part, f"{path}.content[{i}]", images) for i, part in enumerate(content)]
    return "\n".join(_text(part, f"{path}.content[{i}]") for i, part in enumerate(content))


def _part(part: ContentPart, path: str, images: list[str]) -> dict[str, str]:
    if part.type not in _IMAGE_PARTS:
        return {"type": "text", "text": _text(part, path)}
    url = part.image_url if isinstance(part.image_url, str | None) else part.image_url.url
    if url is None:
        raise InvalidRequest(f"{path}.image_url is missing", param=f"{path}.image_url")
    if url[:5].lower() != "data:":
        raise InvalidRequest(
            f"{path}.image_url {shorten(url, 60)!r} is no data: URL; nothing is fetched here, so send the image itself",
            param=f"{path}.image_url",
        )
    images.append(url)
    return {"type": "image"}


def _text(part: ContentPart, path: str) -> str:
    if part.type == "refusal":
        return part.text or ""
    if part.type not in _TEXT_PARTS:
        kind = shorten(part.type, 40)
        raise InvalidRequest(f"{path} is of type {kind!r}; this model takes text only", param=path)
    if part.text is None:
        raise InvalidRequest(f"{path}.text is missing", param=f"{path}.text")
    return part.text


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function: dict[str, Any] = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": call.type or "function", "function": function}


def _arguments(arguments: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """Templates iterate over arguments as an object; the wire has them as JSON text. Broken text passes as text."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        decoded = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return decoded if isinstance(decoded, dict) else arguments
