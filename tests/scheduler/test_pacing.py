"""Chunks sized by time: steps with decode rows end in time, prompts go on, tokens do not change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.memory import Pool, uniform_plan
from aengine.prefix_cache import PrefixCache
from aengine.runner.sim import SimProfile
from aengine.scheduler import Scheduler
from aengine.scheduler.pacing import PROBE_PAGES, SHARE, Pacer
from aengine.types import Request, SamplingParams, StepPlan, StepResult, TokenRules

PAGE = 16
PROFILE = SimProfile(base_s=0.010, per_row_s=0.001, per_token_s=0.0004)


def taught(target_s: float = 0.05, *, rows: int = 8, profile: SimProfile = PROFILE) -> Pacer:
    pacer = Pacer(target_s, PAGE)
    for step in range(30):
        pacer.observe(rows - step % 3, 0, profile.step_s(rows - step % 3, rows - step % 3, 0))
    for tokens in (64, 128, 256):
        pacer.observe(rows, tokens, profile.step_s(rows, rows + tokens, 0))
    return pacer


def test_it_finds_what_rows_and_tokens_cost() -> None:
    pacer = taught()
    assert pacer.decode_s(8) == pytest.approx(PROFILE.step_s(8, 8, 0), rel=0.02)
    assert pacer.decode_s(4) == pytest.approx(PROFILE.step_s(4, 4, 0), rel=0.05)
    assert pacer.token_s == pytest.approx(0.0004, rel=0.05)


def test_the_budget_fills_the_time_that_decode_rows_leave() -> None:
    budget = taught().prompt_tokens(8)
    assert budget is not None
    assert PROFILE.step_s(8, 8 + budget, 0) <= 0.05 * 1.02
    assert PROFILE.step_s(8, 8 + budget + PAGE, 0) > 0.05 * 0.98


def test_without_decode_rows_there_is_no_limit() -> None:
    assert taught().prompt_tokens(0) is None


def test_before_anything_is_known_a_few_pages_are_tried() -> None:
    pacer = Pacer(0.05, PAGE)
    assert pacer.prompt_tokens(8) == PROBE_PAGES * PAGE


def test_prompts_keep_a_share_when_decode_rows_alone_are_too_slow() -> None:
    budget = taught(target_s=0.001).prompt_tokens(8)
    assert budget is not None
    assert budget * PROFILE.per_token_s >= SHARE * PROFILE.step_s(8, 8, 0) - PAGE * PROFILE.per_token_s


def test_what_rows_cost_is_learnt_beside_prompts() -> None:
    """Two rows say nothing about sixteen, and there may never be a step of sixteen rows without prompts."""
    pacer = Pacer(0.05, PAGE)
    pacer.observe(2, 0, PROFILE.step_s(2, 2, 0))
    for rows in range(2, 17):
        tokens = pacer.prompt_tokens(rows)
        assert tokens is not None
        pacer.observe(rows, tokens, PROFILE.step_s(rows, rows + tokens, 0))
    assert pacer.decode_s(16) == pytest.approx(PROFILE.step_s(16, 16, 0), rel=0.1)


def test_a_slower_device_is_noticed_and_one_slow_step_forgiven() -> None:
    pacer = taught()
    before = pacer.prompt_tokens(8)
    assert before is not None
    pacer.observe(8, 128, 5.0)
    once = pacer.prompt_tokens(8)
    assert once is not None
    assert before / 4 < once < before
    for _ in range(30):
        pacer.observe(8, 128, PROFILE.step_s(8, 8, 0) + 128 * 0.0016)
    later = pacer.prompt_tokens(8)
    assert later is not None
    assert later == pytest.approx(before / 4, abs=PAGE)


def test_equal_steps_are_one_observation_of_their_mean() -> None:
    """Whether somebody asks after each of them or after all makes little difference to what rows cost."""
    asked, unasked = taught(), taught()
    for step in range(40):
        seconds = 1.2 * PROFILE.step_s(8, 8, 0) * (1.05 if step % 2 else 0.95)
        for pacer in (asked, unasked):
            pacer.observe(8, 0, seconds)
        asked.decode_s(8)
    assert unasked.decode_s(8) == pytest.approx(asked.decode_s(8), rel=0.02)
    assert unasked.decode_s(8) == pytest.approx(1.2 * PROFILE.step_s(8, 8, 0), rel=0.03)


def test_one_slow_step_of_equal_ones_counts_little() -> None:
    pacer = taught()
    for step in range(16):
        pacer.observe(8, 0, 9.0 if step == 5 else PROFILE.step_s(8, 8, 0))
    assert pacer.decode_s(8) < 1.25 * PROFILE.step_s(8, 8, 0)


STEPS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2048), st.floats(0.0, 100.0)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.floats(1e-4, 10.0), st.integers(1, 300), st.sampled_from([1, 16, 64]))
def test_whatever_was_measured_prompts_get_whole_pages(
    steps: list[tuple[int, int, float]], target_s: float, rows: int, page: int
) -> None:
    pacers = [Pacer(target_s, page), Pacer(target_s, page)]
    for pacer in pacers:
        for decodes, tokens, seconds in steps:
            pacer.observe(decodes, tokens, seconds)
    budget, again = (pacer.prompt_tokens(rows) for pacer in pacers)
    assert budget == again
    assert budget is not None
    assert budget >= page
    assert budget % page == 0
    assert pacers[0].decode_s(rows) >= 0.0


# ---- in the scheduler


def request(handle: int, prompt: int, output: int) -> Request:
    return Request(
        handle=handle,
        id=str(handle),
        prompt_ids=np.arange(handle * 10_000, handle * 10_000 + prompt, dtype=np.int32),
        sampling=SamplingParams(max_tokens=output),
        rules=TokenRules(),
        max_total_tokens=prompt + output,
        seed=0,
    )


def run(step_s: float, *, profile: SimProfile = PROFILE) -> tuple[list[StepPlan], list[float], int]:
    """8 steady rows, and 4 long prompts beside them: plans and seconds of steps with decode rows from the first long
    prompt on, and the steps until all of these had their first token."""
    cache = PrefixCache(Pool(uniform_plan(1200, PAGE)))
    made = Scheduler(cache, max_seqs=12, budget_tokens=512, max_tokens=2600, page_tokens=PAGE, step_s=step_s)
    for handle in range(1, 9):
        made.submit(request(handle, 20, 2000))
    waiting: list[StepPlan] = []
    plans: list[StepPlan] = []
    took: list[float] = []
    for number in range(2000):
        if number == 40:
            for handle in range(9, 13):
                made.submit(request(handle, 2048, 8))
        plan = made.plan()
        assert plan is not None
        waiting.append(plan)
        if len(waiting) == 2:
            done = waiting.pop(0)
            seconds = profile.step_s(len(done.slots), done.n_tokens, int((done.starts + done.counts).sum()))
            counts = np.minimum(done.samples, 1)
            made.commit(StepResult(done.step, np.full((len(counts), 1), 5, np.int32), counts, device_s=seconds))
            if number > 40 and done.decodes:
                plans.append(done)
                took.append(seconds)
            if number > 40 and made.stats().running == 8 and not made.stats().waiting:
                return plans, took, number - 40
    raise AssertionError("the long prompts did not end")


def test_steps_stay_in_time_while_long_prompts_arrive() -> None:
    plans, took, steps = run(0.06)
    assert max(took) <= 0.06 * 1.05
    prompts = [int(plan.counts[plan.samples < plan.counts].sum()) for plan in plans]
    assert sum(prompts) >= 4 * 2048 - 4 * PAGE
    assert steps < 4 * 2048 / (0.6 * (0.06 - 0.018) / 0.0004), "prompts must use the time there is"
    _, unpaced, fewer = run(0.0)
    assert max(unpaced) > 0.2
    assert fewer < steps


def test_costs_that_grow_with_the_context_are_followed() -> None:
    profile = SimProfile(base_s=0.010, per_row_s=0.001, per_token_s=0.0003, per_context_s=2e-6)
    _, took, _ = run(0.06, profile=profile)
    assert np.quantile(took, 0.95) <= 0.06 * 1.15
