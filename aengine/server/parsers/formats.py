"""The formats of tool calls.

Owns: per format its marks, its reader, how a call is written in a grammar; which format a chat template uses.
Does not know: HTTP, pieces.
Invariants: what a format's grammar admits, its reader reads as calls and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aengine.server.parsers.calls import JsonSchema
from aengine.server.parsers.readers import CallReader, EitherReader, JsonReader, NamedReader, TagReader

Schemas = Mapping[str, JsonSchema]


@dataclass(frozen=True, slots=True)
class Shape:
    """How calls are written where a grammar enforces them: `first`, then per call `before` name `between` arguments
    `after`, with `separator` between two calls and `last` at the end."""

    before: str
    between: str
    after: str
    separator: str = ""
    first: str = ""
    last: str = ""
    quoted: bool = True  # the name is written as in JSON


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`marks` open calls. `bare`: a call may also begin an answer without a mark. `short_ids`: see `call_id`."""

    name: str
    marks: tuple[str, ...]
    shape: Shape
    reader: Callable[[str, Schemas], CallReader]  # the mark that was found, name -> parameters' schema
    bare: bool = False
    short_ids: bool = False
    tokens: tuple[str, ...] = ()  # parts of its shape that are tokens of their own in models trained on it

    def written(self, name: str) -> tuple[str, str]:
        """What stands before and behind the arguments of a call."""
        shown = json.dumps(name, ensure_ascii=False)[1:-1] if self.shape.quoted else name
        return self.shape.before + shown + self.shape.between, self.shape.after


_TAG, _TAG_END = "<tool_call>", "</tool_call>"


def _hermes(mark: str, tools: Schemas) -> CallReader:
    return JsonReader(_TAG_END)


def _qwen(mark: str, tools: Schemas) -> CallReader:
    return EitherReader(tools, _TAG_END) if mark == _TAG else TagReader(tools)


def _llama3_json(mark: str, tools: Schemas) -> CallReader:
    return JsonReader(bare=not mark, names=frozenset(tools))


def _mistral(mark: str, tools: Schemas) -> CallReader:
    return NamedReader()


_JSON_CALL = '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"
HERMES = CallFormat("hermes", (_TAG,), Shape(*_JSON_CALL, separator="\n"), _hermes, tokens=(_TAG, _TAG_END))
# Enforced calls are JSON in this format too: a schema's values cannot be enforced inside tags.
QWEN = CallFormat("qwen", (_TAG, "<function="), Shape(*_JSON_CALL, separator="\n"), _qwen, tokens=(_TAG, _TAG_END))
LLAMA3_JSON = CallFormat(
    "llama3_json",
    ("<|python_tag|>",),
    Shape('{"name": "', '", "parameters": ', "}", separator="; "),
    _llama3_json,
    bare=True,
)
_CALLS = "[TOOL_CALLS]"
MISTRAL = CallFormat(
    "mistral",
    (_CALLS,),
    Shape(_CALLS, "[ARGS]", "", quoted=False),
    _mistral,
    short_ids=True,
    tokens=(_CALLS, "[ARGS]"),
)
MISTRAL_ARRAY = CallFormat(
    "mistral",
    (_CALLS,),
    Shape('{"name": "', '", "arguments": ', "}", separator=", ", first=f"{_CALLS} [", last="]"),
    _mistral,
    short_ids=True,
    tokens=(_CALLS,),
)
FORMATS = {format.name: format for format in (HERMES, LLAMA3_JSON, MISTRAL, QWEN)}


def find_format(setting: str, template: str | None) -> CallFormat | None:
    """The format by the setting; "auto": the one whose marks the chat template writes."""
    template = template or ""
    if setting == "auto":
        return _written_in(template)
    return _mistral_of(template) if setting == "mistral" else FORMATS.get(setting)


def _written_in(template: str) -> CallFormat | None:
    if "<function=" in template:
        return QWEN
    if _TAG in template:
        return HERMES
    if _CALLS in template:
        return _mistral_of(template)
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return LLAMA3_JSON
    return None


def _mistral_of(template: str) -> CallFormat:
    return MISTRAL if "[ARGS]" in template or _CALLS not in template else MISTRAL_ARRAY
