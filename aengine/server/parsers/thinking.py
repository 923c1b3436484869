"""Reasoning: where a model's thoughts begin and end.

Owns: the marks, and how a model's template tells which it uses.
Does not know: tool calls, pieces.
Invariants: thoughts stand at the beginning of an answer or nowhere; the mark that opens them may be the prompt's last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

TAIL_TOKENS = 16  # of the prompt; the mark is one token, or a handful where the vocabulary has none for it


@dataclass(frozen=True, slots=True)
class ThinkMarks:
    open: str
    close: str


THINK = ThinkMarks("<think>", "</think>")
BRACKETS = ThinkMarks("[THINK]", "[/THINK]")


class TokenBytes(Protocol):
    def token_bytes(self, id: int) -> bytes: ...


def find_marks(setting: str, template: str | None) -> ThinkMarks | None:
    """The marks by the setting; "auto": those that the chat template names, for it cuts thoughts out of the history."""
    if setting != "auto":
        return THINK if setting == "think" else None
    return next((marks for marks in (THINK, BRACKETS) if marks.close in (template or "")), None)


def prompt_opens(marks: ThinkMarks | None, prompt_ids: Sequence[int], text: TokenBytes) -> bool:
    """Whether the prompt ends with the opening mark, so that the answer begins inside the thoughts."""
    if marks is None:
        return False
    tail = b"".join(text.token_bytes(token) for token in prompt_ids[-TAIL_TOKENS:])
    return tail.rstrip().endswith(marks.open.encode())


class ThoughtCount:
    """Counts the tokens of one choice up to and including the closing mark, however they come in deltas."""

    def __init__(self, marks: ThinkMarks, opened: bool, text: TokenBytes) -> None:
        self._seen = 0
        self._open, self._close = marks.open.encode(), marks.close.encode()
        self._text = text
        self._thinking = opened
        self._over = False
        self._tail = b""

    def add(self, ids: Sequence[int]) -> None:
        for token in ids:
            if self._over:
                return
            self._seen += 1
            self._tail += self._text.token_bytes(token)
            if not self._thinking:
                self._begin()
            if self._thinking:
                self._over = self._close in self._tail
                self._tail = self._tail[-len(self._close) :]

    def _begin(self) -> None:
        seen = self._tail.lstrip()
        if seen.startswith(self._open):
            self._thinking, self._tail = True, seen[len(self._open) :]
        elif not self._open.startswith(seen):
            self._over = True

    @property
    def tokens(self) -> int:
        return self._seen if self._thinking else 0
