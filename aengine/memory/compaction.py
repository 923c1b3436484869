"""Large pages emptied by moving live pages together.

Owns: which pages move where; the exchange of addresses between two pages.
Does not know: who holds pages, how bytes are copied, when compaction is worth it.
Invariants: a slab is emptied whole or not touched; the cheapest one first, ties by group and age in its level. Pages
move into free or evictable slots of fuller slabs of their group, never into an address that an unretired step names. A
moved page keeps its identity, holders and name; the page it changes places with stands for the address it left, which
is fenced until the step that copies has retired. O(pages moved) amortised.
"""

from __future__ import annotations

from typing import NamedTuple

from aengine.memory.pool import Pool
from aengine.memory.slabs import GroupSlabs, Page, Slab


class Moved(NamedTuple):
    """`page` has gone from page id `source` to page id `target` of its group. To be copied in the order of moves."""

    page: Page
    source: int
    target: int


def compact(pool: Pool, slabs: int, step: int, most_bytes: int) -> list[Moved]:
    """Empty up to `slabs` large pages by moves that `step`, not launched yet, will carry; they come back when it has
    retired. Copies at most `most_bytes`, or one slab's pages if that is more."""
    moves: list[Moved] = []
    left = most_bytes
    while slabs > 0:
        found = _cheapest(pool)
        if found is None:
            break
        group, slab, cost = found
        if moves and cost > left:
            break
        _vacate(pool, group, slab, step, moves)
        left -= cost
        slabs -= 1
    return moves


def _cheapest(pool: Pool) -> tuple[GroupSlabs, Slab, int] | None:
    """The slab that costs fewest bytes to empty, of those whose pages have room elsewhere."""
    best: tuple[GroupSlabs, Slab, int] | None = None
    for group in pool.movable:
        slab = _sparsest(group)
        if slab is None:
            continue
        held = slab.live - slab.fenced
        room = group.free_active + group.cached_active - slab.free_slots - slab.cached
        cost = held * pool.plan.groups[group.index].payload
        if held <= room and (best is None or cost < best[2]):
            best = group, slab, cost
    return best


def _sparsest(group: GroupSlabs) -> Slab | None:
    free, cached = group.with_free.sparsest(), group.with_cached.sparsest()
    if free is None or (cached is not None and cached.live < free.live):
        return cached
    return free


def _vacate(pool: Pool, group: GroupSlabs, slab: Slab, step: int, moves: list[Moved]) -> None:
    """Move all held pages of `slab` away and forget its cached ones."""
    pool.spare.close(group, slab)
    for page in group.cached_pages(slab):
        group.evicted_by_steal += 1
        pool.unpublish(page)
    victims: list[Page] = []
    for page in group.held_pages(slab):
        target = _slot(pool, group, victims)
        moves.append(Moved(page, page.id, target.id))
        _exchange(pool, group, page, target, step)


def _slot(pool: Pool, group: GroupSlabs, victims: list[Page]) -> Page:
    """A free page of the fullest slab that has one, or of a fuller one that has a cached page. `victims`: the cached
    pages of the slab last chosen for that, the oldest last."""
    free, cached = group.with_free, group.with_cached
    if cached.occupied.bit_length() > free.occupied.bit_length():
        if not victims or victims[-1].slab.cached_at < 0:
            victims[:] = sorted(group.cached_pages(cached.fullest()), key=_youngest_first)
        group.evicted += 1
        page = victims.pop()
        pool.unpublish(page)
        return page
    slab = free.fullest()
    return group.page(slab, (slab.free & -slab.free).bit_length() - 1)


def _youngest_first(page: Page) -> int:
    return -page.stamp


def _exchange(pool: Pool, group: GroupSlabs, page: Page, target: Page, step: int) -> None:
    """`page` takes the address of the free page `target`, which takes its own, fenced."""
    source, slab = page.slab, target.slab
    slab.free ^= 1 << target.slot
    slab.free_slots -= 1
    slab.live += 1
    group.free_active -= 1
    group.file(slab)
    page.id, target.id = target.id, page.id
    page.slot, target.slot = target.slot, page.slot
    page.slab, target.slab = slab, source
    group.pages[page.id], group.pages[target.id] = page, target
    page.last = max(page.last, step)
    group.moved += 1
    source.fenced += 1
    group.fenced += 1
    pool.put_behind_fence(target, step)
