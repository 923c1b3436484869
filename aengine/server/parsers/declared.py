"""Objects with their declared properties only.

Owns: where a tool's schema leaves open what else an object may hold, and closing it.
Does not know: grammars, calls.
Invariants: a schema that says `additionalProperties` is obeyed. Closing never leaves a schema without an answer: what
is put together from parts (`allOf`; `$ref` and others beside `properties` or a demand for some), or demands what it
does not declare, stays as it is. JSON Schema allows more than is declared, and clients that validate take it; but a
small model that is free to invent properties goes on with it until its tokens are spent.
"""

from __future__ import annotations

from typing import Any

from aengine.server.parsers.calls import JsonSchema

MAX_DEPTH = 64  # deeper schemas stay as they are from there on
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
_PARTS = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
_VALUES = ("dependentRequired", "enum", "const")  # these may demand any property
_DEMANDS = ("required", "minProperties", *_VALUES)
_BY_NAME = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")


def declared_only(schema: JsonSchema) -> dict[str, Any]:
    """`schema` without undeclared properties. Where an object is described by several schemas together, only the
    outermost one is closed: any other may be such a part."""
    if _joins(schema):
        return {**schema, "additionalProperties": False} if _closable(schema) else dict(schema)
    closed: dict[str, Any] = _closed(schema, MAX_DEPTH)
    return closed


def _joins(schema: JsonSchema) -> bool:
    """Whether an object's properties are described in more than one place, as far as keywords tell."""
    left: list[Any] = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            described = any(key in value for key in ("properties", *_DEMANDS))
            if "allOf" in value or (described and any(key in value for key in _PARTS)):
                return True
            left += value.values()
        elif isinstance(value, list):
            left += value
    return False


def _closed(schema: Any, depth: int) -> Any:
    if not isinstance(schema, dict) or not depth:
        return schema
    out = dict(schema)
    for key in _BY_NAME:
        if isinstance(out.get(key), dict):
            out[key] = {name: _closed(inner, depth - 1) for name, inner in out[key].items()}
    if isinstance(out.get("items"), dict):
        out["items"] = _closed(out["items"], depth - 1)
    for key in _LISTS:
        if isinstance(out.get(key), list):
            out[key] = [_closed(inner, depth - 1) for inner in out[key]]
    if _closable(out):
        out["additionalProperties"] = False
    return out


def _closable(schema: JsonSchema) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or any(key in schema for key in (*_OPEN, *_PARTS, *_VALUES)):
        return False
    least = schema.get("minProperties", 0)
    if not isinstance(required, list) or not isinstance(least, int) or least > len(properties):
        return False
    return all(isinstance(name, str) and name in properties for name in required)
