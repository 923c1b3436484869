"""Moving live pages together: whole slabs, the cheapest first, behind the fence, without losing a byte."""

from __future__ import annotations

import random

import pytest

from aengine.memory import Moved, Page, Pool, compact
from tests.memory.test_pool import cache, check, give, pool_of

PLENTY = 2**40


def scattered(pool: Pool, keep: tuple[int, ...]) -> list[Page]:
    """Group 0 has one slab for each entry of `keep`, with so many live pages."""
    slots = pool.groups[0].slots
    pages = give(pool, 0, slots * len(keep))
    held = []
    for i, count in enumerate(keep):
        mine = pages[i * slots : (i + 1) * slots]
        held += mine[:count]
        for page in mine[count:]:
            pool.drop(page, 0)
    return held


def test_the_sparsest_slab_goes_into_the_fullest() -> None:
    pool = pool_of((4, 1), 4)
    held = scattered(pool, (3, 1, 2))
    before = {page: page.id for page in held}
    (lone,) = [page for page in held if page.slab is held[3].slab]
    moves = compact(pool, 1, 5, PLENTY)
    assert moves == [Moved(lone, before[lone], held[0].slab.index * 4 + 3)]
    assert lone.id == moves[0].target
    assert [page.id for page in held if page is not lone] == [before[page] for page in held if page is not lone]
    assert pool.unowned_slabs == 1
    check(pool, held)
    pool.retire(4)
    assert pool.unowned_slabs == 1
    pool.retire(5)
    assert pool.unowned_slabs == 2
    check(pool, held)
    assert pool.stats().moved_bytes == pool.plan.groups[0].payload


def test_nothing_moves_that_would_not_free_a_slab() -> None:
    pool = pool_of((4, 1), 3)
    held = scattered(pool, (3, 2, 4))  # two pages, one free slot
    assert compact(pool, 3, 1, PLENTY) == []
    check(pool, held)


def test_groups_of_whole_large_pages_never_move() -> None:
    pool = pool_of((1,), 4)
    held = give(pool, 0, 3)
    assert compact(pool, 3, 1, PLENTY) == []
    check(pool, held)


def test_bytes_are_bounded_but_for_the_first_slab() -> None:
    pool = pool_of((4, 1), 8)
    held = scattered(pool, (2, 2, 2, 2, 2, 2))
    page = pool.plan.groups[0].payload
    assert len(compact(pool, 9, 1, 1)) == 2
    assert len(compact(pool, 9, 2, 4 * page)) == 4
    check(pool, held)
    assert pool.spare.closed == 3


def test_a_closed_slab_is_not_filled_again() -> None:
    """The slots of the slab that is being emptied are the only free ones; taking them would undo the moves."""
    pool = pool_of((4, 1), 3)
    held = scattered(pool, (3, 1))
    compact(pool, 1, 7, PLENTY)
    held += give(pool, 0, 1)
    check(pool, held)
    assert {page.slab.index for page in held} == {held[0].slab.index, held[-1].slab.index}
    pool.retire(7)
    assert pool.unowned_slabs == 1
    check(pool, held)


def test_old_cached_pages_make_room_and_go_with_their_slab() -> None:
    pool = pool_of((4, 1), 2)
    pages = give(pool, 0, 8)
    first, second = pages[:4], pages[4:]
    held = [*first[:2], second[0]]
    for page in (first[3], first[2], second[1]):  # first[3] has been unused longest
        cache(pool, [page], "c")
    for page in second[2:]:
        pool.drop(page, 0)
    moves = compact(pool, 1, 3, PLENTY)
    assert [(moved.page, moved.target) for moved in moves] == [(second[0], first[0].slab.index * 4 + 3)]
    assert set(pool.names[0].values()) == {first[2]}
    check(pool, held)
    pool.retire(3)
    assert pool.unowned_slabs == 1


def test_a_hit_on_a_fenced_page_keeps_its_slab_in_use() -> None:
    pool = pool_of((4, 1), 3)
    held = scattered(pool, (3, 2))
    kept = held.pop()
    pool.publish(kept, b"k")
    pool.drop(kept, 4)
    assert len(compact(pool, 1, 5, PLENTY)) == 1
    assert pool.spare.closed == 1
    pool.pin(kept)
    held.append(kept)
    assert pool.spare.closed == 0
    check(pool, held)
    pool.retire(5)
    check(pool, held)
    assert pool.unowned_slabs == 1


@pytest.mark.parametrize("slots", [(3, 1), (4, 2), (6, 3, 2), (12, 1)])
def test_what_packs_can_be_had(slots: tuple[int, ...]) -> None:
    """Random states: identity, names and holders stay; vacated addresses are fenced; and whatever `packs` allows can
    be taken once compaction has done its work, which never needs more steps than there are slabs."""
    rng = random.Random(str(slots))
    moved = packed = 0
    for _ in range(40):
        pool = pool_of(slots, rng.randint(2, 8))
        held: list[Page] = []
        step = 0
        for _ in range(25):
            step += 1
            need = [rng.randrange(2 * n + 2) for n in slots]
            if pool.shortage(need) is None:
                held += [page for pages in pool.take(need) for page in pages]
            rng.shuffle(held)
            for _ in range(min(len(held), rng.randrange(10))):
                page = held.pop()
                if rng.random() < 0.6:
                    pool.publish(page, f"{page.group} {page.id} {rng.random()}".encode())
                pool.drop(page, step - rng.randrange(2))
            before = {page: (page.id, page.key, page.ref) for page in held}
            fenced = {(p.group, p.id) for g in pool.groups for p in g.pages if p is not None and p.where == 2}
            moves = compact(pool, rng.randrange(3), step, PLENTY)
            moved += len(moves)
            for move in moves:
                assert (move.page.group, move.target) not in fenced
                fenced.add((move.page.group, move.source))
            gone = {move.page for move in moves}
            assert all(before[page] == (page.id, page.key, page.ref) for page in held if page not in gone)
            assert all(before[page][1:] == (page.key, page.ref) for page in gone)
            check(pool, held)
            if rng.random() < 0.6:
                pool.retire(step)
                check(pool, held)
        need = [rng.randrange(3 * n + 2) for n in slots]
        if pool.packs(need):
            packed += 1
            pool.retire(step)
            for _ in range(pool.plan.usable):
                if pool.shortage(need) is None:
                    break
                step += 1
                assert compact(pool, 1, step, 0)
                pool.retire(step)
            held += [page for pages in pool.take(need) for page in pages]
            check(pool, held)
        else:
            assert pool.shortage(need) is not None
    assert moved > 100
    assert packed > 10


def test_same_calls_give_the_same_moves() -> None:
    def run() -> list[tuple[int, int, int]]:
        rng = random.Random(7)
        pool = pool_of((6, 2), 8)
        held: list[Page] = []
        log = []
        for step in range(1, 200):
            need = [rng.randrange(5), rng.randrange(2)]
            if pool.shortage(need) is None:
                held += [page for pages in pool.take(need) for page in pages]
            while held and rng.random() < 0.7:
                pool.drop(held.pop(rng.randrange(len(held))), step)
            log += [(m.page.group, m.source, m.target) for m in compact(pool, 2, step, PLENTY)]
            pool.retire(step - 1)
        return log

    assert run() == run() != []
