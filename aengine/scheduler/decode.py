"""Which decode rows a step has, and their drafts.

Owns: choosing rows of one token within the budget.
Does not know: prompts, admission, results.
Invariants: oldest first; work per row in Python only where a row crosses a page or may get drafts; an older prompt is
not starved by rows that fill the budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aengine.scheduler.pages import grow, grow_together
from aengine.scheduler.plan_builder import PlanBuilder
from aengine.scheduler.speculation import plan_drafts
from aengine.types import Bools, Int64s

if TYPE_CHECKING:
    from aengine.scheduler.scheduler import Scheduler


def plan_decodes(scheduler: Scheduler, build: PlanBuilder) -> None:
    c = scheduler.columns
    if c.even:
        slots, build.unfed = scheduler.order, False
    else:
        slots = _ready_rows(scheduler, build)
    drafter = scheduler.drafter
    if drafter is not None and len(slots) <= drafter.rows_max:
        slots = plan_drafts(scheduler, drafter, slots, build)
    starts = c.scheduled[slots]
    crossing = (starts >= c.capacity[slots]).nonzero()[0]
    if len(crossing) and not grow_together(scheduler, slots[crossing], starts[crossing]):
        lacking = [slot for slot in slots[crossing].tolist() if not _grow_decode(scheduler, slot, build)]
        if lacking:
            slots = slots[~np.isin(slots, lacking)]
            starts = c.scheduled[slots]
    build.decode(slots, starts)


def _ready_rows(scheduler: Scheduler, build: PlanBuilder) -> Int64s:
    """Slots with one token to compute and room for the next, oldest first, as many as the budget holds."""
    c, order = scheduler.columns, scheduler.order
    left = c.expected - c.scheduled
    going = ~c.paused
    ready = (left == 1) & (c.expected < c.limit) & going
    build.unfed = bool(np.count_nonzero(left > 1))
    if scheduler.drafter is not None:
        ready &= ~c.drafting  # how many tokens it gives is not known
    mask = ready[order]
    rows = int(np.count_nonzero(mask))
    if rows >= build.left:
        room = _decode_room(scheduler, mask, ((left > 1) & going)[order], build.left)
        return np.asarray(order[mask][:room])
    if rows < len(order):
        return np.asarray(order[mask])
    if rows:
        c.even = int((c.limit - c.expected)[order].min())
    return order


def _decode_room(scheduler: Scheduler, ready: Bools, unfed: Bools, budget: int) -> int:
    """How many decode rows may run: all that the budget holds, but for a share of it that older prompts need.

    `ready` (at least `budget` rows) and `unfed` (prompts with more than one token to go) are in the order of age, as
    `scheduler.order`.
    """
    youngest = int(ready.nonzero()[0][budget - 1])
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
    if grow(scheduler, sequence, upto, build) is None:
        return False
    build.pin(slot)  # growth may have published a page that this row fills, or an item or a state that it computes
    return True
