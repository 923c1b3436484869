"""Which parser cuts a model's answer into pieces.

Owns: the choice of the parser of a chat, and the parser of answers that are text alone.
Does not know: wire formats.
Invariants: as in pieces.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from aengine.server.facade import Engine
from aengine.server.pieces import AnswerParser, Piece, Text
from aengine.server.schemas import ChatBody


class PlainParser:
    """All of it is text for the user."""

    def feed(self, text: str) -> Sequence[Piece]:
        return (Text(text),) if text else ()

    def finish(self) -> Sequence[Piece]:
        return ()


def answer_parser(body: ChatBody, engine: Engine) -> AnswerParser:
    """A parser for one choice of a chat."""
    return PlainParser()
