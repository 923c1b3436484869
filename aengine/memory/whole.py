"""Pages that are large pages themselves, many at once: the usual model, whose rows take many in every step.

Owns: taking such pages from unowned slabs, and from the cache of a pool that has no others.
Does not know: which of the two is right; the pool decides, and has counted that there are enough.
Invariants: the same pages in the same order as one by one, and the same records afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aengine.memory.slabs import GroupSlabs, Page

if TYPE_CHECKING:
    from aengine.memory.pool import Pool


def claim_whole(pool: Pool, group: GroupSlabs, count: int, pages: list[Page]) -> int:
    """Append the pages of up to `count` unowned slabs, as many as there are; returns how many."""
    unowned = pool.spare.unowned
    opened = min(count, len(unowned))
    slabs = unowned[: -opened - 1 : -1]
    del unowned[len(unowned) - opened :]
    index, element, made = group.index, group.element, group.pages
    for slab in slabs:
        slab.group, slab.live = index, 1
        if slab.element is not element and slab.element != element:
            pool.retype(slab, element)
        page = made[slab.index] or group.page(slab, 0)
        page.ref = 1
        pages.append(page)
    group.owned += opened
    group.live += opened
    return opened


def evict_whole(pool: Pool, group: GroupSlabs, count: int, pages: list[Page]) -> None:
    """Append the `count` oldest cached pages of the only group. Their slabs are idle, so both lists begin with them."""
    names, page = pool.names[group.index], group.lru.next
    for _ in range(count):
        slab, key, after = page.slab, page.key, page.next
        assert key is not None
        del names[key]
        page.key = None
        page.where, page.ref = 0, 1
        page.prev = page.next = page
        slab.cached, slab.live = 0, 1
        slab.prev = slab.next = slab
        pages.append(page)
        page = after
    lru, idle = group.lru, pool.spare.idle
    lru.next, page.prev = page, lru
    first = idle if page is lru else page.slab
    idle.next, first.prev = first, idle
    group.cached -= count
    group.live += count
    group.evicted += count
    pool.spare.idle_slabs -= count
