"""Pages for running sequences: growing tables, and making room when pages are short.

Owns: asking the cache for pages, whom to preempt for them, when live pages are moved together, telling the device what
changed in its tables.
Does not know: why a row grows; what preemption does to a sequence.
Invariants: only younger sequences make room, the youngest first, and none while it is in flight; nobody is preempted
for what the fence or moving pages will give.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import add
from typing import TYPE_CHECKING

import numpy as np

from aengine.prefix_cache import Grown, TablePart
from aengine.types import Int32s, Int64s, PageMove, TableDelta

if TYPE_CHECKING:
    from aengine.scheduler.plan_builder import PlanBuilder
    from aengine.scheduler.scheduler import Scheduler
    from aengine.scheduler.sequence import Sequence

SPARE_LARGE = 4  # large pages kept in reserve by moving pages together, before they are short
SPARE_SHARE = 32  # but at most one in so many


def grow(scheduler: Scheduler, sequence: Sequence, upto: int, build: PlanBuilder) -> Grown | None:
    """Pages for positions below `upto`, making room from younger sequences if need be; None: not this step."""
    while True:
        grown = try_grow(scheduler, sequence, upto, build.step)
        if not grown.short:
            return grown
        if not _make_room(scheduler, sequence, grown.need, build):
            scheduler.lacking = True
            scheduler.large_lacking += scheduler.cache.pool.large_needed(grown.need)
            return None


def try_grow(scheduler: Scheduler, sequence: Sequence, upto: int, step: int, drafts: int = 0) -> Grown:
    """The same, from what is free; nothing has changed if the result says `short`."""
    c, slot = scheduler.columns, sequence.slot
    assert sequence.lease is not None
    start, known = int(c.scheduled[slot]), int(c.known[slot])
    grown = scheduler.cache.grow(sequence.lease, upto, step, known, start=start, drafts=drafts)
    tell(scheduler, slot, grown.deltas)
    scheduler.media.grown(slot, grown)
    c.capacity[slot] = sequence.lease.capacity_tokens
    return grown


def grow_together(scheduler: Scheduler, slots: Int64s, starts: Int32s) -> bool:
    """A page for each of `slots`, which has none for position starts[i]; False when that is not the way, or pages are
    short."""
    if not scheduler.cache.grows_rows:
        return False
    leases = scheduler.leases(slots)
    parts = scheduler.cache.grow_rows(leases, starts.tolist())
    if parts is None:
        return False
    for group, rows, columns, pages in parts:
        crossing = slots if len(rows) == len(slots) else slots[rows]
        delta = TableDelta(group, crossing, np.array(columns, np.int64), np.array(pages, np.int32))
        scheduler.tables.append(delta)
    stride = scheduler.columns.stride
    scheduler.columns.capacity[slots] = starts + stride if stride else [lease.capacity_tokens for lease in leases]
    return True


def tell(scheduler: Scheduler, slot: int, parts: Iterable[TablePart]) -> None:
    """Table entries for the next plan. Pages of media items are placed, not tabulated."""
    for group, first, pages in parts:
        if group not in scheduler.media.groups:
            scheduler.tables.append(TableDelta.run(slot, group, first, pages))


def _make_room(scheduler: Scheduler, sequence: Sequence, need: tuple[int, ...], build: PlanBuilder) -> bool:
    """Preempt younger sequences for `need` pages per group; True when some were freed at once.

    What the fence will give back, and what moving pages together gives, is worth waiting for. A victim in flight is
    only held out of this step: it can be preempted when its last step has retired.
    """
    cache, c = scheduler.cache, scheduler.columns
    less = (0,) * len(need)
    freed = False
    for slot in scheduler.order[::-1].tolist():
        victim = scheduler.at(slot)
        if victim.key <= sequence.key or cache.pool.packs(need, less):
            break
        assert victim.lease is not None
        if build.has_row(slot):  # a draft row of this very step: it goes when the step has retired
            less = tuple(map(add, less, cache.reclaimable_pages(victim.lease)))
            c.pause(slot)
            scheduler.leaving.append(victim)
            continue
        build.hold(slot)
        if c.last_step[slot] <= scheduler.retired:
            scheduler.preempt(victim)
            freed = True
        else:
            less = tuple(map(add, less, cache.reclaimable_pages(victim.lease)))
    return freed


def compact(scheduler: Scheduler, step: int) -> tuple[PageMove, ...]:
    """Empty large pages before they are short: to have a few in reserve, and what sequences lack now."""
    pool = scheduler.cache.pool
    wanted = max(scheduler.spare_large, scheduler.large_lacking) - pool.spare.count
    if wanted <= 0:
        return ()
    compaction = scheduler.cache.compact(step, wanted)
    for lease, (group, first, pages) in compaction.tables:
        if group not in scheduler.media.groups:
            scheduler.tables.append(TableDelta.run(scheduler.by_handle[lease.handle].slot, group, first, pages))
    for lease, group, item in compaction.items:
        sequence = scheduler.by_handle[lease.handle]
        scheduler.media.moved(sequence.slot, sequence.request, lease, group, item)
    return tuple(PageMove(page.group, source, target) for page, source, target in compaction.moves)


def spare_large(usable: int) -> int:
    """Large pages to keep in reserve, of `usable` in all."""
    return min(SPARE_LARGE, usable // SPARE_SHARE)
