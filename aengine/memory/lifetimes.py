"""How long the pages of a layer stay useful, as pure functions of token counts.

Owns: the six lifetimes: Full, Window, Chunk, State, Cross, Media.
Does not know: pages in use, requests, tensors.
Invariants: `first_live(t)` never falls as t grows; `peak_pages` bounds what one sequence ever holds at once, so
start-up sizing and admission, which both use it, cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Base of the lifetimes.

    `positional`: page i of a sequence holds its positions i * tokens_per_page and on. `per_item`: pages hold the
    entries of media items, each item from a page edge on.
    """

    positional: ClassVar[bool] = True
    per_item: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """For tables: the name, and the span in tokens if there is one."""
        return type(self).__name__.lower()

    def first_live(self, tokens: int) -> int:
        """First position that the query at position `tokens`, or any later one, still reads."""
        return 0

    def peak_pages(self, total_tokens: int, page_tokens: int, in_flight_tokens: int | None) -> int:
        """Most pages a sequence of `total_tokens` holds at once, with at most `in_flight_tokens` launched but not
        retired (None: any number)."""
        return -(-total_tokens // page_tokens)


@dataclass(frozen=True, slots=True)
class Full(Lifetime):
    """Ordinary causal attention: every position is read until the sequence ends."""


@dataclass(frozen=True, slots=True)
class Window(Lifetime):
    """Sliding window: the query at position p reads positions p - tokens + 1 .. p."""

    tokens: int

    def __post_init__(self) -> None:
        _check_positive("window", self.tokens)

    @property
    def label(self) -> str:
        return f"window({self.tokens})"

    def first_live(self, tokens: int) -> int:
        return max(0, tokens - self.tokens + 1)

    def peak_pages(self, total_tokens: int, page_tokens: int, in_flight_tokens: int | None) -> int:
        whole = -(-total_tokens // page_tokens)
        if in_flight_tokens is None:
            return whole
        return min(whole, _span_pages(self.tokens - 1 + in_flight_tokens, page_tokens))


@dataclass(frozen=True, slots=True)
class Chunk(Lifetime):
    """Chunked local attention: a query reads its own chunk of `tokens` positions only."""

    tokens: int

    def __post_init__(self) -> None:
        _check_positive("chunk", self.tokens)

    @property
    def label(self) -> str:
        return f"chunk({self.tokens})"

    def first_live(self, tokens: int) -> int:
        return tokens // self.tokens * self.tokens

    def peak_pages(self, total_tokens: int, page_tokens: int, in_flight_tokens: int | None) -> int:
        whole = -(-total_tokens // page_tokens)
        if in_flight_tokens is None:
            return whole
        return min(whole, _span_pages(self.tokens - 1 + in_flight_tokens, page_tokens))


@dataclass(frozen=True, slots=True)
class State(Lifetime):
    """Recurrent state: one page is the state after some number of tokens, whatever that number is.

    A sequence holds the page it reads (perhaps a shared checkpoint) and the page it writes: two at most.
    """

    positional: ClassVar[bool] = False

    def first_live(self, tokens: int) -> int:
        return tokens

    def peak_pages(self, total_tokens: int, page_tokens: int, in_flight_tokens: int | None) -> int:
        return 2 if total_tokens > 1 else 1


@dataclass(frozen=True, slots=True)
class Cross(Lifetime):
    """Cross-attention KV of media items: depends on the item alone, read until the sequence ends.

    `peak_pages` counts the entries of one item, not text positions.
    """

    positional: ClassVar[bool] = False
    per_item: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Media(Lifetime):
    """Embeddings of media items: read only while the item's placeholder positions are being computed.

    `peak_pages` counts the entries of one item, not text positions.
    """

    positional: ClassVar[bool] = False
    per_item: ClassVar[bool] = True


def _span_pages(positions: int, page_tokens: int) -> int:
    """Most pages that a span of positions touches, whatever its alignment, when passed ones are let go of only each
    time a page has been computed (up to page - 1 positions late)."""
    return (positions + page_tokens - 3) // page_tokens + 2


def _check_positive(name: str, tokens: int) -> None:
    if tokens < 1:
        raise ValueError(f"{name} of {tokens} tokens: at least 1 is needed")
