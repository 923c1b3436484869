"""Which decode rows a step has, and their drafts.

Owns: choosing rows of one token, with draft tokens behind some of them, within the budget.
Does not know: prompts, admission, results.
Invariants: oldest first; work per row in Python only where a row crosses a page or gets drafts; an older prompt is not
starved by rows that fill the budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aengine.scheduler.pages import grow, grow_together, try_grow
from aengine.scheduler.plan_builder import PlanBuilder
from aengine.scheduler.recurrent import draft_room
from aengine.types import Bools, Int64s

if TYPE_CHECKING:
    from aengine.scheduler.scheduler import Scheduler


def plan_decodes(scheduler: Scheduler, build: PlanBuilder) -> None:
    c = scheduler.columns
    if c.even:
        slots, build.unfed = scheduler.order, False
    else:
        slots = _ready_rows(scheduler, build)
    if scheduler.drafter is not None:
        slots = _plan_drafts(scheduler, slots, build)
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
        ready &= ~c.drafting & (c.expected == c.known)  # a draft needs to know the last token
    mask = ready[order]
    rows = int(np.count_nonzero(mask))
    if rows >= build.left:
        room = _decode_room(scheduler, mask, ((left > 1) & going)[order], build.left)
        return np.asarray(order[mask][:room])
    if rows < len(order):
        return np.asarray(order[mask])
    if rows and scheduler.drafter is None:
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
        guessable = not sequence.request.sampling.needs_history and sequence.matcher is None
        if most <= 0 or not guessable or sequence.slot in build.held:
            plain.append(slot)
            continue
        drafts = scheduler.drafter.propose(c.tokens[slot, :known], most)
        if not len(drafts) or try_grow(scheduler, sequence, known + len(drafts), build.step, len(drafts)).short:
            plain.append(slot)
            continue
        scheduler.drafted_tokens += len(drafts)
        build.row(slot, 1 + len(drafts), 1 + len(drafts), np.asarray(drafts, np.int32))
    return np.array(plain, np.int64)
