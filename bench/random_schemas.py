"""Random JSON schemas within the keywords that structured output supports.

Owns: `random_schema`.
Does not know: engines.
Invariants: the same seed gives the same schema; strings, arrays and numbers are bounded, so that an answer ends.
"""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "city", "tags", "price", "open", "items", "kind", "note", "size", "größe", 'a "b"')


def random_schema(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    schema = _object(rng, depth=0)
    if rng.random() < 0.2:
        schema["$defs"] = {"part": _value(rng, 2)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"] = sorted({*schema["required"], "part"})
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 3))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: _value(rng, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _integer, _number, _boolean, _enum, _const]
    if depth < 3:
        makers += [_object_at(depth), _array, _any_of]
    return rng.choice(makers)(rng)


def _object_at(depth: int) -> Any:
    return lambda rng: _object(rng, depth)


def _string(rng: random.Random) -> dict[str, Any]:
    kinds = [
        {"maxLength": rng.randint(1, 12)},
        {"minLength": 2, "maxLength": rng.randint(3, 9)},
        {"pattern": rng.choice(["^[a-z]{2,5}$", "^[A-Z][0-9]{3}$", "^(a|bc)+d$"]), "maxLength": 12},
        {"format": rng.choice(["date", "uuid", "ipv4"])},
    ]
    return {"type": "string", **rng.choice(kinds)}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def _number(rng: random.Random) -> dict[str, Any]:
    return {"type": "number", "minimum": rng.randint(-5, 0), "maximum": rng.randint(1, 9), "multipleOf": 0.25}


def _boolean(rng: random.Random) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", 3, None, True, {"x": 1}, "ü"], rng.randint(1, 4))}


def _const(rng: random.Random) -> dict[str, Any]:
    return {"const": rng.choice(["fixed text", 7, False])}


def _array(rng: random.Random) -> dict[str, Any]:
    return {"type": "array", "items": _value(rng, 3), "minItems": rng.randint(0, 1), "maxItems": rng.randint(1, 3)}


def _any_of(rng: random.Random) -> dict[str, Any]:
    return {"anyOf": [_value(rng, 3), _value(rng, 3)]}
