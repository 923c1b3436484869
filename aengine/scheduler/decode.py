"""Which decode rows a step has, and their drafts.

Owns: choosing rows of one token, with draft tokens behind some of them, within the budget.
Does not know: prompts, admission, results.
Invariants: oldest first; work per row in Python only where a row crosses a page or gets drafts; an older prompt is not
starved by rows that fill the budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aengine.scheduler.plan_builder import PlanBuilder
from aengine.scheduler.recurrent import draft_room
from aengine.types import Bools, Int64s

if TYPE_CHECKING:
    from aengine.scheduler.scheduler import Scheduler


def plan_decodes(scheduler: Scheduler, build: PlanBuilder) -> None:
    c, order = scheduler.columns, scheduler.order
    total = c.known[order] + c.pending[order]
    left = total - c.scheduled[order]
    going = ~c.paused[order]
    ready = (left == 1) & (total < c.limit[order]) & going & ~c.drafting[order]
    if scheduler.drafter is not None:
        ready &= c.pending[order] == 0  # a draft needs to know the last token
    slots = order[ready][: _decode_room(scheduler, ready, (left > 1) & going, build.left)]
    if scheduler.drafter is not None:
        slots = _plan_drafts(scheduler, slots, build)
    crossing = c.scheduled[slots] >= c.capacity[slots]
    if crossing.any():
        lacking = [slot for slot in slots[crossing].tolist() if not _grow_decode(scheduler, slot, build)]
        if lacking:
            slots = slots[~np.isin(slots, lacking)]
    build.decode(slots)


def _decode_room(scheduler: Scheduler, ready: Bools, unfed: Bools, budget: int) -> int:
    """How many decode rows may run: all that the budget holds, but for a share of it that older prompts need.

    `ready` and `unfed` (prompts with more than one token to go) are in the order of age, as `scheduler.order`.
    """
    rows = np.flatnonzero(ready)
    if len(rows) < budget:
        return budget
    youngest = int(rows[budget - 1])
    head = scheduler.waiting.head()
    waits = head is not None and bool(scheduler.free_slots) and head.key < scheduler.keys[youngest]
    if not waits and not unfed[:youngest].any():
        return budget
    return budget - max(1, min(scheduler.page_tokens, budget // 2))


def _grow_decode(scheduler: Scheduler, slot: int, build: PlanBuilder) -> bool:
    if slot in build.held:
        return False
    sequence = scheduler.at(slot)
    upto = int(scheduler.columns.scheduled[slot]) + 1
    if scheduler.grow(sequence, upto, build) is None:
        return False
    if scheduler.recurrent:  # growth may have published a page that this row fills, and names a state it will write
        build.pin(slot)
    return True


def _plan_drafts(scheduler: Scheduler, slots: Int64s, build: PlanBuilder) -> Int64s:
    """Give drafts to the rows the drafter has a guess for; returns the other rows."""
    assert scheduler.drafter is not None
    c = scheduler.columns
    plain: list[int] = []
    rows_left = len(slots)
    for slot in slots.tolist():
        sequence = scheduler.at(slot)
        known = int(c.known[slot])
        rows_left -= 1
        most = min(int(c.limit[slot]) - known - 1, build.left - rows_left - len(plain) - 1)
        if scheduler.recurrent and sequence.lease is not None:
            most = min(most, draft_room(sequence.lease, int(c.scheduled[slot]), known))
        if most <= 0 or sequence.request.sampling.needs_history or sequence.slot in build.held:
            plain.append(slot)
            continue
        drafts = scheduler.drafter.propose(c.tokens[slot, :known], most)
        if not len(drafts) or scheduler.try_grow(sequence, known + len(drafts), build.step, len(drafts)).short:
            plain.append(slot)
            continue
        scheduler.drafted_tokens += len(drafts)
        build.row(slot, 1 + len(drafts), 1 + len(drafts), np.asarray(drafts, np.int32))
    return np.array(plain, np.int64)
