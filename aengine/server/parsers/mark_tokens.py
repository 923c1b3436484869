"""Marks as tokens.

Owns: which token a mark is, and whether detokenising leaves it out.
Does not know: formats.
Invariants: a tokenizer is asked once for each mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from aengine.server.parsers.thinking import TokenBytes


class MarkText(TokenBytes, Protocol):
    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


@dataclass(frozen=True, slots=True)
class MarkToken:
    """`id` None: the vocabulary has no token for the mark alone. `special`: it is left out of texts by default."""

    id: int | None
    special: bool


_known: WeakKeyDictionary[MarkText, dict[str, MarkToken]] = WeakKeyDictionary()


async def mark_tokens(marks: Iterable[str], text: MarkText) -> dict[str, MarkToken]:
    known = _known.setdefault(text, {})
    for mark in marks:
        if mark not in known:
            known[mark] = await _look_up(mark, text)
    return {mark: known[mark] for mark in marks}


async def _look_up(mark: str, text: MarkText) -> MarkToken:
    ids = await text.encode(mark, add_special_tokens=False)
    id = next((token for token in ids if text.token_bytes(token) == mark.encode()), None)
    special = id is not None and mark not in await text.decode([id], skip_special_tokens=True)
    return MarkToken(id, special)
