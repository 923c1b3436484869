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

from aengine.memory.pool import Pool
from aengine.memory.slabs import Page
from aengine.prefix_cache.keys import extend_all
from aengine.prefix_cache.lease import Lease, holds_of
from aengine.prefix_cache.positional import PositionalRules


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
    for lease in leases:
        lease.leave()
    for lease, run, page in zip(leases, holds_of(leases, group), pages, strict=True):
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
    runs = holds_of(leases, rule.index)
    rows = []
    for row, (lease, run, count) in enumerate(zip(leases, runs, counts, strict=True)):
        if count == run.keyed + 1 and lease.publishes and lease.chain.ends_at(run.keyed):
            rows.append(row)
        elif count > run.keyed and lease.publishes:
            rule.publish(lease, run, count * rule.page, None)
    if len(rows) < len(leases):
        leases, runs, ids = [leases[row] for row in rows], [runs[row] for row in rows], ids[rows]
    if not rows:
        return
    keys = extend_all([lease.chain for lease in leases], ids)
    pages = [run.pages[run.keyed] for run in runs]
    for run in runs:
        run.keyed += 1
    rule.journal.published += rule.pool.publish_fresh(rule.index, pages, keys)
