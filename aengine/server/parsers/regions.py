"""Answers cut by a checkpoint's own response template.

Owns: `RegionParser`, from regions to pieces.
Does not know: how a template is read.
Invariants: blanks around a region are no part of it; a region that could not be read is text, without its marks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from aengine.server.parsers.cutter import call_id
from aengine.server.pieces import CallArguments, CallStart, Piece, Reasoning, Text

CONTENT, CALLS = "content", "tool_calls"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class Region(Protocol):
    """Of a field: more of its `text`; or its `value`, `whole`; or, `failed`, the text that could not be read."""

    @property
    def field(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def value(self) -> Any: ...
    @property
    def whole(self) -> bool: ...
    @property
    def failed(self) -> bool: ...


class RegionStream(Protocol):
    def feed(self, text: str) -> Sequence[Region]: ...
    def finish(self) -> Sequence[Region]: ...


class RegionParser:
    """An AnswerParser. `calls`: tools were offered; else what looks like a call is text."""

    broken = False  # calls are shown when they are whole

    def __init__(self, stream: RegionStream, *, calls: bool, parallel: bool) -> None:
        self._stream = stream
        self._reads_calls, self._parallel = calls, parallel
        self._calls = 0
        self._field: str | None = None  # the region that has begun
        self._blanks = ""  # of its end, as far as it came

    def feed(self, text: str) -> Sequence[Piece]:
        return self._pieces(self._stream.feed(text))

    def finish(self) -> Sequence[Piece]:
        return self._pieces(self._stream.finish())

    def _pieces(self, regions: Iterable[Region]) -> list[Piece]:
        return [piece for region in regions for piece in self._piece(region)]

    def _piece(self, region: Region) -> Sequence[Piece]:
        called = region.field == CALLS and self._reads_calls
        if region.whole:
            self._field, self._blanks = None, ""
            if region.failed and (called or region.field not in (CONTENT, CALLS, *THOUGHTS)):
                return (Text(region.text),)
            return self._called(region.value) if called and not region.failed else ()
        if called:
            return ()
        if region.field in THOUGHTS:
            shown = self._shown(region)
            return (Reasoning(shown),) if shown else ()
        shown = self._shown(region) if region.field in (CONTENT, CALLS) else ""
        return (Text(shown),) if shown else ()

    def _shown(self, region: Region) -> str:
        text = self._blanks + region.text
        if self._field != region.field:
            text = region.text.lstrip()
            self._field = region.field if text else None
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        return kept

    def _called(self, value: Any) -> list[Piece]:
        out: list[Piece] = []
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function", call) if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                out.append(Text(json.dumps(call, ensure_ascii=False, default=str)))
            elif self._parallel or not self._calls:
                arguments = function.get("arguments")
                text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
                out.append(CallStart(self._calls, call_id(short=False), function["name"]))
                out.append(CallArguments(self._calls, text))
                self._calls += 1
        return out
