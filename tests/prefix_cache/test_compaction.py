"""Moved pages as leases see them: tables follow, hits stay hits, and a failed step's moves are lost."""

from __future__ import annotations

import numpy as np

from aengine.memory import Cross, Full, Pool
from aengine.prefix_cache import MediaItem, PrefixCache, TablePart
from tests.prefix_cache.layouts import attention, items, small_plan

TOKENS = np.arange(64, dtype=np.int32)


def make(*specs, large_pages: int = 6, multiple: int = 1) -> PrefixCache:
    return PrefixCache(Pool(small_plan(list(specs), large_pages, multiple)))


def scattered() -> tuple[PrefixCache, list]:
    """Six leases of two pages in each group; a large page holds four of group 0, so those of two leases."""
    cache = make(attention("full", Full()), attention("whole", Full(), layers=4), large_pages=16)
    assert [group.slots for group in cache.pool.groups] == [4, 1]
    leases = []
    for number in range(6):
        tokens = TOKENS + 100 * number
        lease = cache.acquire(number, tokens, 5)
        grown = cache.grow(lease, 5, 1, 5)
        assert not grown.short
        leases.append(lease)
    cache.retire(1)
    return cache, leases


def test_tables_follow_their_pages_and_sharers_are_all_told() -> None:
    cache, leases = scattered()
    kept = [leases[0], leases[3], leases[5]]  # one in each large page
    twins = [cache.acquire(10 + lease.handle, lease.tokens, 6) for lease in kept for _ in range(3)]
    assert all(twin.cached_tokens == 4 and twin.deltas() for twin in twins)
    for lease in (*[lease for lease in leases if lease not in kept], *twins[2::3]):
        cache.release(lease, last_step=1)  # also the last that took a page, which is not the last that holds it
    cache.reset()
    holders = [*kept, *twins[0::3], *twins[1::3]]
    told = {lease.serial: [list(table) for table in lease.tables] for lease in holders}
    compaction = cache.compact(2, 3)
    assert [moved.page.ref for moved in compaction.moves] == [3, 1]
    assert len(compaction.tables) == 3
    for lease, (group, start, pages) in compaction.tables:
        told[lease.serial][group][start : start + len(pages)] = pages
    for lease in holders:
        assert [list(table) for table in lease.tables] == told[lease.serial]
        assert [page.id for page in lease.held()] == [page for table in lease.tables for page in table]
    cache.check()
    assert all(cache.acquire(9, lease.tokens, 6).tables[0] == lease.tables[0][:1] for lease in kept)


def test_untold_entries_are_told_once_and_by_their_new_address() -> None:
    cache, leases = scattered()
    hit = cache.acquire(9, TOKENS, 6)
    assert hit.cached_tokens == 4
    for lease in leases[1:3]:
        cache.release(lease, last_step=1, keep=False)
    cache.reset()
    compaction = cache.compact(2, 2)
    assert compaction.moves
    assert all(lease is not hit for lease, _ in compaction.tables)
    assert hit.deltas() == tuple(TablePart(g, 0, tuple(table)) for g, table in enumerate(hit.tables))
    cache.check()


def test_a_failed_step_loses_what_it_was_to_move() -> None:
    cache, leases = scattered()
    for lease in leases[1:3]:
        cache.release(lease, last_step=1, keep=False)
    cache.reset()
    compaction = cache.compact(2, 2)
    holders = {lease.handle for lease, _ in compaction.tables}
    keys = {moved.page.key for moved in compaction.moves} - {None}
    assert {moved.page.group for moved in compaction.moves} == {0}
    assert holders
    assert keys
    assert set(cache.retract(2)) == holders
    assert not keys & set(cache.pool.names[0])
    for lease in (leases[0], leases[3]):
        assert lease.publishes == (lease.handle not in holders)
    cache.retire(2)
    cache.check()


def test_moves_of_a_retired_step_are_safe() -> None:
    cache, leases = scattered()
    for lease in leases[1:3]:
        cache.release(lease, last_step=1, keep=False)
    cache.reset()
    assert cache.compact(2, 2).moves
    cache.retire(2)
    assert cache.retract(3) == ()
    assert leases[0].publishes


def test_images_are_placed_again_also_where_one_stands_twice() -> None:
    cache = make(attention("full", Full(), layers=4), items("cross", Cross()), large_pages=6)
    assert cache.pool.groups[1].slots > 4
    image = b"i" * 32
    twice = (MediaItem(image, 0, 1, 6), MediaItem(image, 3, 1, 6))
    other = cache.acquire(1, TOKENS + 500, 8, media=(MediaItem(b"o" * 32, 0, 1, 4 * (cache.pool.groups[1].slots - 1)),))
    cache.grow(other, 8, 1, 8)
    maker = cache.acquire(2, TOKENS, 8, media=twice[:1])
    cache.grow(maker, 8, 1, 8)
    lease = cache.acquire(3, TOKENS + 900, 8, media=twice)
    cache.grow(lease, 8, 2, 8)
    assert lease.item_pages(1, 0) == lease.item_pages(1, 1)
    cache.retire(2)
    cache.release(maker, last_step=2)
    cache.release(other, last_step=2, keep=False)
    cache.reset()
    filler = cache.acquire(
        4, TOKENS + 700, 8, media=(MediaItem(b"f" * 32, 0, 1, 4 * (cache.pool.groups[1].slots - 3)),)
    )
    cache.grow(filler, 8, 3, 8)
    cache.retire(3)
    for step in range(4, 9):
        compaction = cache.compact(step, 1)
        if any(who is lease for who, _, _ in compaction.items):
            assert {item for who, _, item in compaction.items if who is lease} == {0, 1}
            break
        cache.retire(step)
    assert lease.item_pages(1, 0) == lease.item_pages(1, 1) == tuple(lease.tables[1][:2])
    cache.check()
