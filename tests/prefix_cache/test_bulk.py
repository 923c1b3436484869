"""Many leases in one call, against the same one by one."""

from __future__ import annotations

import numpy as np
import pytest

from aengine.memory import Full, Pool, Window, attention_group, plan, uniform_plan
from aengine.prefix_cache import Lease, PrefixCache
from aengine.prefix_cache.audit import audit

PAGE = 4


def windowed(pages: int) -> Pool:
    sizes = {"kv_heads": 1, "head_dim": 16, "dtype": "float32"}
    groups = [
        attention_group("full", Full(), 1, tokens_per_page=PAGE, **sizes),  # type: ignore[arg-type]
        attention_group("window", Window(6), 1, tokens_per_page=2 * PAGE, **sizes),  # type: ignore[arg-type]
    ]
    return Pool(plan(groups, pages * groups[1].payload_bytes))


def pools(kind: str, pages: int = 60) -> Pool:
    return Pool(uniform_plan(pages, PAGE)) if kind == "one group" else windowed(pages)


def opened(cache: PrefixCache, lengths: list[int]) -> list[Lease]:
    leases = []
    for handle, length in enumerate(lengths):
        tokens = np.arange(handle * 100, handle * 100 + 64, dtype=np.int32)
        lease = cache.acquire(handle, tokens, length)
        assert not cache.grow(lease, length, 1, length).short
        leases.append(lease)
    return leases


@pytest.mark.parametrize("kind", ["one group", "two groups"])
def test_rows_grow_as_they_would_one_by_one(kind: str) -> None:
    lengths = [4, 8, 12, 8, 4, 16]
    many, single = (PrefixCache(pools(kind)) for _ in range(2))
    together, apart = opened(many, lengths), opened(single, lengths)
    for step in range(2, 20):
        due = [i for i, lease in enumerate(together) if lease.capacity_tokens <= lengths[i]]
        if due:
            parts = many.grow_rows([together[i] for i in due], [lengths[i] for i in due])
            assert parts is not None
            assert all(part.rows for part in parts)
            told = sorted((part.group, due[row]) for part in parts for row in part.rows)
            grown = [(i, single.grow(apart[i], lengths[i] + 1, step, lengths[i] + 1, start=lengths[i])) for i in due]
            assert told == sorted((delta.group, i) for i, each in grown for delta in each.deltas)
            for group, rows, columns, pages in parts:
                for row, column, page in zip(rows, columns, pages, strict=True):
                    assert together[due[row]].tables[group][column] == page
        for one, other in zip(together, apart, strict=True):
            assert [len(table) for table in one.tables] == [len(table) for table in other.tables]
            assert one.capacity_tokens == other.capacity_tokens
        lengths = [length + 1 for length in lengths]
        many.check()
    held = [page for lease in together for page in lease.tables[0] if page]
    assert len(held) == len(set(held))


def test_rows_grow_all_or_none() -> None:
    cache = PrefixCache(pools("one group", 5))
    leases = opened(cache, [4, 4, 4])
    before = [lease.tables for lease in leases]
    assert cache.grow_rows(leases, [4, 4, 4]) is None
    assert [lease.tables for lease in leases] == before
    assert cache.grow_rows(leases[:2], [4, 4]) is not None
    cache.check()


def test_what_was_not_published_while_it_ran_is_at_release() -> None:
    cache = PrefixCache(pools("one group"))
    lease = opened(cache, [4])[0]
    for start in range(4, 24, PAGE):
        assert cache.grow_rows([lease], [start]) is not None
    assert len(cache.pool.names[0]) == 1
    cache.release(lease, last_step=5, known=23, computed=22)
    cache.retire(5)
    cache.check()
    again = cache.acquire(9, np.arange(64, dtype=np.int32), 60)
    assert again.cached_tokens == 20


def follow(caches: list[PrefixCache], leases: list[list[Lease]], *, depth: int, rounds: int) -> None:
    """Rows that all fill a page at once, by cohort in one cache and one by one in the other; `depth`: pages that they
    have and that nothing was computed of."""
    together, apart = caches
    cohort = together.cohort(leases[0])
    assert cohort.commits
    assert cohort.lag == depth
    at = [lease.known for lease in leases[0]]
    for turn in range(rounds):
        assert cohort.grow() is not None
        starts = [known + (depth + turn) * PAGE for known in at]
        assert apart.grow_rows(leases[1], starts) is not None
        filled = [known + (turn + 1) * PAGE for known in at]
        pairs = zip(leases[0], filled, strict=True)
        cohort.commit(np.stack([lease.tokens[done - PAGE : done] for lease, done in pairs]))
        for lease, done in zip(leases[1], filled, strict=True):
            apart.commit(lease, done, done + 1, 2)
        assert published(together) == published(apart)
        together.check()


def published(cache: PrefixCache) -> list[tuple[bytes, int]]:
    return [(name, page.id) for name, page in cache.pool.names[0].items()]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_cohort_names_what_its_leases_would(depth: int) -> None:
    caches = [PrefixCache(Pool(uniform_plan(120, PAGE))) for _ in range(2)]
    leases = [opened(cache, [4, 8, 12, 8]) for cache in caches]
    for cache, mine in zip(caches, leases, strict=True):
        for ahead in range(depth):
            assert cache.grow_rows(mine, [lease.known + ahead * PAGE for lease in mine]) is not None
    follow(caches, leases, depth=depth, rounds=8)
    ends = [lease.known + 8 * PAGE for lease in leases[0]]
    for one, other in zip(*leases, strict=True):
        assert one.chain.digests == other.chain.digests
        assert one.tables == other.tables
    for cache, mine in zip(caches, leases, strict=True):
        for lease, end in zip(mine, ends, strict=True):
            cache.release(lease, last_step=2, known=end, computed=end)
        cache.retire(2)
        cache.check()
    assert published(caches[0]) == published(caches[1])


def test_a_cohort_of_rows_in_different_states_leaves_publishing_to_others() -> None:
    cache = PrefixCache(Pool(uniform_plan(60, PAGE)))
    leases = opened(cache, [4, 8])
    assert cache.cohort(leases).commits
    for start in (8, 12, 16):
        assert cache.grow_rows(leases[1:], [start]) is not None
    for order in (leases, leases[::-1]):
        cohort = cache.cohort(order)
        assert not cohort.commits
        assert cohort.grow() is not None
    cache.check()


def test_a_cohort_with_a_lease_that_publishes_nothing_leaves_publishing_to_others() -> None:
    cache = PrefixCache(Pool(uniform_plan(60, PAGE)))
    leases = opened(cache, [4, 8])
    assert cache.grow_rows(leases, [4, 8]) is not None
    leases[1].publishes = False
    cohort = cache.cohort(leases)
    assert not cohort.commits
    assert not cohort.idle
    off = PrefixCache(Pool(uniform_plan(60, PAGE)), enabled=False)
    assert off.cohort(opened(off, [4])).idle
    assert (off.commit_tokens, cache.commit_tokens) == (0, PAGE)


def test_pages_of_one_group_come_in_the_same_order_one_by_one_and_at_once() -> None:
    one, many = pools("one group", 9), pools("one group", 9)
    singles = []
    for _ in range(7):
        page = one.take_one(0)
        assert page is not None
        singles.append(page.id)
    assert [page.id for page in many.take([7])[0]] == singles
    assert many.shortage([3]) == one.shortage([3]) == (1,)


def test_pages_of_a_full_pool_come_in_the_same_order_one_by_one_and_at_once() -> None:
    order = [3, 7, 1, 8, 2, 6, 5, 4]
    one, many = pools("one group", 8), pools("one group", 8)
    for pool in (one, many):
        pages = {page.id: page for page in pool.take([8])[0]}
        for number in order:
            pool.publish(pages[number], bytes([number]))
            pool.drop(pages[number], 0)
        pool.pin(pages[7])
        pool.drop(pages[7], 0)  # used again: the youngest
    taken = [many.take([3])[0], many.take([2])[0], many.take([3])[0]]
    singles = [one.take_one(0) for _ in range(8)]
    assert (
        [page.id for pages in taken for page in pages]
        == [page.id for page in singles if page]
        == [*order[:1], *order[2:], 7]
    )
    for pool, held in ((many, [page for pages in taken for page in pages]), (one, [page for page in singles if page])):
        assert not pool.names[0]
        assert pool.groups[0].evicted == 8
        audit(pool, [held])
        for page in held:
            pool.drop(page, 0)
        audit(pool, [])
    assert many.try_take([9]) is None
