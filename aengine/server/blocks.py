"""An answer as a sequence of blocks: what the Responses and the Messages API stream.

Owns: the grouping of a parser's pieces into blocks (text, reasoning, one call), and when each opens and closes.
Does not know: how a parser cuts text, any wire format.
Invariants: blocks open in order of index and are closed before the next one opens; a block of text holds more than
white space unless it is the only block; the texts that a block grew by join to its whole text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from aengine.server.pieces import AnswerParser, CallArguments, CallStart, Piece, Reasoning, Text

Kind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Block:
    """`call_id` and `name` belong to a call. `parts` join to the text, or to a call's arguments."""

    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Opened:
    block: Block


@dataclass(frozen=True, slots=True)
class Grew:
    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    block: Block


Change = Opened | Grew | Closed


class Blocks:
    """The blocks of one choice. `feed` and `finish` return what changed, in order."""

    def __init__(self, parser: AnswerParser) -> None:
        self.done: list[Block] = []
        self.open: Block | None = None
        self._parser = parser
        self._space = ""  # white space that does not yet belong to a block

    def feed(self, text: str) -> list[Change]:
        return self._take(self._parser.feed(text))

    def finish(self) -> list[Change]:
        """The last changes; an answer without any block gets one, with the little text that there is."""
        changes = self._take(self._parser.finish())
        if self.open is None and not self.done:
            changes += self._grow("text", self._space) if self._space else self._start("text")
        return changes + self._close()

    @property
    def calls(self) -> bool:
        return any(block.kind == "call" for block in self.done)

    def _take(self, pieces: Iterable[Piece]) -> list[Change]:
        return [change for piece in pieces for change in self._piece(piece)]

    def _piece(self, piece: Piece) -> Sequence[Change]:
        match piece:
            case Text(text):
                return self._text(text)
            case Reasoning(text):
                return self._grow("reasoning", text)
            case CallStart(_, id, name):
                return self._start("call", id, name)
            case CallArguments(_, text):
                return self._grow("call", text)

    def _text(self, text: str) -> Sequence[Change]:
        if self.open is None or self.open.kind != "text":
            text, self._space = self._space + text, ""
            if not text.strip():
                self._space = text
                return ()
        return self._grow("text", text)

    def _start(self, kind: Kind, call_id: str = "", name: str = "") -> list[Change]:
        changes = self._close()
        self.open = Block(len(self.done), kind, call_id, name)
        self._space = ""
        return [*changes, Opened(self.open)]

    def _grow(self, kind: Kind, text: str) -> list[Change]:
        changes = [] if self.open is not None and self.open.kind == kind else self._start(kind)
        assert self.open is not None
        if text:
            self.open.parts.append(text)
            changes.append(Grew(self.open, text))
        return changes

    def _close(self) -> list[Change]:
        block, self.open = self.open, None
        if block is None:
            return []
        self.done.append(block)
        return [Closed(block)]
