"""Where in a JSON schema a fault lies.

Owns: the walk from a schema that does not compile to the smallest part of it that does not either.
Does not know: what is wrong, how schemas compile.
Invariants: at most MAX_TRIES parts are compiled. A part keeps the definitions of the whole, so that its references
hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

MAX_TRIES = 200

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = (
    "items",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "additionalItems",
)
_DEFINITIONS = ("$defs", "definitions")


def place_of(schema: Any, message: str, error_of: Callable[[Any], str]) -> str:
    """The path ("$.properties.a.items") of the smallest part for which `error_of` gives `message` too."""
    definitions = {name: schema[name] for name in _DEFINITIONS if isinstance(schema, dict) and name in schema}
    place, part, tries = "$", schema, MAX_TRIES
    while True:
        for step, child in _children(part):
            tries -= 1
            if tries < 0:
                return place
            if _same(error_of({**definitions, **child} if isinstance(child, dict) else child), message):
                place, part = place + step, child
                break
        else:
            return place


def _same(found: str, message: str) -> bool:
    return bool(found) and found == message


def _children(schema: Any) -> Iterator[tuple[str, Any]]:
    """(step of the path, subschema)."""
    if not isinstance(schema, dict):
        return
    for name in _MAPS:
        entries = schema.get(name)
        if isinstance(entries, dict):
            for key, child in entries.items():
                yield f".{name}.{key}", child
    for name in _LISTS:
        entries = schema.get(name)
        if isinstance(entries, list):
            for index, child in enumerate(entries):
                yield f".{name}[{index}]", child
    for name in _SINGLES:
        if isinstance(schema.get(name), dict | bool):
            yield f".{name}", schema[name]
