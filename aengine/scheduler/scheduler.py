"""Who runs next: the pure, synchronous heart of the engine.

Owns: sequences from submission to finish, their slots, the plan of each step and the account of its results.
Does not know: torch, asyncio, clocks, text, sockets.
Invariants: `plan` and `commit` alternate freely, but steps are committed in the order they were planned; the same calls
give the same plans; every submitted request gets exactly one Finish; older requests (priority, then age) never lose
pages to younger ones; a lease is released exactly once, in `_release`.
"""

from __future__ import annotations

import bisect
from collections import deque

import msgspec
import numpy as np

from aengine.memory import Fence
from aengine.prefix_cache import Lease, PrefixCache
from aengine.scheduler.columns import Columns
from aengine.scheduler.decode import plan_decodes
from aengine.scheduler.drafts import Drafter
from aengine.scheduler.matcher import Matcher
from aengine.scheduler.media import MediaBook
from aengine.scheduler.pacing import Pacer, observe
from aengine.scheduler.pages import compact, spare_large
from aengine.scheduler.plan_builder import PlanBuilder
from aengine.scheduler.prefill import plan_prefills
from aengine.scheduler.recurrent import has_state
from aengine.scheduler.results import OutputBuilder, commit_rows
from aengine.scheduler.sequence import Sequence, WaitingRoom
from aengine.scheduler.speculation import DraftCounts, waits_for_drafts
from aengine.scheduler.steady import SteadyRows, steady_step
from aengine.scheduler.structured import MaskedRows, decide_rows
from aengine.types import (
    FinishReason,
    Int32s,
    Int64s,
    PageMove,
    Request,
    SlotSetup,
    StepOutputs,
    StepPlan,
    StepResult,
    TableDelta,
)


class SchedulerStats(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    in_flight: int
    preemptions: int
    zombie_rows: int
    steps: int
    drafts: int  # rows with draft tokens, one a step
    drafted_tokens: int
    accepted_tokens: int
    accepted_by_position: tuple[int, ...]  # of a row's drafts, the first ones first
    forced_tokens: int  # taken over from grammars without sampling
    media_items: int = 0  # placed for rows
    media_computed: int = 0  # of these, computed rather than found in the cache


class Scheduler:
    """plan / commit over one prefix cache.

    `max_seqs` slots; `budget_tokens` per step; `max_tokens` the longest sequence (prompt plus output). `step_s`: what
    a step with decode rows should take at most, in seconds on the device; 0: as long as it takes.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_seqs: int,
        budget_tokens: int,
        max_tokens: int,
        page_tokens: int = 16,
        drafter: Drafter | None = None,
        step_s: float = 0.0,
    ) -> None:
        self.cache = cache
        self.columns = Columns(max_seqs, max_tokens, cache.cohort_tokens)
        self.waiting = WaitingRoom()
        self.outputs = OutputBuilder()
        self.retired = 0
        self.zombie_rows = 0
        self._budget_tokens = budget_tokens
        self.page_tokens = page_tokens
        self.drafter = drafter
        self.pacer = Pacer(step_s, page_tokens) if step_s else None
        self.recurrent = has_state(cache)
        self._step = 0
        self._in_flight: deque[StepPlan] = deque()
        self.by_handle: dict[int, Sequence] = {}
        self.by_slot: list[Sequence | None] = [None] * max_seqs
        self.lease_of: list[Lease | None] = [None] * max_seqs
        self.free_slots = list(range(max_seqs - 1, -1, -1))
        self._slot_fence: Fence[int] = Fence()
        self.keys: list[tuple[int, int]] = []  # of running sequences, oldest first
        self.order: Int64s = np.zeros(0, np.int64)  # their slots
        self.leaving: list[Sequence] = []  # aborted, void or to be preempted, once out of flight
        self._preemptions = 0
        self.drafts = DraftCounts()
        self.forced_tokens = 0
        self._masked = MaskedRows()
        self.room_version = 0  # grows when pages or slots may have become free
        self.blocked = (-1, -1)  # (handle, _room_version) when the head of the queue did not fit
        self.tables: list[TableDelta] = []  # for the next plan: even a step that is not built may have changed tables
        self.setups: list[SlotSetup] = []
        self._zero: list[int] = []
        self.lacking = False  # a running sequence got no pages in the plan being made
        self.large_lacking = 0  # large pages that such sequences need
        self.spare_large = spare_large(cache.pool.plan.usable)
        self.media = MediaBook(cache.item_groups)

    # ---- verbs

    def submit(self, request: Request, matcher: Matcher | None = None) -> None:
        """Queue a request. The caller checked that it fits the pool (`cache.fits`). `matcher` rules its output."""
        sequence = Sequence(request, matcher)
        self.by_handle[request.handle] = sequence
        self.waiting.push(sequence)

    def abort(self, handle: int) -> None:
        """Flag a request; it is released by the next plan or commit that finds it out of flight."""
        sequence = self.by_handle.get(handle)
        if sequence is None or sequence.aborted:
            return
        sequence.aborted = True
        self.leaving.append(sequence)
        if sequence.slot >= 0:
            self.columns.pause(sequence.slot, mute=True)

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run now."""
        if (rows := steady_step(self)) is not None:
            return self._built(rows)
        build = self._begin()
        drafter = self.drafter
        if drafter is not None and self.columns.running <= drafter.rows_max and waits_for_drafts(self, drafter):
            return None
        plan_decodes(self, build)
        plan_prefills(self, build)
        return self._built(build)

    def again(self) -> StepPlan | None:
        """One step more of rows that decode, behind a step in flight, without prompts; None when no row can go on."""
        if (rows := steady_step(self)) is not None:
            return self._built(rows)
        build = self._begin()
        plan_decodes(self, build)
        return self._built(build)

    def _begin(self) -> PlanBuilder:
        self._settle()
        self.columns.steady = None  # whoever looks may change what it holds
        self.lacking, self.large_lacking = False, 0
        return PlanBuilder(self._step + 1, self._budget_tokens, self.columns)

    def _built(self, build: PlanBuilder | SteadyRows) -> StepPlan | None:
        moves = self._compact(build.step) if self.cache.pool.movable else ()
        self._zero.extend(self.cache.pool.drain_retyped())
        plan = build.build(self.tables, self.setups, self._zero, self.media.pending, moves)
        if plan is None:
            return None
        self.tables, self.setups, self._zero, self.media.pending = [], [], [], []
        self._step = plan.step
        self._in_flight.append(plan)
        self.columns.launched(plan)
        return plan

    def _compact(self, step: int) -> tuple[PageMove, ...]:
        return compact(self, step)

    def decide(self) -> tuple[Int64s, list[Matcher]]:
        """Deferred rows of the newest step that need a mask, and their matchers; tokens that must come are taken over.
        All earlier steps are committed, and no later one is planned before this."""
        assert len(self._in_flight) == 1, f"{len(self._in_flight)} steps are in flight"
        masked = self._masked = decide_rows(self, self._in_flight[0])
        return masked.rows, masked.matchers

    def commit(self, result: StepResult) -> StepOutputs:
        """Account the oldest step in flight."""
        plan = self._oldest_in_flight(result.step)
        if len(plan.deferred) and (broken := self._masked.broken(plan)):
            result = msgspec.structs.replace(result, failed={**broken, **result.failed})
        tainted: list[int] = []
        if result.failed:
            tainted = [handle for row in sorted(result.failed) for handle in self._retract_row(plan, row)]
            self.columns.disturb()
        self._retire(plan)
        for handle in tainted:
            self._void(handle)
        commit_rows(self, plan, result)
        if self.drafter is not None and len(plan.slots) <= self.drafter.rows_max:
            self.drafter.observe(plan, result)
        if self.pacer is not None:
            observe(self.pacer, plan, result.device_s)
        self._settle()
        return self.flush()

    def fail(self, step: int, message: str) -> StepOutputs:
        """The oldest step in flight raised: its rows fail; whoever shares a page it should have written recomputes."""
        plan = self._oldest_in_flight(step)
        tainted = self.cache.retract(step)
        self.columns.disturb()
        self._retire(plan)
        for handle, slot in zip(plan.handles.tolist(), plan.slots.tolist(), strict=True):
            if self.columns.handle[slot] == handle:
                self.finish(self.at(slot), FinishReason.ERROR, error=message, keep=False)
        for handle in (*tainted, *self._untold(plan)):
            self._void(handle)
        self._zero = [*plan.zero, *self._zero]
        self._settle()
        return self.flush()

    def _untold(self, plan: StepPlan) -> list[int]:
        """Sequences without a row in a failed step whose set-up, pages or zeroing it carried: the device may not have
        heard of them, so they start again. (Whoever holds a page that it was to move is among them.)"""
        slots = {setup.slot for setup in plan.setups} | {slot for delta in plan.tables for slot in delta.slots.tolist()}
        slots |= {placed.slot for placed in plan.media}
        told = self.order.tolist() if plan.zero else sorted(slots)
        return [sequence.request.handle for slot in told if (sequence := self.by_slot[slot]) is not None]

    def flush(self) -> StepOutputs:
        """Outputs gathered since the last flush; finishes may also come from `plan`."""
        return self.outputs.take(self.retired)

    # ---- views

    @property
    def has_unfinished(self) -> bool:
        return bool(self.by_handle)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self.keys),
            waiting=len(self.waiting),
            in_flight=len(self._in_flight),
            preemptions=self._preemptions,
            zombie_rows=self.zombie_rows,
            steps=self._step,
            drafts=self.drafts.rows,
            drafted_tokens=self.drafts.drafted,
            accepted_tokens=self.drafts.accepted,
            accepted_by_position=tuple(self.drafts.by_position),
            forced_tokens=self.forced_tokens,
            media_items=self.media.items,
            media_computed=self.media.computed,
        )

    def oldest(self) -> int | None:
        """Handle of the oldest unfinished request: what a watchdog names when nothing moves."""
        return min(self.by_handle, default=None)

    def positions(self) -> tuple[Int64s, Int32s]:
        """(handle or -1, positions computed) by slot, copied: who of the running ones has moved since the last call."""
        return self.columns.handle.copy(), self.columns.computed.copy()

    def sequence(self, handle: int) -> Sequence | None:
        return self.by_handle.get(handle)

    # ---- leaving

    def preempt(self, sequence: Sequence) -> None:
        """Give up slot and pages; what is known waits to be computed again. Not while it is in flight."""
        c, slot = self.columns, sequence.slot
        sequence.ids = c.tokens[slot, : c.known[slot]].copy()
        self._release(sequence)
        self._preemptions += 1
        self.waiting.push(sequence)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_id: int | None = None,
        error: str | None = None,
        keep: bool = True,
    ) -> None:
        """End a sequence: its one Finish, its one release. `keep` False: what its last step wrote is worthless."""
        sequence.finished = True
        del self.by_handle[sequence.request.handle]
        if sequence.slot >= 0:
            self._release(sequence, keep=keep)
        else:
            self.waiting.remove(sequence)
            self.room_version += 1
        self.outputs.finished(sequence.request.handle, reason, stop_id, error)

    def _retract_row(self, plan: StepPlan, row: int) -> tuple[int, ...]:
        """A row failed alone: take back what it published; returns who already shares pages it should have written."""
        sequence = self.by_handle.get(int(plan.handles[row]))
        if sequence is None or sequence.lease is None or sequence.slot != plan.slots[row]:
            return ()  # a zombie row
        return self.cache.retract(plan.step, sequence.lease)

    def _release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """The one place where a lease and a slot are given up."""
        c, slot = self.columns, sequence.slot
        last_step = int(c.last_step[slot])
        assert sequence.lease is not None
        self.cache.release(
            sequence.lease,
            last_step=last_step,
            keep=keep,
            scheduled=int(c.scheduled[slot]),
            known=int(c.known[slot]),
            computed=int(c.computed[slot]),
        )
        c.vacate(slot)
        self.media.stop(slot)
        at = bisect.bisect_left(self.keys, sequence.key)
        del self.keys[at]
        self.order = np.concatenate([self.order[:at], self.order[at + 1 :]])
        self.by_slot[slot] = self.lease_of[slot] = None
        sequence.slot, sequence.lease = -1, None
        if last_step <= self.retired:
            self.free_slots.append(slot)
        else:
            self._slot_fence.defer(last_step, slot)
        self.room_version += 1

    def _void(self, handle: int) -> None:
        """Discard what is in flight for a sequence that read a failed step's pages, then recompute it."""
        sequence = self.by_handle.get(handle)
        if sequence is None or sequence.slot < 0 or self.columns.mute[sequence.slot]:
            return
        self.columns.pause(sequence.slot, mute=True)
        self.leaving.append(sequence)

    def _settle(self) -> None:
        """Let sequences go that are to leave and that no step in flight names."""
        if not self.leaving:
            return
        staying = []
        for sequence in self.leaving:
            if sequence.finished:
                continue
            if sequence.slot >= 0 and self.columns.last_step[sequence.slot] > self.retired:
                staying.append(sequence)
            elif sequence.aborted:
                self.finish(sequence, FinishReason.ABORT)
            elif sequence.slot >= 0:
                self.preempt(sequence)
        self.leaving = staying

    def _oldest_in_flight(self, step: int) -> StepPlan:
        plan = self._in_flight.popleft()
        assert plan.step == step, f"step {step} committed, {plan.step} is the oldest in flight"
        return plan

    def _retire(self, plan: StepPlan) -> None:
        """Nothing published for the step can be taken back after this, and what it fenced may be used again."""
        self.retired = plan.step
        self.cache.retire(plan.step)
        slots = self._slot_fence.retire(plan.step)
        self.free_slots.extend(slots)
        self.room_version += bool(slots)  # a fenced slot is a fenced release: its pages came back too

    def leases(self, slots: Int64s) -> list[Lease]:
        """Those of running sequences."""
        lease_of = self.lease_of
        return [lease_of[slot] for slot in slots.tolist()]

    def at(self, slot: int) -> Sequence:
        sequence = self.by_slot[slot]
        assert sequence is not None
        return sequence
