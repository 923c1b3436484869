"""What an answer consists of: text, reasoning, tool calls.

Owns: the pieces that a parser cuts a model's text into while it streams, and the parser's protocol.
Does not know: any template's marks, any wire format.
Invariants: pieces come in the order of the model's text. A call's pieces are one `CallStart` and any number of
`CallArguments` with the same index, which join to one JSON value; indices count from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Text(msgspec.Struct, frozen=True):
    """What the user shall read."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """What the model wrote for itself."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A tool call begins; `id` is made here, the model does not know it."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """The next characters of a call's arguments."""

    index: int
    text: str


Piece = Text | Reasoning | CallStart | CallArguments


class AnswerParser(Protocol):
    """Cuts the text of one choice into pieces. Text that may still become a mark is held back until it is decided."""

    def feed(self, text: str) -> Sequence[Piece]:
        """Pieces that are certain once `text` follows what was fed before."""
        ...

    def finish(self) -> Sequence[Piece]:
        """The rest, when the answer has ended; a mark that was never completed is text."""
        ...

    @property
    def broken(self) -> bool:
        """Whether a call was shown whose arguments are not whole."""
        ...
