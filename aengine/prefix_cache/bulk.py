"""Many leases in one call: what steady decode asks of the cache in every step.

Owns: growing rows of one position each, over groups whose pages follow positions; publishing the pages they fill.
Does not know: slots, requests, how pages are chosen.
Invariants: the same pages, tables and names as the verbs for one lease would give, group by group; `grow_rows` grows
all rows or none; it never publishes: what a row writes is published when it has been computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.memory.naming import publish_fresh
from aengine.memory.pool import Pool
from aengine.memory.slabs import Page
from aengine.prefix_cache.keys import extend_all, leave_all
from aengine.prefix_cache.lease import Lease, holds_of, take_back
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
    for lease, run, page in zip(leases, take_back(leases, group), pages, strict=True):
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


def commit_rows(rule: PositionalRules, leases: Sequence[Lease], counts: Sequence[int], ids: NDArray[np.int32]) -> None:
    """Name the first counts[i] pages of each lease; ids[i]: those of the last of them."""
    runs: list[PageRun] = holds_of(leases, rule.index)
    chains = [lease.chain for lease in leases]
    known = leave_all(chains)
    rows, pages = [], []
    for row, (lease, run, digests, count) in enumerate(zip(leases, runs, known, counts, strict=True)):
        at = run.keyed
        if count <= at or not lease.publishes:
            continue
        page = run.pages[at]
        if count == at + 1 and len(digests) == at and lease.chain.plain and page is not None:
            run.keyed = count
            rows.append(row)
            pages.append(page)
        else:
            rule.publish(lease, run, count * rule.page, None)
    if len(rows) < len(leases):
        chains, known, ids = [chains[row] for row in rows], [known[row] for row in rows], ids[rows]
    if rows:
        keys = extend_all(chains, known, ids)
        rule.journal.published += publish_fresh(rule.pool, rule.index, pages, keys)
