"""The invariants of pool and leases, checked the slow way.

Owns: one function that recounts everything from the pages themselves.
Does not know: how the counters are kept.
Invariants: reads only.
"""

from __future__ import annotations

from collections.abc import Sequence

from aengine.memory.pool import Pool
from aengine.memory.slabs import GroupSlabs, Page, Slab, Where


def audit(pool: Pool, holds: Sequence[Sequence[Page]]) -> None:
    """Raise AssertionError on the first broken invariant. `holds`: the pages of each live lease."""
    refs: dict[Page, int] = {}
    for pages in holds:
        for page in pages:
            refs[page] = refs.get(page, 0) + 1
    for group in pool.groups:
        _audit_pages(pool, group, refs)
        _audit_slabs(pool, group)
    _audit_idle(pool)
    stats = pool.stats()
    parts = stats.live_bytes + stats.fenced_bytes + stats.cached_bytes + stats.slab_free_bytes + stats.pitch_bytes
    slack = sum(
        g.owned * (pool.plan.large_bytes - g.slots * p.pitch)
        for g, p in zip(pool.groups, pool.plan.groups, strict=True)
    )
    assert parts + slack + stats.unowned_bytes + stats.null_bytes == pool.plan.large_pages * pool.plan.large_bytes, (
        stats
    )


def _audit_pages(pool: Pool, group: GroupSlabs, refs: dict[Page, int]) -> None:
    live = cached = fenced = named = 0
    names = pool.names[group.index]
    for page in group.pages:
        if page is None:
            continue
        assert page.ref == refs.get(page, 0), f"{page}: {refs.get(page, 0)} leases hold it"
        in_use = page.ref > 0
        is_cached = not in_use and page.where == Where.CACHED
        is_fenced = not in_use and page.where == Where.FENCED
        free = not (in_use or is_cached or is_fenced)
        slab = page.slab
        assert free == (slab.group != group.index or bool(slab.free >> page.slot & 1)), f"{page} in {slab}"
        assert page.id >= group.slots, f"null page in use: {page}"
        if page.key is not None:
            assert names.get(page.key) is page, f"{page} is not the page of its name"
            assert not free, f"{page} is free but named"
            named += 1
        assert (page.next is not page) == is_cached, f"{page}: list links"
        live, cached, fenced = live + in_use, cached + is_cached, fenced + is_fenced
    assert (live, cached, fenced) == (group.live, group.cached, group.fenced), (group.index, live, cached, fenced)
    assert len(names) == named
    stamps = []
    page = group.lru.next
    while page is not group.lru:
        assert page.where == Where.CACHED, page
        assert page.key is not None, page
        assert page.next.prev is page
        stamps.append(page.stamp)
        page = page.next
    assert len(stamps) == cached
    assert stamps == sorted(stamps), "LRU order"


def _audit_slabs(pool: Pool, group: GroupSlabs) -> None:
    free_active = cached_active = owned = 0
    for slab in pool.slabs:
        if slab.group != group.index:
            continue
        owned += 1
        _audit_slab(group, slab)
        if slab.live and not slab.closed:
            free_active += slab.free_slots
            cached_active += slab.cached
    assert (owned, free_active, cached_active) == (group.owned, group.free_active, group.cached_active), group.index
    for levels, at in ((group.with_free, "free_at"), (group.with_cached, "cached_at")):
        for level, row in enumerate(levels.rows):
            assert bool(row) == bool(levels.occupied >> level & 1), "mask of levels"
            assert all(getattr(slab, at) == level for slab in row.values())


def _audit_slab(group: GroupSlabs, slab: Slab) -> None:
    live = fenced = cached = 0
    first = slab.index * group.slots
    for page in group.pages[first : first + group.slots]:
        if page is None:
            continue
        if page.where == Where.FENCED:
            fenced += 1
            live += 1
        elif page.ref > 0:
            live += 1
        cached += page.where == Where.CACHED
    assert (live, fenced, cached) == (slab.live, slab.fenced, slab.cached), slab
    assert slab.free.bit_count() == slab.free_slots == group.slots - live - cached, slab
    assert live or cached, f"{slab} holds nothing"
    level = -1 if slab.closed or not slab.live else slab.live
    assert slab.free_at == (level if slab.free else -1), slab
    assert slab.cached_at == (level if slab.cached else -1), slab
    assert not slab.closed or slab.live == slab.fenced > 0, f"{slab} is closed and in use"
    assert (slab.index in group.idle_free) == (not slab.live and slab.free != 0), slab
    assert (slab.next is not slab) == (slab.live == 0), f"{slab}: idle list"


def _audit_idle(pool: Pool) -> None:
    idle = [slab for slab in pool.slabs if slab.group >= 0 and slab.live == 0]
    assert len(idle) == pool.idle_slabs
    assert sum(slab.closed for slab in pool.slabs) == pool.spare.closed
    owned = sum(group.owned for group in pool.groups)
    assert owned + pool.unowned_slabs == pool.plan.usable, "slabs lost"
    assert pool.slabs[0].group == -1, "slab of the null pages in use"
    unused = [slab.element is None for slab in pool.slabs[1:]]
    assert unused == [slab.index >= pool.spare.reached for slab in pool.slabs[1:]], "used slabs behind unused ones"
