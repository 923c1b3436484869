"""Steady decode: the same rows, one token each, step after step.

Owns: what such steps have in common, so that planning and accounting one costs few operations, none of them per row.
Does not know: prompts, drafts, failures, what a grammar forces; the search for rows, which finds out that a step is the
same again.
Invariants: there is a `SteadyRows` only while every running row decodes in every step since `since`; whoever comes,
goes or is paused ends it (`Columns.disturb`), and so does every step that is planned by looking. Plans and results are
those that looking would give. What it keeps of the columns nobody else changes meanwhile.

Rows here are in the order of the plan; the columns are by slot. As all running rows advance together, their columns
advance by adding `active`, which needs no index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aengine.scheduler.pages import grow_together
from aengine.types import NO_ROWS, Int32s, Int64s, MediaPlacement, PageMove, SlotSetup, StepPlan, TableDelta

if TYPE_CHECKING:
    from aengine.scheduler.columns import Columns
    from aengine.scheduler.scheduler import Scheduler

_NO_IDS = np.zeros(0, np.int32)
NEVER = 2**62


class Lane:
    """Rows that cross a page in the same steps."""

    def __init__(self, scheduler: Scheduler, slots: Int64s) -> None:
        cache, count = scheduler.cache, len(slots)
        self._slots = slots
        self._cohort = cache.cohort(scheduler.leases(slots))
        self._capacity = scheduler.columns.capacity[slots]
        self._stride = np.full(count, cache.cohort_tokens, np.int32)
        self._columns = self._capacity.astype(np.int64) // cache.cohort_tokens
        self._next = np.ones(count, np.int64)
        self._filling = scheduler.columns.first_page[slots] + self._columns - self._cohort.lag  # rows of `pages`
        self._filled = 0  # pages further by now

    def grow(self, scheduler: Scheduler) -> bool:
        """A page for each row, all of which have none left; False: pages are short."""
        pages = self._cohort.grow()
        if pages is None:
            return False
        scheduler.tables.append(TableDelta(0, self._slots, self._columns, np.array(pages, np.int32)))
        self._columns = self._columns + self._next
        np.add(self._capacity, self._stride, self._capacity)
        scheduler.columns.capacity[self._slots] = self._capacity
        return True

    def commit(self, scheduler: Scheduler) -> bool:
        """The cache hears that each row has filled a page; False: not this way."""
        cohort, c = self._cohort, scheduler.columns
        if cohort.commits:
            cohort.commit(c.pages[self._filled :].take(self._filling, 0))
            self._filled += 1
        return cohort.commits or cohort.idle


class SteadyRows:
    """Begun by a plan that had all running rows. `stride`: positions from one page border to the next, the same for all
    rows; or 0, if there is no such number. `launched`, `committed`: the newest steps of which that is true."""

    def __init__(self, columns: Columns, plan: StepPlan, stride: int) -> None:
        rows = len(plan.slots)
        self.since = self.launched = plan.step
        self.committed = plan.step - 1
        self.step = plan.step + 1
        self.slots, self.handles, self.starts = plan.slots, plan.handles, plan.starts
        self._deferred = plan.deferred
        self._columns = columns
        self._ones = columns.ones[:rows]
        self._stride = stride
        self._unseen = stride or NEVER  # in so many steps every row will have crossed a page
        self._lanes: dict[int, Int64s | Lane] = {}  # by the steps in which they cross, modulo `stride`; slots till then

    def grow(self, scheduler: Scheduler) -> bool:
        """Make the next position of every row writable; False when that has to be done row by row."""
        starts = self.starts + self._ones
        grown = self._grow_lane(scheduler) if self._unseen == 0 else self._grow_crossing(scheduler, starts)
        if grown:
            self.starts = starts
        return grown

    def _grow_crossing(self, scheduler: Scheduler, starts: Int32s) -> bool:
        crossing = (starts >= self._columns.capacity[self.slots]).nonzero()[0]
        self._unseen -= 1
        if not len(crossing):
            return True
        slots = self.slots[crossing]
        if not grow_together(scheduler, slots, starts[crossing]):
            return False
        if self._stride:
            self._lanes[self.step % self._stride] = slots
        return True

    def _grow_lane(self, scheduler: Scheduler) -> bool:
        at = self.step % self._stride
        lane = self._lanes.get(at)
        if lane is None:
            return True
        if not isinstance(lane, Lane):
            lane = self._lanes[at] = Lane(scheduler, lane)
        return lane.grow(scheduler)

    def lane(self, step: int) -> Lane | None:
        """The rows that cross a page in `step`, which is the newest or the next; None: they have to be looked for."""
        lane = self._lanes.get(step % self._stride) if self._unseen == 0 else None
        return lane if isinstance(lane, Lane) else None

    def build(
        self,
        tables: list[TableDelta],
        setups: list[SlotSetup],
        zero: list[int],
        media: list[MediaPlacement],
        moves: tuple[PageMove, ...] = (),
    ) -> StepPlan:
        """The next step, behind `grow`. Its ids are known if the step before has been committed, else in its relay."""
        c, ones = self._columns, self._ones
        known = self.committed == self.launched
        return StepPlan(
            step=self.step,
            slots=self.slots,
            handles=self.handles,
            starts=self.starts,
            counts=ones,
            samples=ones,
            relay=(c.none if known else c.all)[: len(ones)],
            ids=c.tokens[self.slots, self.starts] if known else _NO_IDS,
            tables=tuple(tables),
            setups=tuple(setups),
            zero=tuple(zero),
            media=tuple(media),
            moves=moves,
            decodes=len(ones),
            deferred=self._deferred,
        )

    def append(self, plan: StepPlan, tokens: Int32s) -> Int64s:
        """A step has retired: one token more for each row; indices of those that may end with it."""
        c = self._columns
        if self.committed < self.since:
            self._begin(plan)
        self.committed = plan.step
        np.add(c.computed, c.active, c.computed)
        np.add(c.known, c.active, c.known)
        c.flat[self._appended :][self._places] = tokens
        self._appended += 1
        self._unchecked -= 1
        found = [column == tokens for column in self._stop_ids]
        if self._unchecked <= 0:
            found.append(c.known[self.slots] >= c.check_at[self.slots])
        if not found:
            return NO_ROWS
        stopped = found[0] if len(found) == 1 else np.logical_or.reduce(found)
        ends: Int64s = stopped.nonzero()[0]
        return ends

    def _begin(self, plan: StepPlan) -> None:
        """What only commits change: from here on all of them are of steady steps."""
        c, slots = self._columns, plan.slots
        self._places: Int64s = c.base[slots] + c.known[slots]
        self._appended = 0  # tokens further by now
        self._unchecked = int((c.check_at[slots] - c.known[slots]).min())  # so many tokens end nobody by their number
        self._stop_ids = [column[slots] for column in c.stop_columns]


def steady_step(scheduler: Scheduler) -> SteadyRows | None:
    """Rows that can go on as they did, with pages for their next position; None: everything has to be looked at."""
    rows = scheduler.columns.steady
    if rows is None or scheduler.leaving:
        return None
    drafter = scheduler.drafter
    if drafter is not None and scheduler.columns.running <= drafter.rows_max:
        return None
    head = scheduler.waiting.head() if scheduler.free_slots else None
    if head is not None and scheduler.blocked != (head.request.handle, scheduler.room_version):
        return None
    return rows if rows.grow(scheduler) else None
