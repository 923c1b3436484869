"""Many leases in one call: what steady decode asks of the cache in every step.

Owns: growing rows of one position each, over groups whose pages follow positions; publishing the pages they fill.
Does not know: slots, requests, how pages are chosen.
Invariants: the same pages, tables and names as the verbs for one lease would give, group by group; `grow_rows` grows
all rows or none; it never publishes: what a row writes is published when it has been computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.memory.pool import Pool
from aengine.memory.slabs import Page
from aengine.prefix_cache.keys import ChainRows
from aengine.prefix_cache.lease import Lease
from aengine.prefix_cache.positional import PageRun, PositionalRules


class RowParts(NamedTuple):
    """New entries of one group's tables: of the row numbered rows[i], columns[i] is pages[i]."""

    group: int
    rows: list[int]
    columns: list[int]
    pages: list[int]


def grow_rows(
    pool: Pool, rules: Sequence[PositionalRules], leases: Sequence[Lease], starts: Sequence[int]
) -> list[RowParts] | None:
    """Make position starts[i] of leases[i], the first beyond its capacity, writable; None: pages are short."""
    everybody = list(range(len(leases)))
    lacking = [everybody if len(rules) == 1 else _lacking(rule, leases, starts) for rule in rules]
    taken = pool.try_take([len(rows) for rows in lacking])
    if taken is None:
        return None
    parts = []
    for rule, rows, pages in zip(rules, lacking, taken, strict=True):
        if not rows:
            continue
        these = leases if rows is everybody else [leases[row] for row in rows]
        parts.append(RowParts(rule.index, rows, _extend_rows(rule, these, pages), [page.id for page in pages]))
    if len(rules) > 1:
        for lease in leases:
            lease.capacity_tokens = min(len(lease.holds[rule.index].pages) * rule.page for rule in rules)
    return parts


def _lacking(rule: PositionalRules, leases: Sequence[Lease], starts: Sequence[int]) -> list[int]:
    """Rows whose next position lies behind their last page."""
    group, size = rule.index, rule.page
    pairs = zip(leases, starts, strict=True)
    return [row for row, (lease, start) in enumerate(pairs) if start >= len(lease.holds[group].pages) * size]


def _extend_rows(rule: PositionalRules, leases: Sequence[Lease], pages: Sequence[Page]) -> list[int]:
    """One page more for each lease, whose next position is the page's first; returns their table columns."""
    group, size = rule.index, rule.page
    columns = []
    for lease, page in zip(leases, pages, strict=True):
        run = lease.holds[group]
        held = run.pages
        at = len(held)
        assert run.sent == at, f"{lease}: entries of its table were never told"
        page.holder, page.index = lease.serial, at
        held.append(page)
        run.sent = at + 1
        columns.append(at)
        lease.tokens_ready = at * size + 1
        lease.capacity_tokens = (at + 1) * size
    return columns


class Cohort:
    """Leases of a cache with one group whose next positions all begin a page: they do so again and again, as long as
    they advance together. To be left behind when a step has failed: leases may publish nothing any more.

    It touches as little as it can of each lease: with thousands of rows every object is out of the processor's reach
    by the time a row crosses its next page. What leases note for `grow` and `commit`, these bring up to date.
    """

    def __init__(self, rule: PositionalRules, leases: Sequence[Lease], *, enabled: bool) -> None:
        self._rule = rule
        self._need = (len(leases),)
        self._leases = tuple(leases)
        self._runs: list[PageRun] = [lease.holds[rule.index] for lease in leases]
        self._held = [run.pages for run in self._runs]
        self._movable = rule.pool.groups[rule.index].slots > 1
        self.idle = rule.full and not enabled  # `commit` has nothing to do
        self.lag = len(self._held[0]) - self._runs[0].keyed  # pages of each that are not offered to the cache yet
        self.commits = rule.full and all(map(self._in_step, leases, self._runs))
        waiting = range(self.lag, 0, -1) if self.commits else ()
        self._filling: deque[Sequence[Page | None]] = deque([pages[-back] for pages in self._held] for back in waiting)
        self._chains = ChainRows([lease.chain for lease in leases]) if self.commits else None

    def _in_step(self, lease: Lease, run: PageRun) -> bool:
        """Whether it publishes, as many pages later as the others, and what it has published is what is hashed."""
        offered = len(run.pages) - self.lag
        return lease.publishes and lease.chain.plain and offered == run.keyed == len(lease.chain.digests)

    def grow(self) -> list[int] | None:
        """A page more for each: their ids; None: pages are short. As `grow_rows`."""
        taken = self._rule.pool.try_take(self._need)
        if taken is None:
            return None
        pages, size = taken[0], self._rule.page
        if self.commits:
            self._filling.append(pages)
        for lease, run, held, page in zip(self._leases, self._runs, self._held, pages, strict=True):
            held.append(page)
            run.sent = at = len(held)
            lease.capacity_tokens = at * size
        if self._movable:
            for lease, held, page in zip(self._leases, self._held, pages, strict=True):
                page.holder, page.index = lease.serial, len(held) - 1
        return [page.id for page in pages]

    def commit(self, ids: NDArray[np.int32]) -> None:
        """Each has filled its page with ids[i]. Only if it `commits`."""
        assert self._chains is not None
        keys = self._chains.extend(ids)
        for run in self._runs:
            run.keyed += 1
        rule = self._rule
        rule.journal.published += len(rule.pool.publish_all(rule.index, self._filling.popleft(), keys))


def commit_rows(rule: PositionalRules, leases: Sequence[Lease], counts: Sequence[int], ids: NDArray[np.int32]) -> None:
    """Name the first counts[i] pages of each lease; ids[i]: those of the last of them."""
    data, step, group = ids.tobytes(), rule.page * 4, rule.index
    pages: list[Page | None] = []
    keys: list[bytes] = []
    for row, (lease, count) in enumerate(zip(leases, counts, strict=True)):
        run = lease.holds[group]
        index = run.keyed
        if count <= index or not lease.publishes:
            continue
        chain = lease.chain
        if count == index + 1 and chain.plain and len(chain.digests) == index:
            run.keyed = count
            pages.append(run.pages[index])
            keys.append(chain.add(data[row * step : (row + 1) * step]))
        else:
            rule.publish(lease, run, count * rule.page, None)
    rule.journal.published += len(rule.pool.publish_all(group, pages, keys))
