"""What the client wants its answer to look like: the fields for it, and the one grammar they make.

Owns: `response_format`, `structured_outputs` and the `guided_*` aliases: their forms, and that there is at most one.
Does not know: how a grammar is compiled or enforced.
Invariants: a constraint becomes a grammar or a 400 that names its field; none is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from aengine.errors import InvalidRequest
from aengine.server.envelope import shorten
from aengine.server.schemas import GenerationBody
from aengine.types import Grammar

Constraint = tuple[str, Grammar]
"""(what asked for it: a field, or a field and a key in it, `field.key`; the grammar)"""


def constraint(body: GenerationBody) -> Constraint | None:
    """What restricts the answer, if anything does. Raises InvalidRequest."""
    found = [*_response_format(body), *_structured_outputs(body), *_guided(body)]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        message = f"{names} restrict the answer at once; one is allowed"
        raise InvalidRequest(message, param=_field(found[1][0]))
    return found[0] if found else None


def as_sent(error: InvalidRequest, body: GenerationBody) -> InvalidRequest:
    """The engine speaks of a grammar; the client sent one of the fields."""
    if error.param == "grammar" and (asked := constraint(body)) is not None:
        error.param = _field(asked[0])
        error.message = f"{asked[0]}: {error.message}"
    return error


def _response_format(body: GenerationBody) -> list[Constraint]:
    wanted = body.response_format
    if wanted is None:
        return []
    match wanted.get("type"):
        case "text":
            return []
        case "json_object":
            return [("response_format", Grammar("json_object"))]
        case "json_schema":
            inner = wanted.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if schema is None:
                raise InvalidRequest("response_format.json_schema.schema is missing", param="response_format")
            return [("response_format", _json("response_format.json_schema.schema", schema))]
    shown = shorten(str(wanted.get("type")), 40)
    raise InvalidRequest(f"response_format: type {shown!r} is not available on this server", param="response_format")


def _structured_outputs(body: GenerationBody) -> list[Constraint]:
    found = []
    for name, value in (body.structured_outputs or {}).items():
        if value is None or (value is False and name != "json"):  # false is a schema, which nothing satisfies
            continue
        make = _MAKERS.get(name)
        if make is None:
            shown = shorten(name, 40)
            raise InvalidRequest(
                f"structured_outputs: {shown!r} is not available on this server", param="structured_outputs"
            )
        found.append((f"structured_outputs.{name}", make(f"structured_outputs.{name}", value)))
    return found


def _guided(body: GenerationBody) -> list[Constraint]:
    fields = {name: getattr(body, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
    given = {name: value for name, value in fields.items() if value is not None}
    return [(f"guided_{name}", _MAKERS[name](f"guided_{name}", value)) for name, value in given.items()]


def _json(name: str, value: Any) -> Grammar:
    """A schema, as JSON or as text that holds JSON."""
    if isinstance(value, str):
        return Grammar("json_schema", value)
    if not isinstance(value, dict | bool):
        raise InvalidRequest(f"{name} is neither an object nor a text", param=_field(name))
    return Grammar("json_schema", msgspec.json.encode(value).decode())


def _text(kind: str) -> Callable[[str, Any], Grammar]:
    def make(name: str, value: Any) -> Grammar:
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{name} is not a text of at least one character", param=_field(name))
        return Grammar(kind, value)

    return make


def _choice(name: str, value: Any) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise InvalidRequest(f"{name} is not a list of at least one text that is not empty", param=_field(name))
    return Grammar("choice", msgspec.json.encode(value).decode())


def _json_object(name: str, value: Any) -> Grammar:
    return Grammar("json_object")


def _field(name: str) -> str:
    return name.split(".")[0]


_MAKERS: dict[str, Callable[[str, Any], Grammar]] = {
    "json": _json,
    "regex": _text("regex"),
    "choice": _choice,
    "grammar": _text("lark"),
    "json_object": _json_object,
}
