"""A scheduler in miniature, driven at random, over the real cache and a shadow device.

It keeps the laws a scheduler keeps (three lengths, one release, steps retire in order) and otherwise does whatever an
episode's dice say: forks, chunks of any size, drafts, preemption, aborts in flight, failing steps.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from aengine.memory import Moved, PagePlan, Pool
from aengine.prefix_cache import Grown, Lease, MediaItem, PrefixCache
from tests.prefix_cache.shadow import Row, Shadow, Text

BUFFER = 512
DEPTH = 2  # steps in flight


@dataclass
class Sequence:
    """One request. Lengths as in the scheduler: computed <= scheduled <= known + pending."""

    handle: int
    text: Text
    prompt: int
    limit: int
    salt: str
    adapter: str
    media: tuple[MediaItem, ...]
    known: int = 0
    pending: int = 0
    scheduled: int = 0
    computed: int = 0
    last_step: int = 0
    drafting: bool = False
    void: bool = False
    lease: Lease | None = None
    buffer: np.ndarray = field(default_factory=lambda: np.full(BUFFER, -1, np.int32))

    def learn(self, known: int) -> None:
        for position in range(self.known, known):
            self.buffer[position] = self.text.id(position)
        self.known = known


@dataclass
class Step:
    number: int
    rows: list[tuple[Sequence, int, Row, bool]] = field(default_factory=list)  # sequence, lease serial, row, samples
    deltas: list[tuple[int, object]] = field(default_factory=list)
    fails: bool = False
    moves: list[Moved] = field(default_factory=list)
    named: set[tuple[int, int]] = field(default_factory=set)  # (group, page) that its rows read or write


class World:
    def __init__(self, seed: int, plan: PagePlan, **options) -> None:
        self.rng = random.Random(seed)
        self.plan = plan
        self.budget = self.rng.choice((3, 8, 24))
        self.pool = Pool(plan)
        options.setdefault("in_flight_tokens", (DEPTH + 1) * max(self.budget, 8))
        self.cache = PrefixCache(self.pool, **options)
        self.shadow = Shadow(plan)
        self._lend = self.pool._lend
        self.pool._lend = self._watched_lend  # type: ignore[method-assign]
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.in_flight: deque[Step] = deque()
        self.step = 0
        self.retired = 0
        self.handles = 0
        self.finished = 0
        self.collisions_allowed = False
        self.lacking = 0  # large pages that were missing in the step being planned
        self.moved = 0
        self._late_deltas: list[tuple[int, object]] = []
        self.bad_rows = 0

    def _watched_lend(self, group, page):
        """No page may be handed out that a step in flight names: copies of other streams would see it change."""
        for step in self.in_flight:
            assert (group.index, page.id) not in step.named, f"{page} is named by step {step.number} in flight"
        return self._lend(group, page)

    # -- requests

    def add(
        self, prompt: list[int], limit: int, *, salt: str = "", adapter: str = "", media: tuple[MediaItem, ...] = ()
    ) -> Sequence | None:
        """None when it can never fit."""
        if not self.cache.fits(limit, [item.tokens for item in media]):
            return None
        self.handles += 1
        text = Text((salt, adapter), prompt, media, vocab=2)
        sequence = Sequence(self.handles, text, len(prompt), limit, salt, adapter, media)
        sequence.learn(len(prompt))
        self.waiting.append(sequence)
        return sequence

    def admit(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        cause = "resume" if sequence.computed else "fresh"
        sequence.lease = self.cache.acquire(
            sequence.handle,
            sequence.buffer,
            sequence.known,
            salt=sequence.salt,
            adapter=sequence.adapter,
            cause=cause,
            media=sequence.media,
        )
        hit = sequence.lease.cached_tokens
        assert 0 <= hit < sequence.known
        sequence.scheduled = sequence.computed = hit
        sequence.last_step, sequence.drafting, sequence.void = 0, False, False
        self.running.append(sequence)

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        assert sequence.lease is not None
        scheduled = sequence.scheduled if self.rng.random() < 0.7 else None
        self.cache.release(sequence.lease, last_step=sequence.last_step, keep=keep, scheduled=scheduled)
        sequence.lease = None
        sequence.pending = 0
        self.running.remove(sequence)

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        self.release(sequence, keep=keep)
        self.finished += 1

    def preempt(self, sequence: Sequence) -> None:
        assert sequence.last_step <= self.retired
        assert sequence.pending == 0
        self.release(sequence)
        self.waiting.append(sequence)

    # -- steps

    def launch(self, *, fails: bool = False) -> Step | None:
        step = Step(self.step + 1, fails=fails)
        step.deltas, self._late_deltas = self._late_deltas, []  # adopted pages of a step that was not built
        self.lacking = 0
        if self.rng.random() < 0.2:
            self._compact(step, self.rng.randint(1, 3))
        for sequence in list(self.running):
            if not (sequence.void or sequence.drafting) and self.rng.random() < 0.8:
                self._plan_row(step, sequence)
        if self.lacking or self.rng.random() < 0.2:
            self._compact(step, self.lacking or self.rng.randint(1, 3))
        if not step.rows and not step.moves:
            assert not (self.lacking and len(self.running) == 1 and not self.in_flight), self.pool.stats()
            self._late_deltas = step.deltas
            return None
        self.step = step.number
        self.in_flight.append(step)
        for sequence, _, row, samples in step.rows:
            self._name(step, sequence, row)
            sequence.last_step = step.number
            sequence.scheduled = row.upto
            if samples:
                sequence.pending += 1
            sequence.drafting = bool(row.drafts)
        return step

    def _compact(self, step: Step, slabs: int) -> None:
        if self.collisions_allowed:  # pages with a stolen name may stand at another index than their own
            return
        compaction = self.cache.compact(step.number, slabs)
        for page, _, target in compaction.moves:
            for other in self.in_flight:
                assert (page.group, target) not in other.named, f"{target} is named by step {other.number} in flight"
        step.moves += compaction.moves
        step.deltas += [(lease.serial, part) for lease, part in compaction.tables]
        self.moved += len(compaction.moves)

    def _name(self, step: Step, sequence: Sequence, row: Row) -> None:
        """What the row reads or writes, and what the step copies."""
        assert sequence.lease is not None
        for index, (planned, table) in enumerate(zip(self.plan.groups, sequence.lease.tables, strict=True)):
            lifetime, page = planned.spec.lifetime, planned.spec.tokens_per_page
            live = table[lifetime.first_live(row.start) // page :] if lifetime.positional else table
            step.named |= {(index, entry) for entry in live if entry}
        for moved, source, target in step.moves:
            step.named |= {(moved.group, source), (moved.group, target)}

    def _plan_row(self, step: Step, sequence: Sequence) -> None:
        lease = sequence.lease
        total = sequence.known + sequence.pending
        if sequence.known - sequence.scheduled > 1 or (sequence.known > sequence.scheduled and not sequence.pending):
            self._plan_chunk(step, sequence, lease)
        elif total - sequence.scheduled == 1 and total < sequence.limit:
            self._plan_decode(step, sequence, lease)

    def _plan_chunk(self, step: Step, sequence: Sequence, lease: Lease) -> None:
        """Prompt, or what a preemption or rejected drafts left to be computed again."""
        start = sequence.scheduled
        single = sequence.known - start == 1 and start >= sequence.prompt
        if single and sequence.known < sequence.limit - 4 and self.rng.random() < 0.3:
            guesses = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 3))]
            upto = sequence.known + len(guesses)
            grown = self.cache.grow(lease, upto, step.number, sequence.known, drafts=len(guesses))
            self._note(step, lease, grown)
            if not grown.short:
                assert grown.start == start
                self._add_row(step, sequence, lease, grown, upto, True, guesses)
                return
        upto = min(start + self.rng.randint(1, self.budget), sequence.known)
        if self.rng.random() < 0.9:
            upto = min(upto, lease.next_boundary(start))
        explicit = start if start > lease.tokens_ready else None  # launches within the capacity moved it
        grown = self._grow(step, sequence, upto, explicit)
        if grown is None:
            return
        if grown.start >= upto:
            assert grown.start < sequence.known
            sequence.scheduled = sequence.computed = grown.start
            return
        self._add_row(step, sequence, lease, grown, upto, upto == sequence.known, [])

    def _plan_decode(self, step: Step, sequence: Sequence, lease: Lease) -> None:
        """The next token, whose id only the device knows yet."""
        upto = sequence.scheduled + 1
        if upto <= lease.capacity_tokens:
            self._add_row(step, sequence, lease, Grown(sequence.scheduled), upto, True, [])
            return
        grown = self._grow(step, sequence, upto, None)
        if grown is not None:
            assert grown.start == sequence.scheduled, (grown, sequence.scheduled)
            self._add_row(step, sequence, lease, grown, upto, True, [])

    def _grow(self, step: Step, sequence: Sequence, upto: int, start: int | None) -> Grown | None:
        grown = self.cache.grow(sequence.lease, upto, step.number, sequence.known, start=start)
        self._note(step, sequence.lease, grown)
        if not grown.short:
            return grown
        sequence.scheduled = max(sequence.scheduled, grown.start)  # adopted pages stay adopted
        if self.pool.packs(grown.need):
            self.lacking += self.pool.large_needed(grown.need)
        alone = len(self.running) == 1
        assert not alone or self.lacking, f"{sequence.lease} is alone and short of {grown.short}: {self.pool.stats()}"
        return None

    def _note(self, step: Step, lease: Lease, grown: Grown) -> None:
        step.deltas += [(lease.serial, part) for part in grown.deltas]

    def _add_row(self, step, sequence, lease, grown, upto, samples, drafts) -> None:
        columns = {
            index: lease.item_columns(index)
            for index, planned in enumerate(self.plan.groups)
            if planned.spec.lifetime.per_item
        }
        row = Row(lease.serial, sequence.text, grown.start, upto, drafts, columns, grown.media)
        step.rows.append((sequence, lease.serial, row, samples))

    def retire(self) -> None:
        """The oldest step in flight has run: account it."""
        step = self.in_flight.popleft()
        self.shadow.run(step.deltas, [row for _, _, row, _ in step.rows], moves=step.moves, fails=step.fails)
        self.retired = step.number
        tainted = self.cache.retract(step.number) if step.fails else ()
        self.cache.retire(step.number)
        for sequence, serial, row, samples in step.rows:
            if sequence.lease is None or sequence.lease.serial != serial:
                continue  # a zombie row
            if step.fails:
                self.finish(sequence, keep=False)
            elif not sequence.void:
                self._commit(sequence, row, samples)
        for sequence in self.running:
            if sequence.handle in tainted:
                sequence.void = True

    def _commit(self, sequence: Sequence, row: Row, samples: bool) -> None:
        if row.bad:
            self.bad_rows += 1
            assert self.collisions_allowed, f"step {self.retired}, {sequence.lease}: {row.bad}"
        lease = sequence.lease
        before, sequence.computed = sequence.computed, max(sequence.computed, row.upto)
        if row.drafts:
            accepted = 0
            while accepted < len(row.drafts) and row.drafts[accepted] == sequence.text.id(sequence.known + accepted):
                accepted += 1
            sequence.drafting, sequence.pending = False, 0
            upto = sequence.known + accepted
            sequence.learn(upto + 1)
            frontier = self.cache.rollback(lease, upto, last_step=self.retired)
            assert frontier <= upto
            sequence.scheduled = sequence.computed = frontier
        elif samples:
            sequence.pending -= 1
            sequence.learn(sequence.known + 1)
        page = min(planned.spec.tokens_per_page for planned in self.plan.groups)
        if sequence.computed // page != before // page or self.rng.random() < 0.3:
            self.cache.commit(lease, sequence.computed, sequence.known, sequence.last_step)

    # -- the whole

    def settle(self) -> None:
        """Void sequences start again once nothing in flight names them."""
        for sequence in list(self.running):
            if sequence.void and sequence.last_step <= self.retired:
                sequence.pending = 0
                self.preempt(sequence)

    def tick(self, *, fail: float = 0.0) -> None:
        """One random event of the engine's own."""
        self.settle()
        idle = [s for s in self.running if s.last_step <= self.retired and not s.pending]
        dice = self.rng.random()
        if len(self.in_flight) > DEPTH or (self.in_flight and dice < 0.35):
            self.retire()
        elif self.waiting and dice < 0.5:
            self.admit(self.rng.choice(self.waiting))
        elif idle and dice < 0.55:
            self.preempt(self.rng.choice(idle))
        elif self.running and dice < 0.6:
            self.finish(self.rng.choice(self.running), keep=self.rng.random() < 0.5)
        elif dice < 0.61:
            self.cache.reset()
        elif not self.launch(fails=self.rng.random() < fail) and self.running:
            self._unblock()
        for sequence in list(self.running):
            if sequence.known >= sequence.limit and not sequence.void:
                self.finish(sequence)

    def _unblock(self) -> None:
        """Nothing could be launched: wait for the device, or make room."""
        if self.in_flight:
            self.retire()
        elif len(self.running) > 1:
            self.preempt(self.running[-1])

    def close(self) -> None:
        """Release everything: no page stays live, and a reset gives the whole arena back."""
        for sequence in list(self.running):
            self.finish(sequence)
        while self.in_flight:
            self.retire()
        self.cache.check()
        stats = self.pool.stats()
        assert stats.live_bytes == stats.fenced_bytes == 0
        self.cache.reset()
        self.cache.check()
        assert self.pool.unowned_slabs == self.plan.usable
        assert not any(self.pool.names)
