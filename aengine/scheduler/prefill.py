"""Which prompts a step works on: admission of waiting sequences, and chunks.

Owns: giving slots to waiting sequences, sharing what decode rows leave of the budget, cutting chunks.
Does not know: decode rows, results.
Invariants: a sequence is admitted only when its whole prompt has room beside what running ones are owed, once pages in
use have been moved together; nobody is preempted for an admission; a chunk ends where the cache wants a checkpoint.
"""

from __future__ import annotations

import bisect
from operator import add
from typing import TYPE_CHECKING

import numpy as np

from aengine.scheduler.chunks import share_budget
from aengine.scheduler.media import media_items
from aengine.scheduler.pages import grow, tell
from aengine.scheduler.recurrent import ready_rows
from aengine.types import SlotSetup

if TYPE_CHECKING:
    from aengine.prefix_cache import Lease
    from aengine.scheduler.plan_builder import PlanBuilder
    from aengine.scheduler.scheduler import Scheduler
    from aengine.scheduler.sequence import Sequence


def plan_prefills(scheduler: Scheduler, build: PlanBuilder) -> None:
    if build.left <= 0 or not (build.unfed or (scheduler.free_slots and len(scheduler.waiting))):
        return
    c, order = scheduler.columns, scheduler.order
    unfed = order[((c.expected - c.scheduled > 1) & ~c.paused)[order]]
    fresh = _admit(scheduler)
    rows = sorted([scheduler.at(slot) for slot in unfed.tolist()] + fresh, key=lambda s: s.key)
    if scheduler.recurrent:
        rows = ready_rows(rows, c)
    remaining = [int(c.known[s.slot] - c.scheduled[s.slot]) for s in rows]
    shares = share_budget(remaining, _prompt_budget(scheduler, build), scheduler.page_tokens)
    for sequence, share in zip(rows, shares, strict=True):
        if share > 0 and sequence.slot >= 0 and sequence.slot not in build.held:
            _plan_chunk(scheduler, sequence, min(share, build.left), build)


def _prompt_budget(scheduler: Scheduler, build: PlanBuilder) -> int:
    """What decode rows leave of the budget, or less when the step would take too long for them."""
    most = None if scheduler.pacer is None else scheduler.pacer.prompt_tokens(build.decodes)
    return build.left if most is None else min(build.left, most)


def _plan_chunk(scheduler: Scheduler, sequence: Sequence, share: int, build: PlanBuilder) -> None:
    """One chunk of at most `share` tokens, after whatever others have prefilled of the same prompt meanwhile."""
    c, slot = scheduler.columns, sequence.slot
    known = int(c.known[slot])
    assert sequence.lease is not None
    while True:
        start = int(c.scheduled[slot])
        upto = min(start + share, known, sequence.lease.next_boundary(start))
        grown = grow(scheduler, sequence, upto, build)
        if grown is None:
            return
        if grown.start < upto:
            break
        c.scheduled[slot] = grown.start  # all of the chunk was adopted: try the part behind it
    c.scheduled[slot] = grown.start
    count = upto - grown.start
    build.row(slot, count, 1 if upto == known else 0)
    targets = c.tokens[slot, grown.start + 1 : min(upto + 1, sequence.prompt_tokens)]
    if sequence.wants_prompt_logprobs and len(targets):
        build.prompt_targets(slot, targets.copy())


def _admit(scheduler: Scheduler) -> list[Sequence]:
    """Give slots to waiting sequences while a slot is free and their whole prompt has room; none while a running
    one is short of pages."""
    fresh: list[Sequence] = []
    if not scheduler.free_slots or not len(scheduler.waiting) or scheduler.lacking:
        return fresh
    owed, items = _owed_pages(scheduler), scheduler.media.owed()
    while scheduler.free_slots:
        sequence = scheduler.waiting.head()
        if sequence is None or scheduler.blocked == (sequence.request.handle, scheduler.room_version):
            break
        lease = _acquire(scheduler, sequence, scheduler.free_slots[-1])
        lacking = scheduler.media.lacking(lease, beside=items)
        need = scheduler.cache.owed_pages(lease, len(sequence.ids) + 1, tuple(lacking.values()))
        wanted = tuple(map(add, owed, need))
        if not scheduler.cache.pool.packs(wanted):
            scheduler.cache.withdraw(lease)
            scheduler.blocked = (sequence.request.handle, scheduler.room_version)
            break
        owed = wanted
        items |= lacking
        _start(scheduler, scheduler.waiting.pop(), lease)
        fresh.append(sequence)
    return fresh


def _owed_pages(scheduler: Scheduler) -> tuple[int, ...]:
    """Pages of each group for the known tokens and items of running sequences that have none yet."""
    c, order = scheduler.columns, scheduler.order
    owed = (0,) * len(scheduler.cache.capacity)
    for slot in order[c.known[order] > np.maximum(c.capacity[order], c.scheduled[order])].tolist():
        lease = scheduler.at(slot).lease
        assert lease is not None
        owed = tuple(map(add, owed, scheduler.cache.owed_pages(lease, int(c.known[slot]))))
    return tuple(map(add, owed, scheduler.cache.media_pages(tuple(scheduler.media.owed().values()))))


def _acquire(scheduler: Scheduler, sequence: Sequence, slot: int) -> Lease:
    request, known = sequence.request, len(sequence.ids)
    buffer = scheduler.columns.tokens[slot]
    buffer[:known] = sequence.ids
    return scheduler.cache.acquire(
        request.handle,
        buffer,
        known,
        salt=request.cache_salt,
        adapter=request.adapter,
        cause="resume" if sequence.admitted else request.cause,
        max_hit=sequence.hit_limit,
        media=media_items(request),
    )


def _start(scheduler: Scheduler, sequence: Sequence, lease: Lease) -> None:
    c, slot = scheduler.columns, scheduler.free_slots.pop()
    sequence.slot, sequence.lease = slot, lease
    scheduler.by_slot[slot], scheduler.lease_of[slot] = sequence, lease
    structured = sequence.matcher is not None
    c.occupy(slot, sequence.request, sequence.ids, lease.cached_tokens, structured=structured)
    c.capacity[slot] = lease.capacity_tokens
    at = bisect.bisect(scheduler.keys, sequence.key)
    scheduler.keys.insert(at, sequence.key)
    scheduler.order = np.concatenate([scheduler.order[:at], [slot], scheduler.order[at:]])
    scheduler.setups.append(_setup(scheduler, sequence))
    tell(scheduler, slot, lease.deltas())
    scheduler.media.start(slot, sequence.request, lease)
    if not sequence.admitted:
        sequence.admitted = True
        scheduler.outputs.admitted(sequence.request.handle, lease.cached_tokens)


def _setup(scheduler: Scheduler, sequence: Sequence) -> SlotSetup:
    request = sequence.request
    history = sequence.ids if request.sampling.needs_history else sequence.ids[:0]
    return SlotSetup(
        slot=sequence.slot,
        handle=request.handle,
        prompt_tokens=sequence.prompt_tokens,
        sampling=request.sampling,
        rules=request.rules,
        seed=request.seed,
        history_ids=history,
    )
