"""The parser of one choice.

Owns: `Cutter`: thoughts first, then text and calls in turn.
Does not know: which format; how pieces are shown.
Invariants: pieces joined are all the text, but for marks, blanks around them, and calls beyond the first where only one
was allowed. A call is shown when it is whole and valid; with `enforced`, where a grammar sees to that, as it comes, and
then there is no text: what is left of a call that was cut short is dropped.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence

from aengine.server.parsers.calls import Call, JsonSchema
from aengine.server.parsers.formats import CallFormat
from aengine.server.parsers.readers import CallReader, Outcome
from aengine.server.parsers.scan import find_mark, held_from
from aengine.server.parsers.thinking import ThinkMarks
from aengine.server.pieces import CallArguments, CallStart, Piece, Reasoning, Text

PORTION = 1024  # characters; each step copies what is left of the buffer, so a long one would cost its square
_ALPHABET = string.ascii_letters + string.digits
_SEPARATORS = " \t\r\n;,"
_LEAD, _THINK, _BODY = "lead", "think", "body"


def call_id(short: bool) -> str:
    """Templates of some models take ids of nine letters and digits only."""
    if short:
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


class Cutter:
    """An AnswerParser. `opened`: the prompt ended with the mark that opens thoughts. `tools`: name -> schema."""

    def __init__(
        self,
        *,
        think: ThinkMarks | None = None,
        opened: bool = False,
        format: CallFormat | None = None,
        tools: Mapping[str, JsonSchema] | None = None,
        parallel: bool = True,
        enforced: bool = False,
    ) -> None:
        self._think, self._opened = think, opened
        self._format, self._tools = format, dict(tools or {})
        self._marks: Sequence[str] = () if format is None else format.marks
        self._parallel, self._enforced = parallel, enforced
        self._phase = _BODY if think is None else _LEAD
        self._buffer = ""
        self._pieces: list[Piece] = []
        self._blank = think is not None and opened  # blanks that come next are dropped
        self._at_start = True  # no text was shown yet, nor a mark seen
        self._reader: CallReader | None = None
        self._before = ""
        self._calls = 0
        self.broken = False
        self._shown: int | None = None  # characters of the reader's text shown as arguments

    def feed(self, text: str) -> Sequence[Piece]:
        for at in range(0, len(text), PORTION):
            self._buffer += text[at : at + PORTION]
            self._cut(ended=False)
        return self._taken()

    def finish(self) -> Sequence[Piece]:
        self._cut(ended=True)
        while self._reader is not None:
            self._settle(self._reader.finish())
            self._cut(ended=True)
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _cut(self, *, ended: bool) -> None:
        if self._phase == _LEAD:
            self._cut_lead(ended)
        if self._phase == _THINK:
            self._cut_thought(ended)
        if self._phase == _BODY:
            while self._cut_body(ended):
                pass

    # ---- thoughts

    def _cut_lead(self, ended: bool) -> None:
        assert self._think is not None
        begun = self._buffer.lstrip()
        if begun.startswith(self._think.open):
            self._buffer, self._phase, self._blank = begun[len(self._think.open) :], _THINK, True
        elif ended or not self._think.open.startswith(begun):
            self._phase = _THINK if self._opened else _BODY

    def _cut_thought(self, ended: bool) -> None:
        assert self._think is not None
        self._drop_blanks()
        close = self._think.close
        at = self._buffer.find(close)
        if at >= 0:
            self._show(Reasoning(self._buffer[:at].rstrip()))
            self._buffer = self._buffer[at + len(close) :]
            self._phase, self._blank = _BODY, True
            return
        until = len(self._buffer) if ended else held_from(self._buffer, (close,), spaces=True)
        self._show(Reasoning(self._buffer[:until]))
        self._buffer = self._buffer[until:]

    # ---- text and calls

    def _cut_body(self, ended: bool) -> bool:
        """One step; whether another may follow."""
        if self._reader is not None:
            return self._read_call()
        self._drop_blanks()
        if self._at_start and self._format is not None and self._format.bare and self._begins_bare(ended):
            return self._reader is not None
        found = find_mark(self._buffer, self._marks)
        if found is not None:
            at, mark = found
            shown = self._buffer[:at].rstrip()
            self._show(Text(shown))
            before, self._buffer = self._buffer[len(shown) : at + len(mark)], self._buffer[at + len(mark) :]
            self._begin(mark, before)
            return True
        until = len(self._buffer)
        if not ended and self._marks:
            until = held_from(self._buffer, self._marks, spaces=True)
        self._show(Text(self._buffer[:until]))
        self._buffer = self._buffer[until:]
        return False

    def _begins_bare(self, ended: bool) -> bool:
        """Whether the answer's beginning is a call without a mark, or too short to tell."""
        begun = self._buffer.lstrip(_SEPARATORS if self._calls else None)
        if begun[:1] == "{":
            before, self._buffer = self._buffer[: len(self._buffer) - len(begun)], begun
            self._begin("", before)
            return True
        self._at_start = not begun
        return not begun and not ended

    def _begin(self, mark: str, before: str) -> None:
        """A call may begin behind `before`: the mark and blanks, which are text should it be none."""
        assert self._format is not None
        self._reader, self._before = self._format.reader(mark, self._tools), before
        self._at_start, self._shown = False, None

    def _read_call(self) -> bool:
        assert self._reader is not None
        text, self._buffer = self._buffer, ""
        outcome = self._reader.feed(text) if text else None
        if self._enforced:
            self._show_arguments()
        if outcome is None:
            return False
        self._settle(outcome)
        return True

    def _settle(self, outcome: Outcome) -> None:
        """The reader is done."""
        begun, self._reader = self._shown is not None, None
        self._shown = None
        self._buffer = outcome.rest
        if outcome.calls is None:
            if begun:  # its arguments are out already, as far as they came
                self._calls += 1
                self.broken = True
            else:
                self._show(Text(self._before + outcome.raw))
            return
        if begun:
            self._calls += 1
        for call in outcome.calls[begun:]:
            self._show_call(call)
        self._blank = True
        self._at_start = True

    def _show_call(self, call: Call) -> None:
        if self._calls and not self._parallel:
            return
        self._start(call.name)
        self._show(CallArguments(self._calls, call.arguments))
        self._calls += 1

    def _show_arguments(self) -> None:
        """What has come of the call that is being read."""
        assert self._reader is not None
        head = self._reader.head()
        if head is None or (self._calls and not self._parallel):
            return
        if self._shown is None:
            self._start(head.name)
            self._shown = head.start
        if head.end > self._shown:
            self._show(CallArguments(self._calls, self._reader.text[self._shown : head.end]))
            self._shown = head.end

    def _start(self, name: str) -> None:
        self._show(CallStart(self._calls, call_id(self._format is not None and self._format.short_ids), name))

    def _drop_blanks(self) -> None:
        if self._blank and self._buffer:
            self._buffer = self._buffer.lstrip()
            self._blank = not self._buffer

    def _show(self, piece: Piece) -> None:
        """Text next to text becomes one piece."""
        if not isinstance(piece, CallStart) and not piece.text:
            return
        if isinstance(piece, Text):
            self._at_start = self._at_start and not piece.text.strip()
            if self._enforced:
                return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(piece, Text) and isinstance(last, Text):
            self._pieces[-1] = Text(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            self._pieces[-1] = Reasoning(last.text + piece.text)
        else:
            self._pieces.append(piece)
