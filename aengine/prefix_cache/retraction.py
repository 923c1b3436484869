"""A step failed: what it published or moved is worth nothing.

Owns: taking names back, and finding who has built on pages that hold nothing.
Does not know: why a step failed, what becomes of the leases.
Invariants: afterwards no page that the step should have written or copied has a name, so nobody can hit it again; a
lease that holds one publishes nothing any more.
"""

from __future__ import annotations

from collections.abc import Mapping

from aengine.memory.pool import Pool
from aengine.memory.slabs import Page
from aengine.prefix_cache.journal import Journal
from aengine.prefix_cache.lease import Lease
from aengine.prefix_cache.state import StateRules

NOBODY = -1  # in place of a lease's serial number

Owners = dict[Page, int]
Names = dict[tuple[int, bytes], int]  # by group and name


def retract(
    pool: Pool, journal: Journal, leases: Mapping[int, Lease], step: int, lease: Lease | None
) -> tuple[int, ...]:
    """See `PrefixCache.retract`. `leases`: all live ones, by serial number."""
    if lease is not None:
        lease.publishes = False
    spoiled: dict[int, int] = {}  # serial -> handle
    todo = [None if lease is None else lease.serial]
    while todo:
        pages, names = _take_back(pool, journal, step, todo.pop())
        if lease is None:
            _lose_moved(pool, journal, step, pages, names)
        for serial, holder in leases.items():
            if serial in spoiled or holder is lease:
                continue
            owners = [pages[page] for page in holder.held() if page in pages]
            owners += [names[name] for name in _adopted(holder) if name in names]
            holder.publishes = holder.publishes and not owners
            if any(owner != serial for owner in owners):
                spoiled[serial] = holder.handle
                if lease is not None:
                    todo.append(serial)
    return tuple(spoiled[serial] for serial in sorted(spoiled))


def _take_back(pool: Pool, journal: Journal, step: int, serial: int | None) -> tuple[Owners, Names]:
    """Un-publish. Returns the publisher by page, and by name: the page may have another name by now."""
    pages: Owners = {}
    names: Names = {}
    for page, key, owner in journal.take(step, serial):
        names[page.group, key] = owner
        if page.key is key:
            pages[page] = owner
            pool.unpublish(page)
    return pages, names


def _lose_moved(pool: Pool, journal: Journal, step: int, pages: Owners, names: Names) -> None:
    """The step may not have copied the pages it was to move: they are worthless to whoever holds them."""
    for page in journal.moved_by(step):
        pages[page] = NOBODY
        if page.key is not None:
            names[page.group, page.key] = NOBODY
            pool.unpublish(page)


def _adopted(lease: Lease) -> list[tuple[int, bytes]]:
    """(group, name) of states that the lease has gone on from; it may have let go of their pages."""
    pairs = [(rule.index, hold) for rule, hold in lease.pairs if isinstance(rule, StateRules)]
    return [(group, name) for group, hold in pairs for name in hold.adopted]
