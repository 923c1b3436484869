"""Drafts: copies that are followed, chances that are learnt, and how many drafts pay."""

from __future__ import annotations

import numpy as np
import pytest

from aengine.memory import Pool, uniform_plan
from aengine.prefix_cache import PrefixCache
from aengine.scheduler import DraftRow, PromptLookup, Scheduler
from aengine.scheduler.copies import MATCH_MAX, Copies, Odds, predicted
from aengine.scheduler.step_costs import StepCosts
from aengine.types import Int32s, Request, SamplingParams, StepPlan, StepResult, TokenRules

FLAT, STEEP = 0.02, 1.0  # what a position costs, in shares of a step of one


def ids(*values: int) -> Int32s:
    return np.array(values, np.int32)


def row(values: Int32s, *, slot: int = 0, unknown: int = 0, most: int = 20) -> DraftRow:
    return DraftRow(slot, slot + 1, values, unknown, most)


def plan_of(step: int, positions: int, handle: int = 1) -> StepPlan:
    """One row of so many positions."""
    one = np.array([positions], np.int32)
    slots = np.zeros(1, np.int64)
    return StepPlan(
        step,
        slots,
        np.array([handle], np.int64),
        ids(0),
        one,
        one,
        np.zeros(1, np.bool_),
        np.zeros(positions, np.int32),
    )


def taught(slope: float, *, wait_s: float = 0.0, most: int = 8) -> PromptLookup:
    """Knows what steps of 1 to 40 positions take, and that a text of period three repeats itself."""
    made, now_s = PromptLookup(most), 0.0
    for step in range(1, 81):
        positions = 1 + step % 40
        took_s = 0.01 * (1 + slope * (positions - 1))
        began_s = now_s + (wait_s if step > 1 else 0.0)  # after the first, all are behind a step with several samples
        now_s = began_s + took_s
        times = {"device_s": took_s, "began_s": began_s, "ended_s": now_s}
        made.observe(plan_of(step, positions), StepResult(step, ids(0).reshape(1, 1), ids(1), **times))
    text = np.resize(ids(4, 5, 6), 60)
    for known in range(7, 60):
        made.propose([row(text[:known], slot=9)], 0, 8)
    return made


# ---- copies


def test_a_copy_reads_what_it_has_itself_predicted() -> None:
    story = ids(9, 8, 7, 7, 7)
    copy = Copies(Odds()).follow(0, 1, story)
    assert predicted(story, copy.source, 4).tolist() == [7, 7, 7, 7]
    text = ids(1, 5, 6, 5, 6, 5, 6)
    copy = Copies(Odds()).follow(0, 1, text)
    assert (len(text) - copy.source, copy.match) == (2, 4)
    assert predicted(text, copy.source, 5).tolist() == [5, 6, 5, 6, 5]


def test_the_latest_place_with_three_tokens_the_same_comes_before_later_ones_with_two() -> None:
    text = ids(1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3)
    copy = Copies(Odds()).follow(0, 1, text)
    assert (copy.source, copy.match) == (3, 3)
    copy = Copies(Odds()).follow(0, 1, text[1:3].repeat(1))
    assert copy.source == -1, "two tokens repeat nothing"


def test_a_copy_goes_on_behind_one_token_that_differs() -> None:
    text = ids(1, 2, 3, 4, 5, 6, 1, 2, 3, 99, 5)
    copies = Copies(Odds())
    assert copies.follow(0, 1, text[:9]).source == 3
    copy = copies.follow(0, 1, text[:10])
    assert (copy.source, copy.match) == (4, 0)
    copy = copies.follow(0, 1, text)
    assert (copy.source, copy.match) == (5, 1)


def test_another_request_in_the_slot_begins_anew_and_matches_have_a_bound() -> None:
    copies = Copies(Odds())
    text = np.resize(ids(1, 2), 50)
    assert copies.follow(0, 1, text).match == MATCH_MAX
    other = copies.follow(0, 2, ids(1, 2, 3, 4, 5))
    assert (other.source, other.match, other.seen) == (-1, 0, 5)


def test_chances_are_how_often_predictions_were_right() -> None:
    """Three times of four, at a match that says nothing more."""
    odds = Odds()
    copy = Copies(odds).follow(0, 1, np.resize(ids(1, 2), 50))
    for trial in range(4000):
        odds.tell(copy, trial % 4 > 0)
    first, second = odds.chain(copy, 2, 0.0)
    assert first == pytest.approx(0.75, abs=0.02)
    assert second == pytest.approx(first**2)
    assert len(odds.chain(copy, 40, 0.1)) == 8, "0.75 ** 8 = 0.1001"


# ---- costs


def took(step: int, seconds: float) -> StepResult:
    return StepResult(step, ids(0).reshape(1, 1), ids(1), device_s=seconds)


def test_costs_of_sizes_are_found_in_noise_and_follow_a_machine_that_slows_down() -> None:
    rng, costs = np.random.default_rng(0), StepCosts()
    for speed in (1.0, 2.0):
        for step in range(1, 600):
            positions = (1, 2, 4, 100)[step % 4]
            took_s = speed * 0.005 * (1 + 0.15 * (positions - 1)) * float(rng.uniform(0.9, 1.2))
            costs.observe(plan_of(step, positions), took(step, took_s), waited=False)
        assert costs.step_s(1) == pytest.approx(speed * 0.00525, rel=0.2)
        assert costs.step_s(4) / costs.step_s(1) == pytest.approx(1.45, rel=0.1)
        assert costs.step_s(2) < costs.step_s(3) < costs.step_s(4) < costs.step_s(50) < costs.step_s(100)


def test_a_size_that_seemed_to_take_longer_than_a_greater_one_was_disturbed() -> None:
    costs = StepCosts()
    for step, (positions, seconds) in enumerate([(1, 0.005), (3, 0.02), (4, 0.01), (8, 0.02), (16, 0.015)]):
        costs.observe(plan_of(step, positions), took(step, seconds), waited=False)
    assert costs.step_s(3) == costs.step_s(4) < costs.step_s(8) == costs.step_s(16)


def test_sizes_seen_often_are_not_lowered_by_a_greater_one_seen_once() -> None:
    costs = StepCosts()
    for step in range(60):
        positions = (1, 8, 64)[step % 3]
        costs.observe(plan_of(step, positions), took(step, 0.01 + 0.0005 * positions), waited=False)
    before = [costs.step_s(positions) for positions in (1, 8, 64)]
    costs.observe(plan_of(60, 96), took(60, 0.002), waited=False)
    assert [costs.step_s(positions) for positions in (1, 8, 64)] == before


def test_sizes_never_seen_are_tried_for_they_promise_a_little_more_than_those_around_them() -> None:
    costs = StepCosts()
    for step, positions in enumerate([1, 9]):
        costs.observe(plan_of(step, positions), took(step, 0.01 * positions), waited=False)
    level = costs.step_s(1)
    assert costs.step_s(9) == pytest.approx(9 * level)
    for positions in range(2, 9):
        assert costs.step_s(positions) == pytest.approx(0.9 * positions * level)


def test_only_waiting_for_a_step_counts_as_waiting() -> None:
    costs, now_s = StepCosts(), 0.0
    for step in range(1, 200):
        waited, handle = step % 2 == 0, 1 + step // 50
        idle_s = 5.0 if step % 50 == 0 else 0.001 if waited else 0.0002  # between two requests the device has no work
        began_s = now_s + idle_s
        now_s = began_s + 0.005
        made = StepResult(step, ids(0).reshape(1, 1), ids(1), device_s=0.005, began_s=began_s, ended_s=now_s)
        costs.observe(plan_of(step, 1, handle), made, waited=waited)
    assert costs.wait_s == pytest.approx(0.0008, rel=0.05)


# ---- how many


@pytest.mark.parametrize(("slope", "count"), [(FLAT, 8), (STEEP, 0)])
def test_drafts_are_made_where_positions_cost_little(slope: float, count: int) -> None:
    made = taught(slope)
    text = np.resize(ids(4, 5, 6), 60)
    (drafts,) = made.propose([row(text, slot=9)], 0, 64)
    assert drafts.tolist() == np.resize(ids(4, 5, 6), count).tolist()
    assert made.waits([row(text, slot=9, unknown=1)], 0) == bool(count)
    (drafts,) = made.propose([row(text, slot=9, most=3)], 0, 2)
    assert len(drafts) == min(count, 2), "the step's room and the row's end are bounds"


def test_a_step_does_not_wait_where_idling_costs_more_than_drafts_give() -> None:
    text = np.resize(ids(4, 5, 6), 60)
    assert taught(FLAT, wait_s=0.005).waits([row(text, slot=9, unknown=1)], 0)
    assert not taught(FLAT, wait_s=0.005).waits([row(text, slot=9, unknown=1)], 31), "one row of 32"
    assert not taught(0.4, wait_s=0.01, most=1).waits([row(text, slot=9, unknown=1)], 0)


def test_only_rows_that_repeat_themselves_get_drafts() -> None:
    made, rng = taught(0.3), np.random.default_rng(1)
    text = np.resize(ids(4, 5, 6), 60)
    other = rng.integers(0, 1000, 60).astype(np.int32)
    weak = np.concatenate([other, other[7:9]])  # two tokens stand elsewhere, too
    drafts = made.propose([row(text, slot=9), row(other, slot=2), row(weak, slot=3)], 0, 64)
    assert len(drafts[0]) > 0
    assert [len(each) for each in drafts[1:]] == [0, 0]


# ---- in the scheduler


class Spy:
    """Drafts token 1 for all that it is shown, and notes whom it was shown."""

    def __init__(self, rows_max: int) -> None:
        self.rows_max = rows_max
        self.shown: set[int] = set()

    def waits(self, rows: list[DraftRow], others: int) -> bool:
        self.shown |= {each.handle for each in rows}
        return True

    def propose(self, rows: list[DraftRow], others: int, room: int) -> list[Int32s]:
        self.shown |= {each.handle for each in rows}
        return [ids(1)[: each.most] for each in rows]

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        assert len(plan.slots) <= self.rows_max


def drive(spy: Spy, sampling: list[SamplingParams], steps: int = 12) -> Scheduler:
    """Depth 1: a step is retired when another is in flight, or when nothing was planned."""
    made = Scheduler(PrefixCache(Pool(uniform_plan(64, 16))), max_seqs=8, budget_tokens=64, max_tokens=64, drafter=spy)
    for handle, params in enumerate(sampling, start=1):
        prompt = np.arange(handle, handle + 5, dtype=np.int32)
        made.submit(Request(handle, str(handle), prompt, params, TokenRules(), 60, handle))
    flying: list[StepPlan] = []
    for _ in range(steps):
        plan = made.plan()
        if plan is not None:
            flying.append(plan)
        if len(flying) > 1 or plan is None:
            done = flying.pop(0)
            right = np.ones((len(done.slots), 2), np.int32)
            made.commit(StepResult(done.step, right, done.samples.copy()))
    return made


def test_rows_under_penalties_are_not_shown_to_the_drafter_and_go_on_beside_drafts() -> None:
    plain, ruled = SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, repetition_penalty=1.2)
    spy = Spy(8)
    made = drive(spy, [plain, ruled])
    assert spy.shown == {1}
    assert made.stats().accepted_tokens >= 3
    first, second = (made.sequence(handle).slot for handle in (1, 2))
    assert made.columns.known[first] - 5 > made.columns.known[second] - 5 >= 4


def test_nobody_is_asked_while_too_many_rows_run() -> None:
    spy = Spy(2)
    made = drive(spy, [SamplingParams(temperature=0.0)] * 3)
    assert not spy.shown
    assert made.stats().drafted_tokens == 0
    assert made.in_flight == 1, "steps are overlapped"
