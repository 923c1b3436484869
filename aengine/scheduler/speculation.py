"""Which decode rows bring drafts, and when a step waits so that they can.

Owns: asking the drafter about the rows it may guess for, pages for drafts, the waiting; the count of drafts.
Does not know: how guesses are made, what makes them pay.
Invariants: nothing here is called without a drafter or with more rows than it wants to hear of. A step waits only while
another is in flight, so something always moves; while a row with drafts is in flight all rows wait, so that they go on
together. No drafts for rows under penalties, whose history the device keeps token by token, nor under a grammar; and
none while prompts are computed: steps are long then, and are overlapped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from aengine.scheduler.drafts import Drafter, DraftRow
from aengine.scheduler.pages import try_grow
from aengine.scheduler.plan_builder import PlanBuilder
from aengine.scheduler.recurrent import draft_room
from aengine.types import NO_ROWS, Int64s

if TYPE_CHECKING:
    from aengine.scheduler.scheduler import Scheduler


@dataclass(slots=True)
class DraftCounts:
    """`rows` with drafts, one a step; their `drafted` tokens; the `accepted` ones, and those by place in a row."""

    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=list)

    def launched(self, drafts: int) -> None:
        self.rows += 1
        self.drafted += drafts
        self.by_position += [0] * (drafts - len(self.by_position))

    def retired(self, accepted: int) -> None:
        self.accepted += accepted
        for position in range(accepted):
            self.by_position[position] += 1


def waits_for_drafts(scheduler: Scheduler, drafter: Drafter) -> bool:
    """Whether nothing should be planned before the step in flight has retired."""
    c, order = scheduler.columns, scheduler.order
    if not scheduler.in_flight or not len(order):
        return False
    if c.drafting[order].any():
        return True
    if _has_prompts(scheduler):
        return False
    unknown = order[(c.expected > c.known)[order]]
    rows = [row for slot in unknown.tolist() if (row := _draft_row(scheduler, slot)) is not None]
    return bool(rows) and drafter.waits(rows, len(order) - len(rows))


def plan_drafts(scheduler: Scheduler, drafter: Drafter, slots: Int64s, build: PlanBuilder) -> Int64s:
    """Give drafts to those of `slots` whose drafts pay; returns the other rows."""
    c = scheduler.columns
    told = slots[c.expected[slots] == c.known[slots]]
    room = build.left - len(slots)
    if not len(told) or room <= 0 or _has_prompts(scheduler):
        return slots
    rows = [row for slot in told.tolist() if (row := _draft_row(scheduler, slot)) is not None]
    if not rows:
        return slots
    drafted: list[int] = []
    for row, drafts in zip(rows, drafter.propose(rows, len(slots) - len(rows), room), strict=True):
        sequence = scheduler.at(row.slot)
        if not len(drafts) or row.slot in build.held:
            continue
        upto = len(row.ids) + len(drafts)
        if not try_grow(scheduler, sequence, upto, build.step, len(drafts)).short:
            scheduler.drafts.launched(len(drafts))
            build.row(row.slot, 1 + len(drafts), 1 + len(drafts), np.array(drafts, np.int32))
            drafted.append(row.slot)
    if len(drafted) == len(slots):
        return NO_ROWS
    return slots[~np.isin(slots, drafted)] if drafted else slots


def _has_prompts(scheduler: Scheduler) -> bool:
    """Whether a prompt is being computed, or could be admitted."""
    c = scheduler.columns
    if np.count_nonzero((c.expected - c.scheduled > 1) & ~c.paused):
        return True
    head = scheduler.waiting.head()
    return head is not None and bool(scheduler.free_slots) and head.request.handle != scheduler.blocked[0]


def _draft_row(scheduler: Scheduler, slot: int) -> DraftRow | None:
    """The row as the drafter sees it, if drafts may follow its known tokens and those in flight."""
    c, sequence = scheduler.columns, scheduler.at(slot)
    if c.paused[slot] or sequence.matcher is not None or sequence.request.sampling.needs_history:
        return None
    known = c.known.item(slot)
    unknown = c.expected.item(slot) - known
    most = c.limit.item(slot) - known - 1 - unknown
    if scheduler.recurrent and sequence.lease is not None:
        most = min(most, draft_room(sequence.lease, c.scheduled.item(slot), known + unknown))
    return DraftRow(slot, sequence.request.handle, c.tokens[slot, :known], unknown, most) if most > 0 else None
