"""Growing one lease: pages for its next positions in every group.

Owns: taking them for all groups or for none, what the device is told of them, publishing what the step will compute.
Does not know: hits, other leases.
Invariants: when pages are short nothing has changed; a lease publishes full pages of known ids only.
"""

from __future__ import annotations

from aengine.memory.pool import Pool
from aengine.prefix_cache.items import ItemRules
from aengine.prefix_cache.lease import Grown, Lease, TablePart
from aengine.prefix_cache.retention import UNBOUNDED


def grow_all(pool: Pool, lease: Lease, frontier: int, upto: int, step: int, drafts: int) -> Grown:
    """Make positions from `frontier` up to `upto` writable by `step`, of which `drafts` hold unverified ids."""
    need = [rule.prepare(lease, hold, frontier, upto, step, drafts) for rule, hold in lease.pairs]
    pages = pool.try_take(need)
    if pages is None:
        return Grown(frontier, (), pool.shortage(need) or (), need=tuple(need))
    lease.tokens_ready = upto
    tokens = upto if upto < lease.known else lease.known
    parts: list[TablePart] = []
    capacity = UNBOUNDED
    for (rule, hold), mine in zip(lease.pairs, pages, strict=True):
        fits = rule.extend(lease, hold, mine, frontier, upto, step, parts)
        if fits < capacity:
            capacity = fits
    lease.capacity_tokens = capacity
    fresh = _fresh_items(lease) if lease.media else ()
    if lease.publishes:
        for rule, hold in lease.pairs:
            rule.publish(lease, hold, tokens, step)
    return Grown(frontier, tuple(parts), (), fresh)


def _fresh_items(lease: Lease) -> tuple[tuple[int, int], ...]:
    """Items without published pages: the step computes them."""
    return tuple((rule.index, item) for rule, hold in lease.pairs if isinstance(rule, ItemRules) for item in hold.fresh)


def grow_one(pool: Pool, lease: Lease, frontier: int, upto: int, step: int) -> Grown:
    """The same by at most one page of the only group, which follows positions: decode rows do so once a page."""
    rule, run = lease.pairs[0]
    parts: tuple[TablePart, ...] = ()
    if upto > len(run.pages) * rule.page:
        page = pool.take_one(rule.index)
        if page is None:
            return Grown(frontier, (), (1,), need=(1,))
        run.append(page)
    if run.unsent():
        parts = (run.news(),)
    lease.tokens_ready = upto
    lease.capacity_tokens = len(run.pages) * rule.page
    if lease.publishes:
        tokens = upto if upto < lease.known else lease.known
        if tokens >= (run.keyed + 1) * rule.page:
            rule.publish(lease, run, tokens, step)
    return Grown(frontier, parts)
