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
from operator import add

import msgspec
import numpy as np

from aengine.memory import Fence
from aengine.prefix_cache import Grown, Lease, PrefixCache
from aengine.scheduler.chunks import share_budget
from aengine.scheduler.columns import Columns
from aengine.scheduler.drafts import Drafter
from aengine.scheduler.media import MediaBook, media_items
from aengine.scheduler.plan_builder import PlanBuilder
from aengine.scheduler.recurrent import draft_room, has_state, ready_rows
from aengine.scheduler.results import OutputBuilder, commit_rows
from aengine.scheduler.sequence import Sequence, WaitingRoom
from aengine.types import (
    FinishReason,
    Int64s,
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
    drafted_tokens: int
    accepted_tokens: int
    media_items: int = 0  # placed for rows
    media_computed: int = 0  # of these, computed rather than found in the cache


class Scheduler:
    """plan / commit over one prefix cache.

    `max_seqs` slots; `budget_tokens` per step; `max_tokens` the longest sequence (prompt plus output).
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
    ) -> None:
        self.cache = cache
        self.columns = Columns(max_seqs, max_tokens)
        self.waiting = WaitingRoom()
        self.outputs = OutputBuilder()
        self.retired = 0
        self.zombie_rows = 0
        self.accepted_tokens = 0
        self._budget_tokens = budget_tokens
        self.page_tokens = page_tokens
        self._drafter = drafter
        self._recurrent = has_state(cache)
        self._step = 0
        self._in_flight: deque[StepPlan] = deque()
        self._by_handle: dict[int, Sequence] = {}
        self._by_slot: list[Sequence | None] = [None] * max_seqs
        self._free_slots = list(range(max_seqs - 1, -1, -1))
        self._slot_fence: Fence[int] = Fence()
        self._keys: list[tuple[int, int]] = []  # of running sequences, oldest first
        self._order: Int64s = np.zeros(0, np.int64)  # their slots
        self._leaving: list[Sequence] = []  # aborted, void or to be preempted, once out of flight
        self._preemptions = 0
        self._drafted_tokens = 0
        self._room_version = 0  # grows when pages or slots may have become free
        self._blocked = (-1, -1)  # (handle, _room_version) when the head of the queue did not fit
        self._tables: list[TableDelta] = []  # for the next plan: even a step that is not built may have changed tables
        self._setups: list[SlotSetup] = []
        self._zero: list[int] = []
        self._lacking = False  # a running sequence got no pages in the plan being made
        self._media = MediaBook(cache.item_groups)

    # ---- verbs

    def submit(self, request: Request) -> None:
        """Queue a request. The caller checked that it fits the pool (`cache.fits`)."""
        sequence = Sequence(request)
        self._by_handle[request.handle] = sequence
        self.waiting.push(sequence)

    def abort(self, handle: int) -> None:
        """Flag a request; it is released by the next plan or commit that finds it out of flight."""
        sequence = self._by_handle.get(handle)
        if sequence is None or sequence.aborted:
            return
        sequence.aborted = True
        self._leaving.append(sequence)
        if sequence.slot >= 0:
            self.columns.paused[sequence.slot] = self.columns.mute[sequence.slot] = True

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run now."""
        plan = self._plan_step()
        tries = len(self._keys) + 2
        while plan is None and tries and self._unstick():
            plan = self._plan_step()
            tries -= 1
        return plan

    def _plan_step(self) -> StepPlan | None:
        self._settle()
        self._lacking = False
        build = PlanBuilder(self._step + 1, self._budget_tokens, self.columns)
        self._plan_decodes(build)
        self._plan_prefills(build)
        self._zero.extend(self.cache.pool.drain_retyped())
        plan = build.build(self._tables, self._setups, self._zero, self._media.pending)
        if plan is None:
            return None
        self._tables, self._setups, self._zero, self._media.pending = [], [], [], []
        self._step = plan.step
        self._in_flight.append(plan)
        self.columns.launched(plan)
        return plan

    def commit(self, result: StepResult) -> StepOutputs:
        """Account the oldest step in flight."""
        plan = self._oldest_in_flight(result.step)
        tainted = [handle for row in sorted(result.failed) for handle in self._retract_row(plan, row)]
        self._retire(plan)
        for handle in tainted:
            self._void(handle)
        commit_rows(self, plan, result)
        self._settle()
        return self.flush()

    def fail(self, step: int, message: str) -> StepOutputs:
        """The oldest step in flight raised: its rows fail; whoever shares a page it should have written recomputes."""
        plan = self._oldest_in_flight(step)
        tainted = self.cache.retract(step)
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
        heard of them, so they start again."""
        slots = {setup.slot for setup in plan.setups} | {delta.slot for delta in plan.tables}
        slots |= {placed.slot for placed in plan.media}
        told = self._order.tolist() if plan.zero else sorted(slots)
        return [sequence.request.handle for slot in told if (sequence := self._by_slot[slot]) is not None]

    def flush(self) -> StepOutputs:
        """Outputs gathered since the last flush; finishes may also come from `plan`."""
        return self.outputs.take(self.retired)

    # ---- views

    @property
    def has_unfinished(self) -> bool:
        return bool(self._by_handle)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._keys),
            waiting=len(self.waiting),
            in_flight=len(self._in_flight),
            preemptions=self._preemptions,
            zombie_rows=self.zombie_rows,
            steps=self._step,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            media_items=self._media.items,
            media_computed=self._media.computed,
        )

    def oldest(self) -> int | None:
        """Handle of the oldest unfinished request: what a watchdog names when nothing moves."""
        return min(self._by_handle, default=None)

    def sequence(self, handle: int) -> Sequence | None:
        return self._by_handle.get(handle)

    # ---- decode rows

    def _plan_decodes(self, build: PlanBuilder) -> None:
        c, order = self.columns, self._order
        known = c.known[order]
        total = known + c.pending[order]
        ready = (total - c.scheduled[order] == 1) & (total < c.limit[order]) & ~c.paused[order] & ~c.drafting[order]
        if self._drafter is not None:
            ready &= c.pending[order] == 0  # a draft needs to know the last token
        slots = order[ready]
        slots = slots[: self._decode_room(slots, build.left)]
        if self._drafter is not None:
            slots = self._plan_drafts(slots, build)
        crossing = c.scheduled[slots] >= c.capacity[slots]
        if crossing.any():
            lacking = [slot for slot in slots[crossing].tolist() if not self._grow_decode(slot, build)]
            if lacking:
                slots = slots[~np.isin(slots, lacking)]
        build.decode(slots)

    def _decode_room(self, slots: Int64s, budget: int) -> int:
        """How many decode rows may run: all that the budget holds, but for a share of it that older prompts need."""
        if len(slots) < budget:
            return budget
        youngest = self.at(int(slots[budget - 1])).key
        head = self.waiting.head()
        waits = head is not None and head.key < youngest and bool(self._free_slots)
        c = self.columns
        for slot in self._order.tolist():
            sequence = self.at(slot)
            if waits or sequence.key >= youngest:
                break
            waits = not c.paused[slot] and int(c.known[slot] + c.pending[slot] - c.scheduled[slot]) > 1
        return budget - max(1, min(self.page_tokens, budget // 2)) if waits else budget

    def _grow_decode(self, slot: int, build: PlanBuilder) -> bool:
        if slot in build.held:
            return False
        sequence = self.at(slot)
        upto = int(self.columns.scheduled[slot]) + 1
        if self._grow(sequence, upto, build) is None:
            return False
        if self._recurrent:  # growth may have published a page that this row fills, and names a state it will write
            build.pin(slot)
        return True

    def _plan_drafts(self, slots: Int64s, build: PlanBuilder) -> Int64s:
        """Give drafts to the rows the drafter has a guess for; returns the other rows."""
        assert self._drafter is not None
        c = self.columns
        plain: list[int] = []
        rows_left = len(slots)
        for slot in slots.tolist():
            sequence = self.at(slot)
            known = int(c.known[slot])
            rows_left -= 1
            most = min(int(c.limit[slot]) - known - 1, build.left - rows_left - len(plain) - 1)
            if self._recurrent and sequence.lease is not None:
                most = min(most, draft_room(sequence.lease, int(c.scheduled[slot]), known))
            if most <= 0 or sequence.request.sampling.needs_history or sequence.slot in build.held:
                plain.append(slot)
                continue
            drafts = self._drafter.propose(c.tokens[slot, :known], most)
            if not len(drafts) or self._try_grow(sequence, known + len(drafts), build.step, len(drafts)).short:
                plain.append(slot)
                continue
            self._drafted_tokens += len(drafts)
            build.row(slot, 1 + len(drafts), 1 + len(drafts), np.asarray(drafts, np.int32))
        return np.array(plain, np.int64)

    # ---- prefill rows

    def _plan_prefills(self, build: PlanBuilder) -> None:
        if build.left <= 0:
            return
        c, order = self.columns, self._order
        total = c.known[order] + c.pending[order]
        unfed = order[(total - c.scheduled[order] > 1) & ~c.paused[order]]
        fresh = self._admit()
        rows = sorted([self.at(slot) for slot in unfed.tolist()] + fresh, key=lambda s: s.key)
        if self._recurrent:
            rows = ready_rows(rows, c)
        remaining = [int(c.known[s.slot] - c.scheduled[s.slot]) for s in rows]
        shares = share_budget(remaining, build.left, self.page_tokens)
        for sequence, share in zip(rows, shares, strict=True):
            if share > 0 and sequence.slot >= 0 and sequence.slot not in build.held:
                self._plan_chunk(sequence, min(share, build.left), build)

    def _plan_chunk(self, sequence: Sequence, share: int, build: PlanBuilder) -> None:
        """One chunk of at most `share` tokens, after whatever others have prefilled of the same prompt meanwhile."""
        c, slot = self.columns, sequence.slot
        known = int(c.known[slot])
        assert sequence.lease is not None
        while True:
            start = int(c.scheduled[slot])
            upto = min(start + share, known, sequence.lease.next_boundary(start))
            grown = self._grow(sequence, upto, build)
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

    def _admit(self) -> list[Sequence]:
        """Give slots to waiting sequences while a slot is free and their whole prompt has room; none while a running
        one is short of pages."""
        fresh: list[Sequence] = []
        if not self._free_slots or not len(self.waiting) or self._lacking:
            return fresh
        owed, items = self._owed_pages(), self._media.owed()
        while self._free_slots:
            sequence = self.waiting.head()
            if sequence is None or self._blocked == (sequence.request.handle, self._room_version):
                break
            lease = self._acquire(sequence, self._free_slots[-1])
            lacking = self._media.lacking(lease, beside=items)
            need = self.cache.owed_pages(lease, len(sequence.ids) + 1, tuple(lacking.values()))
            wanted = tuple(map(add, owed, need))
            if self.cache.pool.shortage(wanted) is not None:
                self.cache.withdraw(lease)
                self._blocked = (sequence.request.handle, self._room_version)
                break
            owed = wanted
            items |= lacking
            self._start(self.waiting.pop(), lease)
            fresh.append(sequence)
        return fresh

    def _owed_pages(self) -> tuple[int, ...]:
        """Pages of each group for the known tokens and items of running sequences that have none yet."""
        c, order = self.columns, self._order
        owed = (0,) * len(self.cache.capacity)
        for slot in order[c.known[order] > np.maximum(c.capacity[order], c.scheduled[order])].tolist():
            lease = self.at(slot).lease
            assert lease is not None
            owed = tuple(map(add, owed, self.cache.owed_pages(lease, int(c.known[slot]))))
        return tuple(map(add, owed, self.cache.media_pages(tuple(self._media.owed().values()))))

    def _acquire(self, sequence: Sequence, slot: int) -> Lease:
        request, known = sequence.request, len(sequence.ids)
        buffer = self.columns.tokens[slot]
        buffer[:known] = sequence.ids
        return self.cache.acquire(
            request.handle,
            buffer,
            known,
            salt=request.cache_salt,
            adapter=request.adapter,
            cause="resume" if sequence.admitted else request.cause,
            max_hit=0 if sequence.scattered else sequence.hit_limit,
            media=media_items(request),
        )

    def _start(self, sequence: Sequence, lease: Lease) -> None:
        c, slot = self.columns, self._free_slots.pop()
        sequence.slot, sequence.lease, sequence.scattered = slot, lease, False
        self._by_slot[slot] = sequence
        c.occupy(slot, sequence.request, sequence.ids, lease.cached_tokens)
        c.capacity[slot] = lease.capacity_tokens
        c.commit_at[slot] = lease.cached_tokens - lease.cached_tokens % self.page_tokens + self.page_tokens
        at = bisect.bisect(self._keys, sequence.key)
        self._keys.insert(at, sequence.key)
        self._order = np.insert(self._order, at, slot)
        self._setups.append(self._setup(sequence))
        self._media.start(slot, sequence.request, lease)
        if not sequence.admitted:
            sequence.admitted = True
            self.outputs.admitted(sequence.request.handle, lease.cached_tokens)

    def _setup(self, sequence: Sequence) -> SlotSetup:
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

    # ---- pages

    def _grow(self, sequence: Sequence, upto: int, build: PlanBuilder) -> Grown | None:
        """Pages for positions below `upto`, making room from younger sequences if need be; None: not this step."""
        while True:
            grown = self._try_grow(sequence, upto, build.step)
            if not grown.short:
                return grown
            if not self._make_room(sequence, grown.short, build):
                self._lacking = True
                return None

    def _try_grow(self, sequence: Sequence, upto: int, step: int, drafts: int = 0) -> Grown:
        c, slot = self.columns, sequence.slot
        assert sequence.lease is not None
        start, known = int(c.scheduled[slot]), int(c.known[slot])
        grown = self.cache.grow(sequence.lease, upto, step, known, start=start, drafts=drafts)
        for group, first, pages in grown.deltas:
            if group not in self._media.groups:
                self._tables.append(TableDelta(slot, group, first, pages))
        self._media.grown(slot, grown)
        c.capacity[slot] = sequence.lease.capacity_tokens
        return grown

    def _make_room(self, sequence: Sequence, short: tuple[int, ...], build: PlanBuilder) -> bool:
        """Preempt younger sequences for `short` pages per group; True when some were freed at once.

        A victim in flight is only held out of this step: it can be preempted when its last step has retired. Pages
        that the fence will give back anyway are worth waiting for.
        """
        missing = [want - due for want, due in zip(short, self.cache.fenced_pages(), strict=True)]
        freed = False
        for slot in self._order[::-1].tolist():
            victim = self.at(slot)
            if victim.key <= sequence.key or max(missing) <= 0:
                break
            assert victim.lease is not None
            missing = [m - r for m, r in zip(missing, self.cache.reclaimable_pages(victim.lease), strict=True)]
            if build.has_row(slot):  # a draft row of this very step: it goes when the step has retired
                self.columns.paused[slot] = True
                self._leaving.append(victim)
                continue
            build.hold(slot)
            if self.columns.last_step[slot] <= self.retired:
                self._preempt(victim)
                freed = True
        return freed

    def _unstick(self) -> bool:
        """Nothing runs and nothing could be planned: begin the oldest again without hits, if there is one.

        A sequence that fits the arena may still lack pages when those it holds lie one in each large page: then no
        large page can go to the group that needs one. Without hits its pages come close together.
        """
        if self._in_flight:
            return False
        if self._keys:
            sequence = self.at(int(self._order[-1]))
            self._preempt(sequence)
        else:
            head = self.waiting.head()
            if head is None or head.scattered:
                return False
            sequence = head
            self._blocked = (-1, -1)
        sequence.scattered = True
        return True

    def _preempt(self, sequence: Sequence) -> None:
        c, slot = self.columns, sequence.slot
        sequence.ids = c.tokens[slot, : c.known[slot]].copy()
        self._release(sequence)
        self._preemptions += 1
        self.waiting.push(sequence)

    # ---- leaving

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
        del self._by_handle[sequence.request.handle]
        if sequence.slot >= 0:
            self._release(sequence, keep=keep)
        else:
            self.waiting.remove(sequence)
            self._room_version += 1
        self.outputs.finished(sequence.request.handle, reason, stop_id, error)

    def _retract_row(self, plan: StepPlan, row: int) -> tuple[int, ...]:
        """A row failed alone: take back what it published; returns who already shares pages it should have written."""
        sequence = self._by_handle.get(int(plan.handles[row]))
        if sequence is None or sequence.lease is None or sequence.slot != plan.slots[row]:
            return ()  # a zombie row
        return self.cache.retract(plan.step, sequence.lease)

    def _release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """The one place where a lease and a slot are given up."""
        c, slot = self.columns, sequence.slot
        last_step = int(c.last_step[slot])
        assert sequence.lease is not None
        scheduled, known = int(c.scheduled[slot]), int(c.known[slot])
        self.cache.release(sequence.lease, last_step=last_step, keep=keep, scheduled=scheduled, known=known)
        c.vacate(slot)
        self._media.stop(slot)
        at = bisect.bisect_left(self._keys, sequence.key)
        del self._keys[at]
        self._order = np.delete(self._order, at)
        self._by_slot[slot] = None
        sequence.slot, sequence.lease = -1, None
        if last_step <= self.retired:
            self._free_slots.append(slot)
        else:
            self._slot_fence.defer(last_step, slot)
        self._room_version += 1

    def _void(self, handle: int) -> None:
        """Discard what is in flight for a sequence that read a failed step's pages, then recompute it."""
        sequence = self._by_handle.get(handle)
        if sequence is None or sequence.slot < 0 or self.columns.mute[sequence.slot]:
            return
        self.columns.paused[sequence.slot] = self.columns.mute[sequence.slot] = True
        self._leaving.append(sequence)

    def _settle(self) -> None:
        """Let sequences go that are to leave and that no step in flight names."""
        if not self._leaving:
            return
        staying = []
        for sequence in self._leaving:
            if sequence.finished:
                continue
            if sequence.slot >= 0 and self.columns.last_step[sequence.slot] > self.retired:
                staying.append(sequence)
            elif sequence.aborted:
                self.finish(sequence, FinishReason.ABORT)
            elif sequence.slot >= 0:
                self._preempt(sequence)
        self._leaving = staying

    def _oldest_in_flight(self, step: int) -> StepPlan:
        plan = self._in_flight.popleft()
        assert plan.step == step, f"step {step} committed, {plan.step} is the oldest in flight"
        return plan

    def _retire(self, plan: StepPlan) -> None:
        """Nothing published for the step can be taken back after this, and what it fenced may be used again."""
        self.retired = plan.step
        self.cache.retire(plan.step)
        slots = self._slot_fence.retire(plan.step)
        self._free_slots.extend(slots)
        self._room_version += bool(slots)  # a fenced slot is a fenced release: its pages came back too

    def at(self, slot: int) -> Sequence:
        sequence = self._by_slot[slot]
        assert sequence is not None
        return sequence
