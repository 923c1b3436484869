"""JSON schemas, looked through before the grammar library reads them.

Owns: what that library would misread, or refuse only once an answer has begun: bounds beyond 64 bits, counts written as
3.0, objects with more optional properties than it can hold open.
Does not know: how schemas compile, whose they are.
Invariants: a schema means the same afterwards; without such a count its text is not touched. Values (`enum`, `const`)
are nobody's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from aengine.errors import TOO_COMPLEX, GrammarTooComplex, InvalidGrammar

MAX_OPTIONAL = 1_200  # properties in a row; each takes four of the 5,000 items of one step of the parser
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_INLINE = re.compile(r"%json\s*(?=\{)")


def checked_schema(source: str) -> str:
    """A schema as the library takes it. Raises InvalidGrammar or GrammarTooComplex, with the place."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"the schema is not JSON that can be read: {error}"[:300], param="grammar") from None
    if not isinstance(schema, dict | bool):
        raise InvalidGrammar("the schema is neither a JSON object nor true or false", param="grammar")
    return json.dumps(schema) if _look_through(schema) else source


def checked_lark(source: str) -> str:
    """A grammar whose schemas (`%json {…}`) were looked through; what is no JSON is left for the library to refuse."""
    parts, at = [], 0
    for found in _INLINE.finditer(source):
        if found.end() < at:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(source, found.end())
        except (ValueError, RecursionError):
            continue
        if _look_through(schema):
            parts += [source[at : found.end()], json.dumps(schema)]
            at = end
    return "".join((*parts, source[at:]))


def _look_through(schema: Any) -> bool:
    """Whether a count was written anew, in place."""
    changed = False
    for place, part in _parts(schema):
        types = part.get("type")
        for name in _BOUNDS if types == "integer" or (isinstance(types, list) and "integer" in types) else ():
            bound = part.get(name)
            if isinstance(bound, int | float) and not -(2**63) <= bound < 2**63:
                message = f"{place}.{name} is {str(bound)[:30]}; bounds of integers have at most 64 bits"
                raise InvalidGrammar(message, param="grammar", place=f"{place}.{name}")
        for name in _COUNTS:
            count = part.get(name)
            if isinstance(count, float) and count.is_integer():
                part[name], changed = int(count), True
        if (optional := _optional(part)) > MAX_OPTIONAL:
            message = (
                f"{TOO_COMPLEX}: {place} has {optional:,} optional properties in a row, of at most {MAX_OPTIONAL:,}"
            )
            raise GrammarTooComplex(message, param="grammar")
    return changed


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of everything in a schema that may be one."""
    left = [("$", schema)]
    while left:
        place, part = left.pop()
        if isinstance(part, list):
            left += [(f"{place}[{index}]", child) for index, child in enumerate(part)]
        elif isinstance(part, dict):
            yield place, part
            left += [(f"{place}.{key}", child) for key, child in part.items() if key not in ("enum", "const")]


def _optional(part: dict[str, Any]) -> int:
    """The most properties side by side of which none must come."""
    properties, required = part.get("properties"), part.get("required")
    if not isinstance(properties, dict) or len(properties) <= MAX_OPTIONAL:
        return 0
    demanded = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    most = run = 0
    for name in properties:
        run = 0 if name in demanded else run + 1
        most = max(most, run)
    return most
