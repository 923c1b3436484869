"""Leases that go on together, against the same one by one: whenever they are asked, and whatever comes between."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.memory import Full, Pool, plan, uniform_plan
from aengine.prefix_cache import Lease, PrefixCache
from tests.prefix_cache.layouts import attention

PAGE = 4
ROWS = 4
ROUNDS = 12

asked = st.sampled_from(["nobody", "one", "all", "audit"])
turns = st.lists(
    st.tuples(st.sampled_from(["together", "alone", "drafts"]), asked, st.integers(0, ROWS - 1)), max_size=ROUNDS
)


class Twins:
    """The same leases in two caches: of the first they go on by cohort where they can, of the second one by one."""

    def __init__(self, lengths: list[int], shared: bool) -> None:
        self.caches = [PrefixCache(Pool(uniform_plan(120, PAGE))) for _ in range(2)]
        self.at = [length * PAGE for length in lengths]
        self.leases: list[list[Lease]] = []
        for cache in self.caches:
            mine = []
            for row, known in enumerate(self.at):
                tokens = np.arange(PAGE * 64, dtype=np.int32) + (0 if shared else 1000 * row)
                lease = cache.acquire(row, tokens, known)
                assert not cache.grow(lease, known, 1, known).short
                mine.append(lease)
            cache.retire(1)
            self.leases.append(mine)
        self.cohort = self.caches[0].cohort(self.leases[0])

    def turn(self, how: str) -> None:
        """Every row fills a page more."""
        self.at = [known + PAGE for known in self.at]
        for which, (cache, mine) in enumerate(zip(self.caches, self.leases, strict=True)):
            pages = np.stack([lease.tokens[at - PAGE : at] for lease, at in zip(mine, self.at, strict=True)])
            if which == 0 and how == "together":
                assert self.cohort.commits
                assert self.cohort.grow() is not None
                self.cohort.commit(pages)
                continue
            assert cache.grow_rows(mine, [at - PAGE for at in self.at]) is not None
            if how == "drafts":
                for lease, at in zip(mine, self.at, strict=True):
                    assert not cache.grow(lease, at + 2, 2, at - 1, start=at - 1, drafts=3).short
                    assert cache.rollback(lease, at) == at
            cache.commit_rows(mine, [at // PAGE for at in self.at], pages)
        if how != "together":
            self.cohort = self.caches[0].cohort(self.leases[0])

    def ask(self, whom: str, row: int) -> None:
        if whom == "audit":
            self.caches[0].check()
        for one, other in (
            list(zip(*self.leases, strict=True)) if whom == "all" else [(self.leases[0][row], self.leases[1][row])]
        ):
            if whom != "nobody":
                assert one.tables == other.tables
                assert one.capacity_tokens == other.capacity_tokens
                assert one.holds[0].keyed == other.holds[0].keyed
                assert one.chain.digests == other.chain.digests

    def names(self, which: int) -> list[tuple[bytes, int]]:
        return [(name, page.id) for name, page in self.caches[which].pool.names[0].items()]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=ROWS, max_size=ROWS), turns, st.booleans())
def test_a_lease_has_what_its_cohort_took_whenever_it_is_asked(
    lengths: list[int], turns: list[tuple[str, str, int]], shared: bool
) -> None:
    """`shared`: all rows have the same text, so that their pages race for one name."""
    twins = Twins(lengths, shared)
    for how, whom, row in turns:
        twins.turn(how)
        twins.ask(whom, row)
        assert twins.names(0) == twins.names(1)
    for cache, mine in zip(twins.caches, twins.leases, strict=True):
        for lease, at in zip(mine, twins.at, strict=True):
            cache.release(lease, last_step=2, known=at, computed=at)
        cache.retire(2)
        cache.check()
    assert twins.names(0) == twins.names(1)
    stats = [cache.pool.stats() for cache in twins.caches]
    assert stats[0] == stats[1]


def test_pages_of_a_cohort_move_and_are_found() -> None:
    spec = attention("kv", Full(), layers=1)
    large = 4 * spec.payload_bytes
    made = plan([spec], large * 12, large_bytes=large)
    assert made.groups[0].slots == 4
    cache = PrefixCache(Pool(made))
    page = cache.cohort_tokens
    leases = []
    for handle in range(3):
        lease = cache.acquire(handle, np.arange(handle * 500, handle * 500 + 400, dtype=np.int32), page)
        assert not cache.grow(lease, page, 1, page).short
        leases.append(lease)
    cache.retire(1)
    cohort = cache.cohort(leases[:2])
    for turn in range(3):
        assert cohort.grow() is not None
        assert cache.grow_rows(leases[2:], [(turn + 1) * page]) is not None
    cache.release(leases[2], last_step=1, keep=False)
    moved = cache.compact(2, 2)
    assert moved.moves
    assert {lease.handle for lease, _ in moved.tables} <= {0, 1}
    for lease in leases[:2]:
        assert lease.tables[0] == [held.id for held in lease.held()]
        assert len(lease.tables[0]) == 4
    cache.retire(2)
    cache.check()


@pytest.mark.parametrize("leases", [1, 3])
def test_nobody_is_asked_and_nothing_is_lost(leases: int) -> None:
    """Turns without a look, then everything at once, at release."""
    cache = PrefixCache(Pool(uniform_plan(80, PAGE)))
    mine = [cache.acquire(row, np.arange(row * 99, row * 99 + 90, dtype=np.int32), PAGE) for row in range(leases)]
    for lease in mine:
        assert not cache.grow(lease, PAGE, 1, PAGE).short
    cohort = cache.cohort(mine)
    for turn in range(1, 11):
        assert cohort.grow() is not None
        cohort.commit(np.stack([lease.tokens[turn * PAGE : (turn + 1) * PAGE] for lease in mine]))
    for lease in mine:
        cache.release(lease, last_step=1, known=11 * PAGE, computed=11 * PAGE)
    cache.retire(1)
    cache.check()
    assert len(cache.pool.names[0]) == 11 * leases
    again = cache.acquire(9, np.arange(90, dtype=np.int32), 60)
    assert again.cached_tokens == 44
