"""Looking for marks and for the end of JSON values in text that is still growing.

Owns: `find_mark`, `held_from`, `JsonSpan`.
Does not know: which marks, what a value means.
Invariants: what is found depends on the text alone, not on how much of it was there at once; a span looks at each
character once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

_OUTSIDE = re.compile(r"[^{}\[\]\"\s,:0-9A-Za-z+\-.]|[{}\[\]\"]")
_INSIDE = re.compile(r"[\"\\]")
_PAIRS = {"}": "{", "]": "["}


def find_mark(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """(position, mark) of the mark that begins first; the longest of those that begin there."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    if not found:
        return None
    at, _, mark = min(found)
    return at, mark


def held_from(text: str, marks: Sequence[str], *, spaces: bool) -> int:
    """Where the end of `text` begins that must wait: the beginning of a mark, and with `spaces` blanks before it."""
    at = len(text)
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), 0, -1):
            if text.endswith(mark[:length]):
                at = min(at, len(text) - length)
                break
    return len(text[:at].rstrip()) if spaces else at


class Span(Enum):
    OPEN = "open"
    WHOLE = "whole"
    BROKEN = "broken"


class JsonSpan:
    """Finds where the object or array that begins at `start` ends. It balances brackets and quotes and refuses only
    what no JSON has outside strings, so a whole span may still be no JSON. `end`: behind it, or at what broke it."""

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self._open: list[str] = []
        self._in_string = False
        self._at = start
        self._state = Span.OPEN

    def feed(self, text: str) -> Span:
        """`text` is all there is, with what earlier calls saw as its beginning. Once not open, it stays as it is."""
        if self._state is Span.OPEN:
            self._state = self._read(text)
        return self._state

    def _read(self, text: str) -> Span:
        while self._at < len(text):
            if self._in_string:
                if not self._pass_string(text):
                    return Span.OPEN
                continue
            found = _OUTSIDE.search(text, self._at)
            if found is None:
                self._at = len(text)
                return Span.OPEN
            self._at, char = found.end(), found.group()
            if char in "{[":
                self._open.append(char)
            elif char == '"':
                self._in_string = True
            elif char not in _PAIRS or not self._open or self._open.pop() != _PAIRS[char]:
                self.end = found.start()
                return Span.BROKEN
            elif not self._open:
                self.end = self._at
                return Span.WHOLE
        return Span.OPEN

    def _pass_string(self, text: str) -> bool:
        """Behind the string's end, or as far as is certain."""
        while (found := _INSIDE.search(text, self._at)) is not None:
            if found.group() == '"':
                self._in_string, self._at = False, found.end()
                return True
            if found.end() == len(text):  # what is escaped has not come yet
                self._at = found.start()
                return False
            self._at = found.end() + 1
        self._at = len(text)
        return False
