"""One tool call: from what a model wrote to a name and JSON arguments.

Owns: the shapes of call objects that models write, the reading of JSON and of parameter tags.
Does not know: where a call begins or ends in a text.
Invariants: arguments are the text of one JSON object; what cannot be read is None, never an exception.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

JsonSchema = Mapping[str, Any]
_ARGUMENTS = ("arguments", "parameters")
_NAME = re.compile(r"[^\s<>{}\"]{1,256}")
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments`: JSON text of an object."""

    name: str
    arguments: str


def read_json_calls(text: str) -> list[Call] | None:
    """The calls of one JSON object or of an array of them."""
    strict = _strict(text)
    if strict is None:
        return None
    try:
        entries: Iterable[bytes] = (
            [bytes(raw) for raw in _decode_list(strict)] if strict[:1] == "[" else [strict.encode()]
        )
        calls = [_call(entry) for entry in entries]
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    known = [call for call in calls if call is not None]
    return known if calls and len(known) == len(calls) else None


def read_arguments(text: str) -> str | None:
    """`text` as an object's JSON, None when it is no object."""
    strict = _strict(text)
    return strict if strict is not None and strict[:1] == "{" else None


def _strict(text: str) -> str | None:
    """`text` itself when it is JSON; else its repair, should it only have bare line breaks in strings."""
    text = text.strip()
    try:
        msgspec.json.decode(text)
        return text
    except (ValueError, RecursionError):  # msgspec's errors and lone surrogates
        pass
    try:
        return json.dumps(json.loads(text, strict=False, parse_constant=_no_number), ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _call(raw: bytes) -> Call | None:
    fields = _decode(raw)
    inner = bytes(fields.get("function", b""))
    if inner[:1] == b"{":
        fields = _decode(inner)
        inner = b""
    name = msgspec.json.decode(fields.get("name", inner or b"null"))
    if not isinstance(name, str) or not name:
        return None
    arguments = next((bytes(fields[key]) for key in _ARGUMENTS if key in fields), b"{}").strip()
    if arguments[:1] == b'"':  # encoded twice
        arguments = msgspec.json.decode(arguments, type=str).strip().encode()
        msgspec.json.decode(arguments or b"{}")
    if arguments in (b"null", b""):
        arguments = b"{}"
    return Call(name, arguments.decode()) if arguments[:1] == b"{" else None


def read_tagged_call(text: str, parameters: Mapping[str, JsonSchema]) -> Call | None:
    """`name>` and `<parameter=key>value</parameter>` tags. A value's type is what the tool's schema says."""
    name, found, body = text.partition(">")
    name = name.strip()
    if not found or not _NAME.fullmatch(name):
        return None
    properties = parameters.get(name, {}).get("properties")
    types = properties if isinstance(properties, Mapping) else {}
    arguments: dict[str, Any] = {}
    at = body.find(_PARAMETER)
    while at >= 0:
        begin = body.find(">", at)
        if begin < 0:
            return None
        key = body[at + len(_PARAMETER) : begin].strip()
        following = body.find(_PARAMETER, begin)
        end = body.find(_PARAMETER_END, begin, len(body) if following < 0 else following)
        if end < 0:  # not closed: up to the next one
            end = len(body) if following < 0 else following
        arguments[key] = _typed(_unwrapped(body[begin + 1 : end]), types.get(key))
        at = following
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def _unwrapped(value: str) -> str:
    """Without the one line break that the template puts at either side."""
    return value.removeprefix("\n").removesuffix("\n")


def _typed(value: str, schema: object) -> Any:
    kinds = _kinds(schema)
    if "string" in kinds:
        return value
    word = {"True": "true", "False": "false", "None": "null"}.get(value.strip(), value)
    try:
        return json.loads(word, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return value


def _kinds(schema: object) -> set[str]:
    """The types a schema allows, as far as it says so plainly."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    kinds = (
        {kind}
        if isinstance(kind, str)
        else {k for k in kind if isinstance(k, str)}
        if isinstance(kind, list)
        else set()
    )
    if isinstance(schema.get("enum"), list):
        kinds |= {"string"} if all(isinstance(value, str) for value in schema["enum"]) else set()
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            kinds |= _kinds(choice)
    return kinds
