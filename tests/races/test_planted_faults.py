"""The detector is itself tested: each classic fault, planted on purpose, must be caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

import aengine.scheduler.results as results
from aengine.prefix_cache import Lease
from aengine.prefix_cache.journal import Journal
from aengine.runner.sim import SimExecutor
from aengine.scheduler import Scheduler
from aengine.types import Bools, PageMove, StepOutputs, StepPlan, StepResult
from tests.races.harness import Episode, Setting

SEEDS = range(60)
TIGHT = Setting(depth=1, pages=18, seqs=8, abort=0.15)


def caught(setting: Setting, *, enough: int = len(SEEDS), **faulty: type) -> int:
    """How many episodes noticed, until `enough` have. Any exception counts: a fault that crashes is a fault found."""
    found = 0
    for seed in SEEDS:
        try:
            Episode(seed, setting, **faulty).run()  # type: ignore[arg-type]
        except Exception:
            found += 1
        if found == enough:
            break
    return found


def is_caught(setting: Setting, *, by_one_in: int, **faulty: type) -> bool:
    """Whether more than so many of all seeds' episodes notice."""
    enough = len(SEEDS) // by_one_in + 1
    return caught(setting, enough=enough, **faulty) == enough


class TablesByReference(SimExecutor):
    """Applies table changes when the step is launched, under the feet of steps that still run."""

    def stage(self, plan: StepPlan) -> StepPlan:
        for delta in plan.tables:
            self.tables[delta.group][delta.slots, delta.columns] = delta.pages
        for setup in plan.setups:
            self._setups[setup.slot] = setup
        return msgspec.structs.replace(plan, tables=(), setups=())


class NoFence(Scheduler):
    """Gives pages and slots back at once, whatever is in flight."""

    def _release(self, sequence, *, keep: bool = True) -> None:  # type: ignore[no-untyped-def]
        self.columns.last_step[sequence.slot] = 0
        super()._release(sequence, keep=keep)


class TwoReleasePaths(Scheduler):
    """Abort releases at once, and the end of the step releases again."""

    def abort(self, handle: int) -> None:
        sequence = self.sequence(handle)
        if sequence is not None and sequence.lease is not None:
            self.cache.release(sequence.lease, last_step=int(self.columns.last_step[sequence.slot]))
        super().abort(handle)


class WindowByScheduled(Scheduler):
    """Prunes window pages by what is launched instead of what is computed."""

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            for slot in plan.slots.tolist():
                sequence = self.at(slot)
                c = self.columns
                assert sequence.lease is not None
                at = int(c.scheduled[slot])
                self.cache.commit(sequence.lease, at, int(min(at, c.known[slot])), 0)
        return plan


class RetiresBeforeRetracting(Scheduler):
    """Forgets what a step has published before it is known whether the step failed."""

    def _oldest_in_flight(self, step: int) -> StepPlan:
        plan = super()._oldest_in_flight(step)
        self.cache.retire(step)
        return plan


class GoesOnAfterRollback(Scheduler):
    """Goes on behind the accepted drafts although the state there is gone."""

    def commit(self, result: StepResult) -> StepOutputs:
        rollback = self.cache.rollback

        def kept(lease: Lease, upto: int, *, last_step: int = -1) -> int:
            rollback(lease, upto, last_step=last_step)
            return upto

        self.cache.rollback = kept  # type: ignore[method-assign]
        try:
            return super().commit(result)
        finally:
            self.cache.rollback = rollback  # type: ignore[method-assign]


class ForgetsACopy(SimExecutor):
    """Makes all moves of a step but the last."""

    def _move(self, moves: Sequence[PageMove]) -> None:
        super()._move(moves[:-1])


class ForgetsAHolder(Scheduler):
    """Does not tell one of the tables that name a moved page."""

    def _compact(self, step: int) -> tuple[PageMove, ...]:
        told = len(self.tables)
        moves = super()._compact(step)
        if len(self.tables) > told:
            self.tables.pop()
        return moves


class NeverMoves(Scheduler):
    """Leaves a sequence stuck whose pages lie one in each large page."""

    def _compact(self, step: int) -> tuple[PageMove, ...]:
        return ()


def test_no_fence_with_tables_by_reference_is_caught() -> None:
    """A zombie row writes through the new owner's table; seen when what it spoils was a cache hit, not rewritten."""
    setting = Setting(depth=2, pages=40, seqs=3, requests=40)
    assert is_caught(setting, scheduler_type=NoFence, executor_type=TablesByReference, by_one_in=8)


def test_the_honest_scheduler_is_not_accused() -> None:
    assert caught(TIGHT) == 0
    assert caught(Setting(depth=2, pages=40, seqs=3, requests=40)) == 0


def test_unskipped_zombie_rows_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything_lives(scheduler: Scheduler, plan: StepPlan) -> Bools:
        return np.ones(len(plan.slots), np.bool_)

    monkeypatch.setattr(results, "live_rows", everything_lives)
    assert is_caught(TIGHT, by_one_in=2)


def test_two_release_paths_are_caught() -> None:
    assert is_caught(TIGHT, scheduler_type=TwoReleasePaths, by_one_in=2)


def test_window_pruned_by_scheduled_length_is_caught() -> None:
    setting = dataclasses.replace(TIGHT, window=6, draft=1.0, pages=40)
    assert caught(setting) == 0
    assert is_caught(setting, scheduler_type=WindowByScheduled, by_one_in=4)


@pytest.mark.parametrize("fails", [{"fail": 0.05}, {"fail_row": 0.1}])
@pytest.mark.parametrize("state", [0, 4])
def test_pages_of_failed_steps_that_stay_published_are_caught(fails: dict[str, float], state: int) -> None:
    setting = Setting(depth=1, pages=30, state=state, grid=8, turns=0.5, **fails)  # type: ignore[arg-type]
    assert caught(setting) == 0
    assert is_caught(setting, scheduler_type=RetiresBeforeRetracting, by_one_in=12)


def test_a_state_taken_from_behind_rejected_drafts_is_caught() -> None:
    setting = Setting(depth=1, pages=30, state=4, draft=1.0)
    assert caught(setting) == 0
    assert is_caught(setting, scheduler_type=GoesOnAfterRollback, by_one_in=2)


def test_pages_that_move_wrongly_are_caught() -> None:
    setting = Setting(depth=1, pages=40, slab=4, window=6, turns=0.5, seqs=8)
    assert is_caught(setting, executor_type=ForgetsACopy, by_one_in=12)
    assert is_caught(setting, scheduler_type=ForgetsAHolder, by_one_in=12)


def test_pages_that_a_failed_step_was_to_move_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(depth=1, pages=40, slab=4, window=6, turns=0.5, seqs=8, fail=0.3)
    assert caught(setting) == 0
    monkeypatch.setattr(Journal, "moved_by", lambda journal, step: [])
    monkeypatch.setattr(Scheduler, "_untold", lambda scheduler, plan: [])
    assert caught(setting, enough=1)


def test_scattered_pages_that_block_a_sequence_are_noticed() -> None:
    setting = Setting(depth=0, pages=40, slab=8, window=6, turns=0.5, budget=8)
    assert caught(setting) == 0
    assert caught(setting, enough=1, scheduler_type=NeverMoves)
