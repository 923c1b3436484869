"""Many leases in one call, against the same one by one."""

from __future__ import annotations

import numpy as np
import pytest

from aengine.memory import Full, Pool, Window, attention_group, plan, uniform_plan
from aengine.prefix_cache import Lease, PrefixCache
from aengine.prefix_cache.bulk import NEVER, PUBLISH_PAGES, next_commit

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


def test_rows_publish_in_turn_and_without_a_cache_never() -> None:
    stride = PUBLISH_PAGES * 16
    due = [next_commit(serial, 100, 16) for serial in range(64)]
    assert all(100 < at <= 100 + stride and at % 16 == 0 for at in due)
    assert max(due.count(at) for at in due) <= 16  # of 64 rows in 8 turns
    assert next_commit(3, due[3], 16) == due[3] + stride
    off = PrefixCache(pools("one group"), enabled=False)
    assert off.next_commit(opened(off, [4])[0], 4) == NEVER


def test_pages_of_one_group_come_in_the_same_order_one_by_one_and_at_once() -> None:
    one, many = pools("one group", 9), pools("one group", 9)
    singles = []
    for _ in range(7):
        page = one.take_one(0)
        assert page is not None
        singles.append(page.id)
    assert [page.id for page in many.take([7])[0]] == singles
    assert many.shortage([3]) == one.shortage([3]) == (1,)
