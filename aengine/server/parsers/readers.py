"""Readers: one call, or one group of calls, from behind its opening mark to its end.

Owns: `JsonReader`, `NamedReader`, `TagReader`, `EitherReader`.
Does not know: what stands around the calls.
Invariants: a reader keeps what it was fed until it has an outcome; where it gives up depends on the text alone. What
it gave up on is text up to that place, and is not looked at again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from aengine.server.parsers.calls import Call, JsonSchema, read_arguments, read_json_calls, read_tagged_call
from aengine.server.parsers.scan import JsonSpan, Span

MAX_HEAD = 256  # characters before a call's arguments
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]{1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_NAMED_HEAD = re.compile(r"\s*([\w.\-]*)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_NAMED_PREFIX = re.compile(r"\s*[\w.\-]*(?:\[[A-Z_]*\]?\w*)*\s*")
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]{0,64})"')
_CALL_KEYS = frozenset(("name", "arguments", "parameters", "function", "type", "id"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """`calls` None: it was none, and `raw` is text. `rest`: not read yet."""

    calls: list[Call] | None
    raw: str
    rest: str


@dataclass(frozen=True, slots=True)
class Head:
    """A call whose arguments have begun: text[start:end] is what is known of them."""

    name: str
    start: int
    end: int


class CallReader(Protocol):
    @property
    def text(self) -> str: ...
    def feed(self, text: str) -> Outcome | None:
        """None: more text is needed."""
        ...

    def finish(self) -> Outcome:
        """The text has ended."""
        ...

    def head(self) -> Head | None:
        """For callers that know the calls to be well-formed and show arguments as they come."""
        ...


class JsonReader:
    """A JSON object or array, then `close`, which some models forget. `bare`: no mark opened it, so its first key must
    be one of a call's and its names must be among `names`."""

    def __init__(self, close: str = "", *, bare: bool = False, names: frozenset[str] = frozenset()) -> None:
        self.text = ""
        self._close = close
        self._bare, self._names = bare, names
        self._key_seen = not bare
        self._span: JsonSpan | None = None
        self._calls: list[Call] | None = None
        self._arguments: tuple[str, JsonSpan] | None = None

    def feed(self, text: str) -> Outcome | None:
        self.text += text
        if self._calls is not None:
            return self._closed()
        if self._span is None:
            at = len(self.text) - len(self.text.lstrip())
            if at == len(self.text):
                return None
            if self.text[at] not in "{[":
                return self._failed(at)
            self._span = JsonSpan(at)
        if not self._key_seen and (wrong := self._wrong_key()) is not None:
            return self._failed(wrong)
        state = self._span.feed(self.text)
        if state is Span.OPEN:
            return None
        if state is Span.BROKEN:
            return self._failed(self._span.end)
        calls = read_json_calls(self.text[self._span.start : self._span.end])
        if calls is None or (self._bare and any(call.name not in self._names for call in calls)):
            return self._failed(self._span.end)
        self._calls = calls
        return self._closed()

    def finish(self) -> Outcome:
        if self._calls is None or self._span is None:
            return Outcome(None, self.text, "")
        return Outcome(self._calls, "", self.text[self._span.end :])

    def head(self) -> Head | None:
        if self._arguments is None:
            found = _HEAD.match(self.text)
            if found is None:
                return None
            self._arguments = found.group(1), JsonSpan(found.end())
        name, span = self._arguments
        open = span.feed(self.text) is Span.OPEN
        return Head(name, span.start, len(self.text) if open else span.end)

    def _wrong_key(self) -> int | None:
        assert self._span is not None
        start = self._span.start
        if self.text[start] == "[":
            self._key_seen = True
            return None
        found = _FIRST_KEY.match(self.text, start)
        if found is None:
            return None
        self._key_seen = True
        return None if found.group(1) in _CALL_KEYS else found.end()

    def _closed(self) -> Outcome | None:
        assert self._span is not None
        rest = self.text[self._span.end :]
        tail = rest.lstrip()
        if tail.startswith(self._close):
            return Outcome(self._calls, "", tail[len(self._close) :] if self._close else rest)
        return None if self._close.startswith(tail) else Outcome(self._calls, "", rest)

    def _failed(self, at: int) -> Outcome:
        return Outcome(None, self.text[:at], self.text[at:])


class NamedReader:
    """`name[ARGS]{..}`, with or without `[CALL_ID]id` and `[ARGS]`; or an array of call objects."""

    def __init__(self) -> None:
        self.text = ""
        self._array: JsonReader | None = None
        self._call: tuple[str, JsonSpan] | None = None

    def feed(self, text: str) -> Outcome | None:
        if self._array is not None:
            return self._array.feed(text)
        self.text += text
        if self._call is None:
            if self.text.lstrip()[:1] == "[":
                self._array = JsonReader()
                return self._array.feed(self.text)
            at = self._prefix()
            if at is None:
                return None
            found = _NAMED_HEAD.match(self.text)
            if found is None or not found.group(1) or found.end() != at:
                return self._failed(at)
            self._call = found.group(1), JsonSpan(at)
        name, span = self._call
        state = span.feed(self.text)
        if state is Span.OPEN:
            return None
        arguments = read_arguments(self.text[span.start : span.end]) if state is Span.WHOLE else None
        if arguments is None:
            return self._failed(span.end)
        return Outcome([Call(name, arguments)], "", self.text[span.end :])

    def finish(self) -> Outcome:
        return Outcome(None, self.text, "") if self._array is None else self._array.finish()

    def head(self) -> Head | None:
        if self._call is None:
            return None
        name, span = self._call
        open = span.feed(self.text) is Span.OPEN
        return Head(name, span.start, len(self.text) if open else span.end)

    def _prefix(self) -> int | None:
        """Where the head ends; None while it may go on."""
        found = _NAMED_PREFIX.match(self.text)
        at = min(found.end() if found else 0, MAX_HEAD)
        return None if at == len(self.text) and at < MAX_HEAD else at

    def _failed(self, at: int) -> Outcome:
        return Outcome(None, self.text[:at], self.text[at:])


class TagReader:
    """`<function=name>` and parameter tags, from behind `<function=`; then `</function>` and perhaps `</tool_call>`."""

    END, OUTER_END = "</function>", "</tool_call>"

    def __init__(self, parameters: Mapping[str, JsonSchema], lead: str = "") -> None:
        self.text = ""
        self._parameters = parameters
        self._lead = lead  # how the text begins before the name
        self._searched = 0
        self._end: int | None = None
        self._calls: list[Call] | None = None

    def feed(self, text: str) -> Outcome | None:
        self.text += text
        if self._end is None:
            at = self.text.find(self.END, self._searched)
            if at < 0:
                self._searched = max(0, len(self.text) - len(self.END) + 1)
                return None
            self._end = at + len(self.END)
            call = read_tagged_call(self.text[:at].lstrip()[len(self._lead) :], self._parameters)
            if call is None:
                return Outcome(None, self.text[: self._end], self.text[self._end :])
            self._calls = [call]
        rest = self.text[self._end :]
        tail = rest.lstrip()
        if tail.startswith(self.OUTER_END):
            return Outcome(self._calls, "", tail[len(self.OUTER_END) :])
        return None if self.OUTER_END.startswith(tail) else Outcome(self._calls, "", rest)

    def finish(self) -> Outcome:
        if self._calls is None:
            return Outcome(None, self.text, "")
        return Outcome(self._calls, "", self.text[self._end :])

    def head(self) -> Head | None:
        return None  # arguments are made when all tags are read


class EitherReader:
    """Behind `<tool_call>`: a JSON call or a tagged one, as the first characters tell."""

    LEAD = "<function="

    def __init__(self, parameters: Mapping[str, JsonSchema], close: str) -> None:
        self._parameters, self._close = parameters, close
        self._chosen: CallReader | None = None
        self._text = ""

    @property
    def text(self) -> str:
        return self._text if self._chosen is None else self._chosen.text

    def feed(self, text: str) -> Outcome | None:
        if self._chosen is not None:
            return self._chosen.feed(text)
        self._text += text
        begun = self._text.lstrip()
        if self.LEAD.startswith(begun):
            return None
        tagged = begun.startswith(self.LEAD)
        if not tagged and begun[0] == "<":  # another mark: it must be found where it begins
            at = len(self._text) - len(begun)
            return Outcome(None, self._text[:at], self._text[at:])
        self._chosen = TagReader(self._parameters, self.LEAD) if tagged else JsonReader(self._close)
        return self._chosen.feed(self._text)

    def finish(self) -> Outcome:
        return Outcome(None, self._text, "") if self._chosen is None else self._chosen.finish()

    def head(self) -> Head | None:
        return None if self._chosen is None else self._chosen.head()
