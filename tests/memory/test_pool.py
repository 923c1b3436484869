"""The slab pool: exact admission, placement, eviction order, accounting."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.memory import Full, Page, Pool, State, Window, plan, uniform_plan
from aengine.memory.naming import publish_all, publish_fresh
from aengine.prefix_cache.audit import audit
from tests.prefix_cache.layouts import attention, small_plan, state


def pool_of(slots: tuple[int, ...], large_pages: int) -> Pool:
    """A pool whose groups have so many slots per large page."""
    common = math.lcm(*slots)
    specs = [attention(f"g{i}", Full(), layers=common // n) for i, n in enumerate(slots)]
    large = slots[0] * specs[0].payload_bytes
    made = plan(specs, large * (large_pages + 1), large_bytes=large)
    assert tuple(group.slots for group in made.groups) == slots
    assert made.usable == large_pages
    return Pool(made)


def give(pool: Pool, group: int, count: int) -> list[Page]:
    need = [0] * len(pool.groups)
    need[group] = count
    return pool.take(need)[group]


def cache(pool: Pool, pages: list[Page], name: str = "") -> None:
    """Publish and let go."""
    for page in pages:
        pool.publish(page, f"{name}{page.group}:{page.id}".encode())
        pool.drop(page, 0)


def check(pool: Pool, held: list[Page]) -> None:
    audit(pool, [held])


def test_null_pages_are_never_handed_out() -> None:
    pool = Pool(uniform_plan(5))
    assert [page.id for page in give(pool, 0, 5)] == [1, 2, 3, 4, 5]
    assert pool.shortage([1]) == (1,)
    assert pool.take_one(0) is None


def test_shortage_counts_what_is_missing() -> None:
    pool = pool_of((4, 1), 3)
    assert pool.shortage([12, 0]) is None
    assert pool.shortage([8, 1]) is None
    assert pool.shortage([9, 1]) == (0, 1)
    assert pool.shortage([13, 2]) == (1, 2)
    assert pool.try_take([13, 0]) is None
    check(pool, [])


def test_the_fullest_slab_is_filled_first() -> None:
    pool = pool_of((4, 1), 4)
    pages = give(pool, 0, 16)
    by_slab = [pages[i : i + 4] for i in range(0, 16, 4)]
    for slab, keep in zip(by_slab, (1, 3, 2, 0), strict=True):
        for page in slab[keep:]:
            pool.drop(page, 0)
    assert give(pool, 0, 1)[0].slab is by_slab[1][0].slab
    assert give(pool, 0, 2)[1].slab is by_slab[2][0].slab


def test_an_empty_slab_goes_back_to_all() -> None:
    pool = pool_of((4, 1), 2)
    pages = give(pool, 0, 8)
    assert pool.shortage([0, 1]) == (0, 1)
    for page in pages[:4]:
        pool.drop(page, 0)
    assert give(pool, 1, 1)[0].slab is pages[0].slab
    check(pool, [*pages[4:], pool.groups[1].pages[pages[0].slab.index]])


def test_fenced_pages_wait_for_their_step() -> None:
    pool = Pool(uniform_plan(2))
    first, second = give(pool, 0, 2)
    pool.drop(first, 3)
    pool.drop(second, 0)
    assert pool.groups[0].fenced == 1
    assert give(pool, 0, 1) == [second]
    assert pool.shortage([1]) == (1,)
    pool.retire(2)
    assert pool.shortage([1]) == (1,)
    pool.retire(3)
    assert give(pool, 0, 1) == [first]


def test_a_fence_outlasts_the_holder_that_let_go_last() -> None:
    """Two holders: the one that drops last was named by an older step than the one before it."""
    pool = Pool(uniform_plan(1))
    (page,) = give(pool, 0, 1)
    pool.pin(page)
    pool.drop(page, 9)
    pool.drop(page, 2)
    pool.retire(8)
    assert pool.shortage([1]) == (1,)
    pool.retire(9)
    assert pool.shortage([1]) is None


def test_a_fenced_page_can_be_pinned_again() -> None:
    pool = Pool(uniform_plan(1))
    (page,) = give(pool, 0, 1)
    pool.publish(page, b"k")
    pool.drop(page, 1)
    pool.pin(page)
    pool.drop(page, 4)
    pool.retire(1)  # the first entry is stale
    assert pool.groups[0].fenced == 1
    check(pool, [])
    pool.retire(4)
    assert pool.groups[0].cached == 1
    check(pool, [])


def test_eviction_takes_the_page_unused_longest() -> None:
    pool = Pool(uniform_plan(4))
    pages = give(pool, 0, 4)
    for index in (2, 0, 3, 1):
        cache(pool, [pages[index]])
    pool.pin(pages[0])  # touched: no candidate any more
    assert give(pool, 0, 3) == [pages[2], pages[3], pages[1]]
    assert len(pool.names[0]) == 1
    assert pool.groups[0].evicted == 3


def test_an_older_idle_slab_of_another_group_goes_first() -> None:
    pool = pool_of((4, 1), 3)
    small = give(pool, 0, 8)
    cache(pool, small[:4])  # an idle slab, and the oldest
    (large,) = give(pool, 1, 1)
    cache(pool, [large])
    assert give(pool, 1, 1)[0].slab is small[0].slab
    assert pool.groups[0].evicted_by_steal == 4
    assert give(pool, 1, 1) == [large]
    check(pool, [*small[4:], large, pool.groups[1].pages[small[0].slab.index]])


def test_own_free_slots_before_any_eviction() -> None:
    pool = pool_of((4, 1), 2)
    small = give(pool, 0, 2)
    cache(pool, small)  # idle, two free slots
    cache(pool, give(pool, 1, 1))
    again = give(pool, 0, 2)
    assert {page.slab for page in again} == {small[0].slab}
    assert len(pool.names[0]) == 2
    check(pool, again)


def test_choices_never_break_the_promise_to_a_later_group() -> None:
    """Group 0 has older cached pages in an idle slab that group 1 needs: it must evict younger ones instead."""
    pool = pool_of((2, 1), 2)
    first = give(pool, 0, 4)
    by_slab: dict[int, list[Page]] = {}
    for page in first:
        by_slab.setdefault(page.slab.index, []).append(page)
    old, mixed = by_slab.values()
    cache(pool, old)
    cache(pool, [mixed[1]])
    assert pool.shortage([1, 1]) is None
    small, large = pool.take([1, 1])
    assert small == [mixed[1]]
    assert large[0].slab is old[0].slab
    check(pool, [mixed[0], *small, *large])


def test_release_of_everything_leaves_whole_large_pages() -> None:
    pool = pool_of((4, 2, 1), 6)
    rng = random.Random(1)
    pages = [page for group in pool.take([5, 3, 2]) for page in group]
    rng.shuffle(pages)
    for page in pages:
        pool.drop(page, rng.choice((0, 1)))
    pool.retire(1)
    check(pool, [])
    assert pool.unowned_slabs == pool.plan.usable == 6


def test_publish_keeps_the_first_of_twins() -> None:
    pool = Pool(uniform_plan(2))
    first, second = give(pool, 0, 2)
    assert pool.publish(first, b"k")
    assert not pool.publish(second, b"k")
    assert second.key is None
    pool.unpublish(first)
    assert pool.publish(second, b"k")


def test_clear_forgets_all_but_held_pages() -> None:
    pool = Pool(uniform_plan(3))
    held, fenced, cached = give(pool, 0, 3)
    for page in (held, fenced, cached):
        pool.publish(page, bytes([page.id]))
    pool.drop(fenced, 5)
    pool.drop(cached, 0)
    pool.clear()
    assert list(pool.names[0].values()) == [held]
    pool.retire(5)
    assert pool.unowned_slabs == 2
    check(pool, [held])


def test_retyping_asks_for_zeroing_only_between_element_types() -> None:
    specs = [attention("f32", Full()), attention("bf16", Window(8), layers=2, dtype="bfloat16"), state(size=128)]
    pool = Pool(small_plan(specs, 1))
    for group, zeroed in ((0, ()), (0, ()), (1, (1,)), (2, (1,)), (0, ())):
        pages = give(pool, group, 1)
        assert pool.drain_retyped() == zeroed, group
        assert pool.drain_retyped() == ()
        pool.drop(pages[0], 0)
    assert pool.retypes == 2


def test_one_pinned_page_per_slab_strands_the_rest() -> None:
    pool = pool_of((4, 1), 5)
    pages = give(pool, 0, 20)
    for page in pages:
        if page.slot:
            pool.drop(page, 0)
    assert pool.shortage([0, 1]) == (0, 1)
    assert pool.stranded_bytes(1) == 15 * pool.plan.groups[0].pitch
    assert pool.stranded_bytes(0) == 0
    assert pool.stats().waste() == pytest.approx(15 / 24)  # of six large pages, the null one included
    assert pool.shortage([15, 0]) is None


def test_every_byte_is_accounted_for() -> None:
    pool = Pool(small_plan([attention("a", Full(), page=3), state(size=333)], 5, 2))
    rng = random.Random(2)
    held: list[Page] = []
    for _ in range(300):
        need = [rng.randrange(3), rng.randrange(2)]
        if rng.random() < 0.5 and pool.shortage(need) is None:
            held += [page for group in pool.take(need) for page in group]
        elif held:
            page = held.pop(rng.randrange(len(held)))
            if page.key is None and rng.random() < 0.5:
                pool.publish(page, str((page.group, page.id, rng.random())).encode())
            pool.drop(page, pool.fence.retired + rng.randrange(2))
        if rng.random() < 0.2:
            pool.retire(pool.fence.retired + 1)
        check(pool, held)
        s = pool.stats()
        parts = (s.live_bytes, s.fenced_bytes, s.cached_bytes, s.slab_free_bytes, s.pitch_bytes)
        assert sum(parts) + s.unowned_bytes + s.null_bytes == s.arena_bytes
        for group, planned in zip(s.groups, pool.plan.groups, strict=True):
            assert group.total == group.slabs * planned.slots


def brute_force(pool: Pool, need: list[int]) -> bool:
    """Whether some hand-out of unowned and idle slabs to groups, and of slots in active slabs, serves `need`."""
    spare = sum(1 for slab in pool.slabs[1:] if slab.live == 0)
    open_slots = [0] * len(need)
    for group in pool.groups:
        for page_index in range(group.slots, len(group.pages)):
            slab = pool.slabs[page_index // group.slots]
            if slab.group == group.index and slab.live:
                page = group.pages[page_index]
                open_slots[group.index] += page is None or (page.ref == 0 and page.where != 2)
    ways = itertools.product(range(spare + 1), repeat=len(need))
    return any(
        sum(way) <= spare and all(open_slots[g] + way[g] * pool.groups[g].slots >= need[g] for g in range(len(need)))
        for way in ways
    )


@pytest.mark.parametrize("slots", [(1,), (3, 1), (4, 2), (6, 3, 2)])
def test_admission_is_exact(slots: tuple[int, ...]) -> None:
    """Against brute force over random states: feasible exactly when `shortage` says so, and then `take` delivers."""
    rng = random.Random(str(slots))
    feasible = cases = 0
    for _ in range(60):
        pool = pool_of(slots, rng.randint(1, 5))
        held: list[Page] = []
        for _ in range(25):
            need = [rng.randrange(2 * n + 2) for n in slots]
            answer = pool.shortage(need)
            assert (answer is None) == brute_force(pool, need)
            cases += 1
            if answer is None:
                feasible += 1
                taken = pool.take(need)
                assert [len(pages) for pages in taken] == need
                held += [page for pages in taken for page in pages]
            rng.shuffle(held)
            for _ in range(min(len(held), rng.randrange(8))):
                page = held.pop()
                if rng.random() < 0.6:
                    pool.publish(page, f"{page.group} {page.id} {rng.random()}".encode())
                pool.drop(page, pool.fence.retired + rng.randrange(3))
            if rng.random() < 0.4:
                pool.retire(pool.fence.retired + 1)
            check(pool, held)
    assert cases > 1000
    assert 0.1 < feasible / cases < 0.95


def test_same_calls_give_the_same_pages() -> None:
    def run() -> list[int]:
        rng = random.Random(7)
        pool = pool_of((4, 2), 6)
        held: list[Page] = []
        ids: list[int] = []
        for _ in range(400):
            need = [rng.randrange(3), rng.randrange(2)]
            if pool.shortage(need) is None:
                new = [page for pages in pool.take(need) for page in pages]
                ids += [page.id for page in new]
                held += new
            while held and rng.random() < 0.6:
                page = held.pop(rng.randrange(len(held)))
                pool.publish(page, f"{page.group} {page.id} {len(ids)}".encode())
                pool.drop(page, 0)
        return ids

    assert run() == run()


def test_state_pages_and_attention_pages_share_the_arena() -> None:
    pool = Pool(small_plan([attention("full", Full()), state(size=512)], 4))
    assert [group.slots for group in pool.plan.groups] == [4, 1]
    assert isinstance(pool.plan.groups[1].spec.lifetime, State)
    assert pool.shortage([4, 3]) is None
    assert pool.shortage([5, 3]) == (0, 1)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 6), st.booleans()), max_size=30))
def test_pages_of_one_group_are_those_that_a_call_for_all_groups_gives(calls: list[tuple[int, int, bool]]) -> None:
    """Over taking, letting go and eviction, until nothing is left; names of many pages at once are those of each."""
    pools = [pool_of((4, 1), 5) for _ in range(2)]
    held: list[list[Page]] = [[], []]
    for number, (group, count, back) in enumerate(calls):
        whole = pools[1].try_take([count, 0] if group == 0 else [0, count])
        taken = [pools[0].try_take_of(group, count), None if whole is None else whole[group]]
        if taken[0] is None or taken[1] is None:
            assert taken == [None, None]
            back = True
        else:
            assert [page.id for page in taken[0]] == [page.id for page in taken[1]]
            keys = [bytes([number % 7, i % 4, group]) for i in range(count)]
            fresh = publish_fresh(pools[0], group, taken[0], keys)
            assert fresh == len(publish_all(pools[1], group, taken[1], keys))
            assert [page.key for page in taken[0]] == [page.key for page in taken[1]]
            for mine, pages in zip(held, taken, strict=True):
                mine += pages or []
        for pool, mine in zip(pools, held, strict=True):
            while back and mine:
                pool.drop(mine.pop(0), 0)
            check(pool, mine)
