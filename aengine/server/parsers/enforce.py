"""Grammars that make a model call tools, and that let it think first.

Owns: the Lark text of such grammars.
Does not know: how a grammar is compiled or applied.
Invariants: what a grammar made here admits is read by the same form's parser. Thoughts are free text up to their
closing mark; what was asked of the answer holds behind it. A call that a grammar enforces has the properties that its
tool declares and no others, unless the schema says `additionalProperties` (`parsers/declared`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aengine.server.parsers.calls import JsonSchema
from aengine.server.parsers.declared import declared_only
from aengine.server.parsers.formats import CallFormat
from aengine.server.parsers.thinking import ThinkMarks
from aengine.types import Grammar

MAX_CALLS = 16  # of one enforced answer: a model that was not trained to stop must come to an end
_WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_BARE_SLASH = re.compile(r"(\\.)|/", re.DOTALL)
_OBJECT = '{"type": "object"}'
_GAP = "/[ \\n]{0,3}/"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called. `strict`: every keyword of its schema must be enforced; else what can be is."""

    name: str
    parameters: JsonSchema
    strict: bool = False


def tool_grammar(
    format: CallFormat, tools: Sequence[Tool], *, parallel: bool, token_ids: Mapping[str, int], start: str = "calls"
) -> str:
    """The Lark rule `start` for one call of one of `tools`, or for several."""
    shape = format.shape
    repeated = f" ({_literal(shape.separator, token_ids)} {start}_one){{0,{MAX_CALLS - 1}}}" if parallel else ""
    parts = (_literal(shape.first, token_ids), f"{start}_one{repeated}", _literal(shape.last, token_ids))
    lines = [
        f"{start}: {' '.join(part for part in parts if part)}",
        f"{start}_one: " + " | ".join(f"{start}_{i}" for i in range(len(tools))),
    ]
    for i, tool in enumerate(tools):
        before, after = (_literal(text, token_ids) for text in format.written(tool.name))
        lines.append(f"{start}_{i}: {before} {start}_{i}_arguments {after}".rstrip())
        lines.append(f"{start}_{i}_arguments: %json {json.dumps(arguments_schema(tool))}")
    return "\n".join(lines)


def enforced(
    *,
    calls: str | None,
    answer: Grammar | None,
    think: ThinkMarks | None,
    opened: bool,
    token_ids: Mapping[str, int],
) -> Grammar | None:
    """The whole grammar of an answer: thoughts, where the model has them, then calls (a rule `calls`) or `answer`."""
    if calls is None and (answer is None or think is None):
        return answer
    bodies = [name for name, given in (("calls", calls), ("answer", answer)) if given is not None]
    lines = ["start: " + _thoughts(think, opened, token_ids) + f"({' | '.join(bodies)})"]
    if think is not None:
        lines += _thought_rules(think, token_ids)
    if calls is not None:
        lines.append(calls)
    if answer is not None:
        lines.append(_answer(answer))
    return Grammar("lark", "\n".join(lines) + "\n")


def _thoughts(think: ThinkMarks | None, opened: bool, token_ids: Mapping[str, int]) -> str:
    if think is None:
        return ""
    return f"thought {_GAP} " if opened else f"({_literal(think.open, token_ids)} thought {_GAP})? "


def _thought_rules(think: ThinkMarks, token_ids: Mapping[str, int]) -> list[str]:
    token = token_ids.get(think.close)
    closed = "" if token is None else f" | thought_free <[{token}]>"
    rules = [f"thought: thought_marked{closed}", f"thought_marked[suffix={json.dumps(think.close)}]: /(.|\\n)*/"]
    return rules if token is None else [*rules, "thought_free: /(.|\\n)*/"]


def _answer(grammar: Grammar) -> str:
    """The client's own grammar as the rule `answer`."""
    if grammar.kind == "json_object":
        return f"answer: %json {_written(_OBJECT)}"
    if grammar.kind == "json_schema":
        return f"answer: %json {_written(grammar.source)}"
    if grammar.kind == "regex":
        return "answer: /" + _BARE_SLASH.sub(lambda found: found.group(1) or "\\/", grammar.source) + "/"
    if grammar.kind == "choice":
        texts = (re.escape(text).replace("\\\n", "\\n").replace("/", "\\/") for text in json.loads(grammar.source))
        return f"answer: /{'|'.join(texts)}/"  # one expression: thousands of alternatives are too many for a parser
    return f"answer: %lark {{\n{_lark(grammar.source)}\n}}"


def _lark(source: str) -> str:
    """A client's own text; it was compiled by itself before, so that what is no Lark is llama.cpp's GBNF."""
    from llguidance.gbnf_to_lark import any_to_lark  # front-ends load it only for this

    return any_to_lark(source)


def _written(source: str) -> str:
    """A client's schema, to be written as templates write JSON."""
    schema = json.loads(source)
    return json.dumps(
        {**schema, "x-guidance": {**_WRITING, "coerce_one_of": False}} if isinstance(schema, dict) else schema
    )


def _literal(text: str, token_ids: Mapping[str, int]) -> str:
    """`text` in Lark; a part that has a token of its own may also be written with it."""
    if not text:
        return ""
    for mark, token in token_ids.items():
        before, found, after = text.partition(mark)
        if found:
            pieces = (_literal(before, token_ids), f"({_quoted(mark)} | <[{token}]>)", _literal(after, token_ids))
            return " ".join(piece for piece in pieces if piece)
    return _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments, always an object, written as templates write JSON."""
    schema = declared_only(tool.parameters) or {"properties": {}, "additionalProperties": False}
    if not any(key in schema for key in ("$ref", "anyOf", "oneOf", "allOf")):
        schema["type"] = "object"
    return {**schema, "x-guidance": _WRITING if tool.strict else {**_WRITING, "lenient": True}}
