"""Many leases in one call: what steady decode asks of the cache in every step.

Owns: growing rows of one position each, over groups whose pages follow positions; when they publish.
Does not know: slots, requests, how pages are chosen.
Invariants: the same pages, tables and names as the verbs for one lease would give, group by group; `grow_rows` grows
all rows or none; it never publishes: what a row writes is published when it has been computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aengine.memory.pool import Pool
from aengine.memory.slabs import Page
from aengine.prefix_cache.lease import Lease
from aengine.prefix_cache.positional import PageRun, PositionalRules

NEVER = 2**31 - 1  # fits a column of int32


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
    they advance together."""

    def __init__(self, rule: PositionalRules, leases: Sequence[Lease], *, enabled: bool) -> None:
        self._rule = rule
        self._enabled = enabled
        self._need = (len(leases),)
        self._pairs = [(lease, lease.holds[rule.index]) for lease in leases]
        self._filling = [len(run.pages) - 1 for _, run in self._pairs]  # the page that each will have filled next

    def grow(self) -> list[int] | None:
        """A page more for each: their ids; None: pages are short. As `grow_rows`."""
        taken = self._rule.pool.try_take(self._need)
        if taken is None:
            return None
        size, ids = self._rule.page, []
        for (lease, run), page in zip(self._pairs, taken[0], strict=True):
            held = run.pages
            page.holder, page.index = lease.serial, len(held)
            held.append(page)
            run.sent = at = len(held)
            lease.tokens_ready = lease.capacity_tokens + 1
            lease.capacity_tokens = at * size
            ids.append(page.id)
        return ids

    def commit(self) -> bool:
        """Each has filled a page, all of whose ids are known; False: `commit_rows` has to be told."""
        if not self._rule.full:
            return False
        if self._enabled:
            publish_rows(self._rule, self._pairs, self._filling)
            self._filling = [index + 1 for index in self._filling]
        return True


def commit_rows(
    rule: PositionalRules, leases: Sequence[Lease], computed: Sequence[int], known: Sequence[int]
) -> None:
    """`PrefixCache.commit` of many leases, with one group that keeps everything."""
    size, group = rule.page, rule.index
    pairs: list[tuple[Lease, PageRun]] = []
    last: list[int] = []
    for lease, done, ids in zip(leases, computed, known, strict=True):
        if done > lease.tokens_ready:
            lease.tokens_ready = done
        if ids > lease.known:
            lease.known = ids
        run = lease.holds[group]
        full = (done if done < ids else ids) // size
        if full > run.keyed:
            pairs.append((lease, run))
            last.append(full - 1)
    publish_rows(rule, pairs, last)


def publish_rows(rule: PositionalRules, pairs: Sequence[tuple[Lease, PageRun]], last: Sequence[int]) -> None:
    """Name the pages of each run up to and with index last[i], all of which have been computed."""
    pages: list[Page | None] = []
    keys: list[bytes] = []
    for (lease, run), index in zip(pairs, last, strict=True):
        if not lease.publishes:
            continue
        if index != run.keyed:
            rule.publish(lease, run, (index + 1) * rule.page, None)
            continue
        run.keyed = index + 1
        pages.append(run.pages[index])
        keys.append(lease.chain.next_key(index))
    rule.journal.published += len(rule.pool.publish_all(rule.index, pages, keys))
