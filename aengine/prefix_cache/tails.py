"""Sequences that ended inside a page: where one can go on from exactly there.

Owns: an index from a full-page prefix to the released sequences that went a little beyond it.
Does not know: pages; whether a tail's pages are still there.
Invariants: bounded: at most PER_PREFIX tails of a prefix and PREFIXES prefixes, the oldest leave first. An entry may
be stale, so whoever uses it checks every group for its key.
"""

from __future__ import annotations

PER_PREFIX = 4
PREFIXES = 65_536


class TailIndex:
    """Only of use with state groups, whose state at the release point is worth a whole answer of recomputing; for
    attention alone a tail would save less than a page."""

    __slots__ = ("_tails",)

    def __init__(self) -> None:
        self._tails: dict[bytes, list[tuple[int, bytes]]] = {}

    def add(self, prefix: bytes, tokens: int, key: bytes) -> None:
        """A sequence of `tokens` tokens, named `key`, ended behind the full pages named `prefix`."""
        tails = self._tails.setdefault(prefix, [])
        if (tokens, key) not in tails:
            tails.append((tokens, key))
            del tails[:-PER_PREFIX]
        if len(self._tails) > PREFIXES:
            del self._tails[next(iter(self._tails))]

    def of(self, prefix: bytes) -> list[tuple[int, bytes]]:
        """(tokens, key) of each tail of a prefix, longest first."""
        tails = self._tails.get(prefix)
        return sorted(tails, reverse=True) if tails else []

    def __bool__(self) -> bool:
        return bool(self._tails)
