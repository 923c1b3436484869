"""Chat templates: messages to prompt text.

Owns: the Jinja environment templates run in, message normalisation, the fallback for models without a template.
Does not know: tokenisation, HTTP.
Invariants: templates come from strangers, so they run in an immutable sandbox on plain JSON values only. Every failure
of a template is an InvalidRequest, never a crash. The caller's messages are not changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aengine.errors import InvalidRequest

Message = Mapping[str, Any]

# "System: ..", "User: .." paragraphs, then "Assistant:". A base model was not trained on any of it, but continues it.
FALLBACK_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}{{ '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
FALLBACK_STOPS = ("\nUser:",)  # where a base model would go on with the next turn by itself
TEXT_PARTS = ("text", "input_text", "output_text")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
MAX_COMPILED = 16  # a request may bring a template of its own; more than a few differ only in an attack
# Survives every template and occurs in no text. The blank at its end tells whether the template trims content.
CONTINUE_MARK = "\x02CONTINUE-HERE\x03 "


class _Generation(jinja2.ext.Extension):
    """`{% generation %} .. {% endgeneration %}` marks assistant text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares a plain set)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict(..)` in a template, without access to the class itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML; templates were written for plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_Dict(),
    )
    return environment


class Template:
    """A compiled chat template. `takes_parts`: it loops over message content, so it gets lists of parts as they are."""

    def __init__(self, environment: ImmutableSandboxedEnvironment, source: str) -> None:
        try:
            self._template = environment.from_string(source)
            self.takes_parts = _loops_over_content(environment.parse(source))
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"chat template does not compile: {error}", param="chat_template") from error

    def render(self, values: Mapping[str, Any]) -> str:
        """Raises InvalidRequest(param="messages") with the template's own message when it refuses or fails."""
        try:
            return self._template.render(values)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"chat template: {error.message}", param="messages") from error
        except Exception as error:  # a template is foreign code and may raise anything
            message = f"chat template failed on these messages: {type(error).__name__}: {error}"
            raise InvalidRequest(message, param="messages") from error


class ChatRenderer:
    """Renders conversations. `variables` are what every template may use (bos_token, eos_token ..)."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)
        environment = _environment()
        self._compile: Callable[[str], Template] = lru_cache(maxsize=MAX_COMPILED)(
            lambda source: Template(environment, source)
        )

    def render(
        self,
        source: str,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        extra: Mapping[str, Any],
    ) -> str:
        """The prompt text. Raises InvalidRequest for messages the template (or any template) cannot take."""
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        template = self._compile(source)
        chat = normalise(messages, template.takes_parts)
        if continue_final_message:
            _mark_end(chat[-1])
        values = {**self._variables, **_plain(dict(extra), "chat_template_kwargs")}
        values.update(
            messages=chat,
            tools=None if tools is None else _plain(list(tools), "tools"),
            documents=values.get("documents"),
            add_generation_prompt=add_generation_prompt,
        )
        text = template.render(values)
        return _cut_at_mark(text) if continue_final_message else text


def normalise(messages: Sequence[Message], takes_parts: bool) -> list[dict[str, Any]]:
    """Copies of the messages in the form templates expect.

    Keys that are null are dropped, reasoning stands under both its usual names, arguments of tool calls become objects
    and, unless the template takes parts, content that is a list of text parts becomes one string.
    """
    if not messages:
        raise InvalidRequest("messages is empty: at least one is needed", param="messages")
    return [_message(message, takes_parts, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Message, takes_parts: bool, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} is a {type(message).__name__}, not an object", param="messages")
    out = {key: _plain(value, where) for key, value in message.items() if value is not None}
    if not isinstance(out.get("role"), str):
        raise InvalidRequest(f"{where} has no role", param="messages")
    content = out.get("content")
    if isinstance(content, list):
        out["content"] = content if takes_parts else _join_parts(content, where)
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest(f"{where}.content is a {type(content).__name__}, not text or parts", param="messages")
    if "tool_calls" in out:
        out["tool_calls"] = [_tool_call(call) for call in out["tool_calls"]]
    reasoning = next((out[key] for key in REASONING_KEYS if key in out), None)
    return out if reasoning is None else {"thinking": reasoning, **out, "reasoning_content": reasoning}


def _join_parts(parts: list[Any], where: str) -> str:
    texts = []
    for part in parts:
        if isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, str):
            texts.append(part)
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidRequest(f"{where} has a part of type {kind!r}: this model takes text only", param="messages")
    return "\n".join(texts)


def _tool_call(call: Any) -> Any:
    """Clients send arguments as JSON text, templates want the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _plain(value: Any, where: str) -> Any:
    """A copy made of JSON types only: other objects could have methods a sandbox does not know to be dangerous."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if isinstance(value, str):  # an enum or other subclass: strip it to the text
        return str.__str__(value)
    param = where.split("[")[0]
    raise InvalidRequest(f"{where} holds a {type(value).__name__}, which is not a JSON value", param=param)


def _mark_end(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + CONTINUE_MARK
        return
    for part in reversed(content or []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += CONTINUE_MARK
            return
    raise InvalidRequest("continue_final_message: the last message has no text to continue", param="messages")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(CONTINUE_MARK.strip())
    if at < 0:
        raise InvalidRequest("continue_final_message: the template drops the last message's text", param="messages")
    return text[:at] if text.startswith(CONTINUE_MARK, at) else text[:at].rstrip()


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether some loop runs over a message's content, directly or through a variable set from it."""
    aliases = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node)
    }
    return any(
        _is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in aliases)
        for loop in tree.find_all(nodes.For)
    )


def _is_content(node: nodes.Node) -> bool:
    """`x.content` or `x['content']`, with any filters after it."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
