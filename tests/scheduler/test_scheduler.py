"""plan and commit by hand: what a step holds, in which order, and what it costs."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from aengine.memory import Full, Pool, Window, attention_group, uniform_plan
from aengine.memory import plan as page_plan
from aengine.prefix_cache import Lease, PrefixCache
from aengine.scheduler import DraftRow, Scheduler
from aengine.types import FinishReason, Request, SamplingParams, StepPlan, StepResult, TokenRules


def scheduler(pages: int = 200, **changes: int) -> Scheduler:
    settings = {"max_seqs": 8, "budget_tokens": 64, "max_tokens": 512, "page_tokens": 16, **changes}
    return Scheduler(PrefixCache(Pool(uniform_plan(pages, 16))), **settings)  # type: ignore[arg-type]


def request(handle: int, prompt: int, output: int = 8, *, priority: int = 0, first: int | None = None) -> Request:
    base = first if first is not None else handle * 1000
    return Request(
        handle=handle,
        id=str(handle),
        prompt_ids=np.arange(base, base + prompt, dtype=np.int32),
        sampling=SamplingParams(max_tokens=output),
        rules=TokenRules(stop_ids=(7,)),
        max_total_tokens=prompt + output,
        seed=0,
        priority=priority,
    )


def result(plan: StepPlan, token: int = 1) -> StepResult:
    rows = len(plan.slots)
    return StepResult(plan.step, np.full((rows, 1), token, np.int32), np.minimum(plan.samples, 1))


def step(made: Scheduler, token: int = 1) -> StepPlan:
    plan = made.plan()
    assert plan is not None
    made.commit(result(plan, token))
    return plan


def test_decode_rows_come_first_then_chunks_within_the_budget() -> None:
    made = scheduler()
    made.submit(request(1, 20))
    step(made)
    made.submit(request(2, 200))
    plan = made.plan()
    assert plan is not None
    assert plan.handles.tolist() == [1, 2]
    assert plan.counts.tolist() == [1, 48]
    assert plan.samples.tolist() == [1, 0]
    assert plan.n_tokens <= 64


def test_the_next_step_is_planned_before_the_token_is_known() -> None:
    made = scheduler()
    made.submit(request(1, 10))
    first, second = made.plan(), made.plan()
    assert first is not None
    assert second is not None
    assert not first.relay.any()
    assert second.relay.tolist() == [True]
    assert second.starts.tolist() == [10]
    assert len(second.ids) == 0


def test_a_length_stop_is_known_when_planning() -> None:
    made = scheduler()
    made.submit(request(1, 10, output=2))
    plans = [made.plan(), made.plan()]
    assert made.plan() is None
    for plan in plans:
        assert plan is not None
        outputs = made.commit(result(plan))
    assert [(f.handle, f.reason) for f in outputs.finished] == [(1, FinishReason.LENGTH)]
    assert made.stats().zombie_rows == 0


def test_an_eos_leaves_one_zombie_row_that_changes_nothing() -> None:
    made = scheduler()
    made.submit(request(1, 10))
    first, second = made.plan(), made.plan()
    assert first is not None
    assert second is not None
    outputs = made.commit(result(first, token=7))
    assert outputs.finished[0].stop_id == 7
    late = made.commit(result(second, token=5))
    assert not late
    assert made.stats().zombie_rows == 1
    made.cache.check()


def test_a_slot_in_flight_is_not_given_away() -> None:
    made = scheduler(max_seqs=1)
    made.submit(request(1, 10))
    made.submit(request(2, 10))
    first, second = made.plan(), made.plan()
    assert first is not None
    assert second is not None
    made.commit(result(first, token=7))
    assert made.plan() is None  # the zombie row still names the slot
    made.commit(result(second))
    third = made.plan()
    assert third is not None
    assert third.handles.tolist() == [2]


def test_the_youngest_is_preempted_and_resumes_from_the_cache() -> None:
    made = scheduler(pages=6, max_tokens=96)
    for handle in (1, 2):
        made.submit(request(handle, 32, output=40))
    seen: set[int] = set()
    for _ in range(200):
        plan = made.plan()
        if plan is None:
            break
        seen.update(plan.handles.tolist())
        if made.stats().preemptions and made.sequence(1) is not None:
            assert 1 in plan.handles.tolist(), "the older one must be the one that goes on"
        made.commit(result(plan))
    assert seen == {1, 2}
    assert made.stats().preemptions > 0
    assert not made.has_unfinished
    assert made.cache.stats().hit_tokens_by_cause["resume"] > 0


def test_priority_then_age_decides_who_gets_a_slot() -> None:
    made = scheduler(max_seqs=1)
    made.submit(request(1, 10, priority=1))
    made.submit(request(2, 10))
    made.submit(request(3, 10, priority=-1))
    plan = made.plan()
    assert plan is not None
    assert plan.handles.tolist() == [3]


def test_choices_of_one_prompt_compute_it_once() -> None:
    made = scheduler(budget_tokens=512)
    for handle in range(1, 5):
        made.submit(request(handle, 200, first=0))
    computed = 0
    while made.stats().waiting or not computed or any(made.columns.scheduled[:4] < 200):
        plan = made.plan()
        assert plan is not None
        computed += int(plan.counts[plan.counts > 1].sum())
        made.commit(result(plan))
    assert computed <= 200 + 3 * 16


def test_an_abort_is_a_flag_until_the_step_retires() -> None:
    made = scheduler()
    made.submit(request(1, 10))
    plan = made.plan()
    assert plan is not None
    made.abort(1)
    assert made.plan() is None
    outputs = made.commit(result(plan))
    assert [f.reason for f in outputs.finished] == [FinishReason.ABORT]
    assert not len(outputs.handles)
    assert made.cache.stats().leases == 0


def test_an_abort_while_waiting_finishes_at_the_next_plan() -> None:
    made = scheduler(max_seqs=1)
    made.submit(request(1, 10))
    made.submit(request(2, 10))
    made.plan()
    made.abort(2)
    made.plan()
    assert [f.handle for f in made.flush().finished] == [2]


def test_drafts_are_accepted_up_to_the_first_wrong_one() -> None:
    class Guess:
        rows_max = 2

        def propose(self, rows: list[DraftRow], others: int, room: int) -> list[np.ndarray]:
            return [np.array([1, 1, 1], np.int32) for _ in rows]

        def observe(self, plan: StepPlan, result: StepResult) -> None:
            assert plan.step == result.step

    made = Scheduler(
        PrefixCache(Pool(uniform_plan(50, 16))), max_seqs=2, budget_tokens=64, max_tokens=128, drafter=Guess()
    )
    made.submit(request(1, 10))
    step(made)
    plan = made.plan()
    assert plan is not None
    assert plan.counts.tolist() == plan.samples.tolist() == [4]
    outputs = made.commit(StepResult(plan.step, np.array([[1, 1, 5, 0]], np.int32), np.array([3], np.int32)))
    assert list(outputs.tokens) == [1, 1, 5]
    assert made.columns.scheduled[0] == made.columns.computed[0] == 13
    assert made.columns.known[0] == 14
    stats = made.stats()
    assert (stats.drafts, stats.drafted_tokens, stats.accepted_tokens) == (1, 3, 2)
    assert stats.accepted_by_position == (1, 1, 0)


@pytest.mark.parametrize("rows", [64, 1024])
def test_steady_decode_touches_rows_only_where_they_cross_pages(rows: int) -> None:
    """Not a timed claim: guards against work per row in Python by counting the rows that the cache hears of."""
    cache = PrefixCache(Pool(uniform_plan(rows * 8, 16)))
    made = Scheduler(cache, max_seqs=rows, budget_tokens=rows * 40, max_tokens=256)
    for handle in range(1, rows + 1):
        made.submit(request(handle, 17, output=64))
    step(made)
    grown = 0
    real = cache.grow_rows

    def counted(leases: list[Lease], starts: list[int]) -> object:
        nonlocal grown
        grown += len(leases)
        return real(leases, starts)

    cache.grow_rows = counted  # type: ignore[method-assign,assignment]
    cache.grow = None  # type: ignore[method-assign,assignment]  # nobody asks one by one
    for _ in range(16):
        assert len(step(made).slots) == rows
    assert grown == rows


def test_everything_generated_is_a_hit_once_its_sequence_has_ended() -> None:
    """Also what its last step has filled."""
    made = scheduler()
    made.submit(request(1, 20, output=60))
    while made.has_unfinished:
        step(made)
    again = request(2, 80)
    ids = again.prompt_ids.copy()
    ids[:20], ids[20:] = np.arange(1000, 1020), 1
    made.submit(msgspec.structs.replace(again, prompt_ids=ids))
    step(made)
    assert made.cache.stats().hit_tokens == 64  # 79 of the 80 were computed: 4 full pages


def test_groups_with_pages_of_two_sizes_grow_when_each_is_due() -> None:
    sizes = {"kv_heads": 1, "head_dim": 16, "dtype": "float32"}
    groups = [
        attention_group("full", Full(), 1, tokens_per_page=16, **sizes),  # type: ignore[arg-type]
        attention_group("window", Window(20), 1, tokens_per_page=32, **sizes),  # type: ignore[arg-type]
    ]
    cache = PrefixCache(Pool(page_plan(groups, 64 * groups[1].payload_bytes)))
    made = Scheduler(cache, max_seqs=2, budget_tokens=64, max_tokens=256, page_tokens=16)
    for handle in (1, 2):
        made.submit(request(handle, 10 + handle, output=80))
    columns: dict[tuple[int, int], list[int]] = {}
    while made.has_unfinished:
        for delta in step(made).tables:
            for slot, column in zip(delta.slots.tolist(), delta.columns.tolist(), strict=True):
                columns.setdefault((delta.group, slot), []).append(column)
        cache.check()
    assert columns == {(0, 0): [*range(6)], (0, 1): [*range(6)], (1, 0): [*range(3)], (1, 1): [*range(3)]}


def test_what_is_known_to_be_ready_is_what_looking_would_find() -> None:
    """While `even` spares the search, the search would find the same rows: over arrivals, aborts, ends, preemptions."""
    made = scheduler(pages=40, max_seqs=6)
    chance = np.random.default_rng(5)
    spared = handle = 0
    for turn in range(400):
        if turn % 23 == 0 and made.stats().waiting < 4:
            handle += 1
            made.submit(request(handle, int(chance.integers(1, 40)), int(chance.integers(2, 60))))
        if turn % 61 == 60 and made.oldest() is not None:
            made.abort(made.oldest() or 0)
        c = made.columns
        if c.even:
            ready = (c.expected - c.scheduled == 1) & (c.expected < c.limit) & ~c.paused
            assert sorted(made.order.tolist()) == ready.nonzero()[0].tolist()
            spared += 1
        plan = made.plan()
        if plan is not None and made.in_flight > turn % 2:
            made.commit(result(made._in_flight[0], int(chance.integers(1, 6))))
    assert spared > 100


def test_steady_rows_plan_and_account_as_looking_would() -> None:
    """Two schedulers get the same calls, one of them is made to look every time: arrivals, aborts, stop tokens, failed
    rows, pools that run short, results that come late."""
    spared = 0
    for seed, depth in enumerate((0, 1, 2, 1)):
        twins = [scheduler(pages=(30, 60, 60, 200)[seed], max_seqs=6) for _ in range(2)]
        chance = np.random.default_rng(seed)
        for turn in range(300):
            if turn % 37 == 0:
                asked = request(1 + turn // 37, int(chance.integers(1, 40)), int(chance.integers(20, 90)))
                for made in twins:
                    made.submit(asked)
            if turn % 97 == 96 and twins[0].oldest() is not None:
                for made in twins:
                    made.abort(made.oldest() or 0)
            spared += step_both(twins, depth, int(chance.integers(1, 40)), fails=turn % 71 == 70)
    assert spared > 300


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_lanes_plan_publish_and_evict_as_looking_would(depth: int) -> None:
    """Few disturbances: rows that cross pages together, in a pool that others have filled. One row ends, one fails, and
    others arrive, which hit what was generated."""
    twins = [scheduler(pages=80, max_seqs=8) for _ in range(2)]
    for made in twins:
        for number, page in enumerate(made.cache.pool.take([80])[0]):
            made.cache.pool.publish(page, bytes([number]))
            made.cache.pool.drop(page, 0)
    asked = [request(handle, 20 + handle % 3, 60 if handle == 3 else 160) for handle in range(1, 7)]
    tokens = np.concatenate([asked[1].prompt_ids, np.full(120, 5, np.int32)])
    asked += [msgspec.structs.replace(request(handle, 140), prompt_ids=tokens[:140]) for handle in (7, 8)]
    lanes = 0
    for turn in range(150):
        for made in twins:
            for late in asked[:6] if turn == 0 else asked[6:] if turn == 130 else ():
                made.submit(late)
        step_both(twins, depth, 5, fails=turn == 90)
        steady = twins[0].columns.steady
        lanes += steady is not None and steady.lane(steady.step) is not None
    assert lanes > 3
    hits = [made.cache.stats().hit_tokens for made in twins]
    assert hits[0] == hits[1] >= 2 * 128
    assert twins[0].cache.pool.groups[0].evicted > 40


class Now:
    """A grammar that allows all, but forces now one token, now some, and ends."""

    error = None

    def __init__(self, seed: int) -> None:
        self._said, self._ends = seed, seed + 60 + seed % 50

    @property
    def ended(self) -> bool:
        return self._said >= self._ends

    def accept(self, token: int) -> bool:
        self._said += 1
        return not self.ended

    def forced(self) -> list[int]:
        return [9] * {17: 1, 23: 3}.get(self._said % 40, 0)


def test_steady_rows_under_grammars_plan_and_account_as_looking_would() -> None:
    twins = [scheduler(pages=120, max_seqs=6) for _ in range(2)]
    for handle in range(1, 7):
        for made in twins:
            made.submit(request(handle, 10 + handle, output=150), Now(2 * handle) if handle % 3 else None)
    spared = lanes = 0
    while twins[0].has_unfinished:
        steady = twins[0].columns.steady
        spared += steady is not None
        lanes += steady is not None and steady.lane(steady.step) is not None
        twins[1].columns.steady = None
        plans = [made.plan() for made in twins]
        assert_same(*plans)
        while twins[0].in_flight > (plans[0] is not None):
            told = [made.commit(result(made._in_flight[0], 5)) for made in twins]
            assert_same(*told)
            assert names_of(twins[0]) == names_of(twins[1])
        if plans[0] is not None and len(plans[0].deferred):
            rows = [made.decide()[0] for made in twins]
            assert_same(*rows)
    assert spared > 60
    assert lanes > 3
    # two times three in four rows, one of which ends with the first of three; one alone is sampled
    assert {made.stats().forced_tokens for made in twins} == {22}


def step_both(twins: list[Scheduler], depth: int, token: int, *, fails: bool) -> bool:
    """The same step of two schedulers, of which the second is made to look; whether the first need not."""
    spared = twins[0].columns.steady is not None
    twins[1].columns.steady = None
    plans = [made.plan() for made in twins]
    assert_same(*plans)
    if plans[0] is not None and twins[0].in_flight > depth:
        told = []
        for made in twins:
            answer = result(made._in_flight[0], token)
            if fails and len(answer.counts):
                answer = msgspec.structs.replace(answer, failed={0: "planted"})
            told.append(made.commit(answer))
        assert_same(*told)
        for name in ("known", "computed", "scheduled", "expected", "capacity", "last_step"):
            one, other = (getattr(made.columns, name)[made.order] for made in twins)
            assert one.tolist() == other.tolist(), name
        assert names_of(twins[0]) == names_of(twins[1])
        twins[0].cache.check()
    return spared


def names_of(made: Scheduler) -> list[tuple[bytes, int]]:
    """What is published, oldest first."""
    return [(name, page.id) for name, page in made.cache.pool.names[0].items()]


def test_what_runs_publishes_every_page_in_the_step_that_fills_it() -> None:
    """None waits for another, whether rows are looked at, or go on steadily, in lanes after a page's steps."""
    made = scheduler(pages=16 * 12, max_seqs=16)
    for handle in range(1, 17):
        made.submit(request(handle, 16 + handle, output=100))
    while int((made.columns.known >= 33).sum()) < 16:
        step(made)
    for _ in range(40):
        step(made)
        assert len(names_of(made)) == int((made.columns.computed // 16).sum())


def assert_same(one: object, other: object) -> None:
    """The same fields, arrays and structures within included."""
    if isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray)
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()
    elif isinstance(one, msgspec.Struct):
        assert type(one) is type(other)
        for name in one.__struct_fields__:
            assert_same(getattr(one, name), getattr(other, name))
    elif isinstance(one, (list, tuple)):
        assert isinstance(other, (list, tuple))
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other
