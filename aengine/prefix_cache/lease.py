"""The receipt for a sequence's pages.

Owns: the records that cross to the scheduler: Lease, Grown, TablePart.
Does not know: how pages are chosen, matched or evicted.
Invariants: a lease belongs to one sequence and is released exactly once; its tables only grow at the end, except by
rollback; 0 in a table means no page is held there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from aengine.memory.slabs import Page
from aengine.prefix_cache.keys import MediaItem, TokenChain
from aengine.prefix_cache.retention import UNBOUNDED, RetentionPoints

if TYPE_CHECKING:
    from aengine.prefix_cache.cohort import Cohort


class TablePart(NamedTuple):
    """Pages to write into a block table of one group: table[first : first + len(pages)] = pages."""

    group: int
    first: int
    pages: tuple[int, ...]


class Grown(msgspec.Struct, frozen=True):
    """What `grow` did.

    `start`: first position still to be computed; above the old frontier when pages were adopted, and then possibly
    equal to or above `upto` (nothing to launch). `deltas`: table entries the device does not have yet. `short`: pages
    missing per group; empty on success. `media`: (group, item) pairs whose pages this step must compute. `need`: pages
    per group that were wanted, if some were missing.
    """

    start: int
    deltas: tuple[TablePart, ...] = ()
    short: tuple[int, ...] = ()
    media: tuple[tuple[int, int], ...] = ()
    need: tuple[int, ...] = ()


class Lease:
    """Pages held for one sequence.

    `cached_tokens`: the hit at acquire. `tokens_ready`: positions launched, as far as `grow` was told.
    `capacity_tokens`: positions that may be launched without another `grow`. `tables[g]`: page ids of group g;
    for attention groups entry i holds positions i * page ..., for State it is [page read, page written], for Cross and
    Media the pages of the items one after another.
    """

    __slots__ = (
        "_cohort",
        "_heard",
        "_holds",
        "_pairs",
        "_row",
        "bound",
        "cached_tokens",
        "capacity_tokens",
        "cause",
        "chain",
        "handle",
        "known",
        "media",
        "points",
        "publishes",
        "released",
        "serial",
        "sharing",
        "state_pages",
        "tail",
        "tokens",
        "tokens_ready",
    )

    def __init__(
        self,
        handle: int,
        chain: TokenChain,
        known: int,
        points: RetentionPoints,
        *,
        bound: int,
        cause: str,
        media: tuple[MediaItem, ...],
        state_pages: tuple[int, ...],
    ) -> None:
        self.handle = handle
        self.serial = -1  # given by the cache, unique
        self.chain = chain
        self.tokens: NDArray[np.int32] = chain.tokens
        self.known = known
        self.points = points
        self.state_pages = state_pages  # page sizes of the state groups, in tokens
        self.bound = bound  # no hit, early or late, may reach beyond
        self.cause = cause
        self.media = media
        self.cached_tokens = 0
        self.tokens_ready = 0
        self.capacity_tokens = 0
        self.tail = False  # the hit ends inside a page that has not been claimed yet
        self.sharing = True  # False: the cache is off
        self.publishes = True  # False also when it holds pages of a failed step
        self.released = False
        self._holds: tuple[Any, ...] = ()
        self._pairs: tuple[tuple[Any, Any], ...] = ()
        self._cohort: Cohort | None = None  # who takes its pages and names them, and for which row
        self._row = self._heard = 0

    def open(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._pairs = tuple(pairs)
        self._holds = tuple([hold for _, hold in pairs])

    def join(self, cohort: Cohort, row: int) -> None:
        """From now on `cohort` may take pages for it, and tells of them when asked."""
        self._cohort, self._row, self._heard = cohort, row, cohort.news

    def leave(self) -> tuple[Any, ...]:
        """Whoever grows it in another way ends its part in a cohort. Returns `holds`."""
        holds, self._cohort = self.holds, None
        return holds

    def _hear(self, cohort: Cohort) -> None:
        if cohort.news != self._heard:
            self._heard = cohort.news
            self.capacity_tokens = cohort.tell(self._row, self._holds[0])

    @property
    def holds(self) -> tuple[Any, ...]:
        """One per group, made and understood by the group's rules."""
        if self._cohort is not None:
            self._hear(self._cohort)
        return self._holds

    @property
    def pairs(self) -> tuple[tuple[Any, Any], ...]:
        """(rules, hold) of each group."""
        if self._cohort is not None:
            self._hear(self._cohort)
        return self._pairs

    @property
    def tables(self) -> tuple[list[int], ...]:
        """Page ids by group."""
        return tuple([hold.table for hold in self.holds])

    def next_boundary(self, tokens: int) -> int:
        """Where a chunk that begins at `tokens` should end at the latest, so that the state there can be kept."""
        return min((self.points.after(tokens, page) for page in self.state_pages), default=UNBOUNDED)

    def deltas(self) -> tuple[TablePart, ...]:
        """Table entries that no earlier `deltas` (and no `Grown`) has told: the hit's pages, right after acquire."""
        return tuple([hold.news() for hold in self.holds if hold.unsent()])

    def item_columns(self, group: int) -> tuple[int, ...]:
        """Of a Cross or Media group: the first table column of each media item, -1 while it has none."""
        return tuple(self.holds[group].columns)

    def item_pages(self, group: int, item: int) -> tuple[int, ...]:
        """Of a Cross or Media group: the pages that one media item holds, in order."""
        return tuple(page.id for page in self.holds[group].pages[item])

    def held(self) -> list[Page]:
        """All pages it holds, group by group."""
        return [page for rule, hold in self.pairs for page in rule.pages(hold)]

    def __repr__(self) -> str:
        return f"<lease {self.handle}: {self.tokens_ready}/{self.known} tokens, {self.cached_tokens} cached>"


def holds_of(leases: Iterable[Lease], group: int) -> list[Any]:
    """`lease.holds[group]` of many, without a call for those that are in no cohort."""
    return [lease._holds[group] if lease._cohort is None else lease.holds[group] for lease in leases]


def take_back(leases: Iterable[Lease], group: int) -> list[Any]:
    """The same, and none of them is in a cohort any more."""
    return [lease._holds[group] if lease._cohort is None else lease.leave()[group] for lease in leases]
