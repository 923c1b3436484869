"""What is wrong with tools whose grammar was refused.

Owns: finding the tool at fault, and saying so in terms of what the client sent.
Does not know: how grammars are compiled, what tools are for.
Invariants: nothing is compiled here unless the grammar of all tools was refused; the error names tools[i] and, where
one is known, the place in its schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aengine.errors import InvalidRequest
from aengine.server.facade import Engine
from aengine.server.parsers.enforce import Tool, arguments_schema
from aengine.types import Grammar, SamplingParams


async def tool_fault(
    engine: Engine, sent: Sequence[Mapping[str, Any]], offered: Sequence[Tool], error: InvalidRequest
) -> InvalidRequest:
    """`error`, about the grammar of `offered`, as one about `tools`."""
    names = {tool.name for tool in offered}
    places = [i for i, tool in enumerate(sent) if tool["function"]["name"] in names]
    for i, tool in zip(places, offered, strict=True):
        schema = json.dumps(arguments_schema(tool))
        by_itself = await _refusal(engine, Grammar("lark", f"start: %json {schema}"))
        if by_itself is not None:
            told = await _refusal(engine, Grammar("json_schema", schema)) or by_itself
            path = f"tools[{i}].function.parameters"
            told.param, told.message = path, f"{path}: {told.message}"
            return told
    error.param, error.message = "tools", f"tools cannot be enforced: {error.message}"
    return error


async def _refusal(engine: Engine, grammar: Grammar) -> InvalidRequest | None:
    try:
        await engine.prepare(SamplingParams(grammar=grammar))
    except InvalidRequest as error:
        return error
    return None
