"""The verbs, one property at a time, on one full-attention group."""

from __future__ import annotations

import numpy as np
import pytest

from aengine.memory import Pool, uniform_plan
from aengine.prefix_cache import Lease, PrefixCache, TablePart

PAGE = 4


def make(pages: int = 12, **options) -> PrefixCache:
    return PrefixCache(Pool(uniform_plan(pages, PAGE)), **options)


def buffer(*tokens: int) -> np.ndarray:
    out = np.zeros(128, np.int32)
    out[: len(tokens)] = tokens
    return out


TOKENS = buffer(*range(100, 120))


def run(cache: PrefixCache, tokens: np.ndarray, known: int, step: int, **options) -> Lease:
    """Prefill `known` tokens in one step, and release."""
    lease = cache.acquire(1, tokens, known, **options)
    assert not cache.grow(lease, known, step, known).short
    cache.commit(lease, known, known + 1, step)
    cache.release(lease, last_step=step)
    cache.retire(step)
    cache.check()
    return lease


def hit(cache: PrefixCache, tokens: np.ndarray, known: int, **options) -> int:
    lease = cache.acquire(9, tokens, known, **options)
    cache.release(lease, last_step=0)
    cache.check()
    return lease.cached_tokens


def test_a_repeated_prompt_hits_all_but_its_last_token() -> None:
    cache = make()
    run(cache, TOKENS, 12, 1)
    assert [hit(cache, TOKENS, known) for known in (1, 4, 5, 8, 9, 12, 13, 20)] == [0, 0, 4, 4, 8, 8, 12, 12]


def test_a_hit_ends_where_the_tokens_differ() -> None:
    cache = make()
    run(cache, TOKENS, 12, 1)
    other = TOKENS.copy()
    other[5] = 0
    assert hit(cache, other, 12) == 4
    other[0] = 0
    assert hit(cache, other, 12) == 0


def test_prompt_pages_are_visible_while_their_step_runs() -> None:
    cache = make()
    first = cache.acquire(1, TOKENS, 12)
    cache.grow(first, 10, 1, 12)
    second = cache.acquire(2, TOKENS, 12)
    assert second.cached_tokens == 8
    assert second.tables[0] == first.tables[0][:2]


def test_generated_pages_are_published_when_their_ids_are_known() -> None:
    cache = make()
    lease = cache.acquire(1, TOKENS, 6)
    cache.grow(lease, 6, 1, 6)
    cache.grow(lease, 9, 2, 6)  # ids 6 .. 8 are still on the device
    assert len(cache.pool.names[0]) == 1
    cache.commit(lease, 8, 7, 2)  # computed, but one id of the page is unknown
    assert len(cache.pool.names[0]) == 1
    cache.commit(lease, 8, 8, 2)
    assert len(cache.pool.names[0]) == 2


def test_only_computed_pages_are_published_at_commit() -> None:
    cache = make()
    lease = cache.acquire(1, TOKENS, 5)
    cache.grow(lease, 8, 1, 5)
    cache.commit(lease, 7, 20, 1)
    assert len(cache.pool.names[0]) == 1


def test_siblings_leapfrog() -> None:
    """Two forks of one prompt, prefilled side by side, compute each page once but for the last."""
    cache = make()
    leases = [cache.acquire(handle, TOKENS, 16, cause="fork") for handle in (1, 2)]
    computed = 0
    frontier = [0, 0]
    step = 0
    while min(frontier) < 16:
        step += 1
        for index, lease in enumerate(leases):
            if frontier[index] == 16:
                continue
            upto = min(frontier[index] + 4, 16)
            grown = cache.grow(lease, upto, step, 16)
            computed += max(0, upto - grown.start)
            frontier[index] = max(upto, grown.start)
        cache.check()
    assert computed == 16 + 4
    assert leases[0].tables[0][:3] == leases[1].tables[0][:3]
    assert leases[0].tables[0][3] != leases[1].tables[0][3]


def test_a_late_hit_can_swallow_the_whole_chunk() -> None:
    cache = make()
    late = cache.acquire(1, TOKENS, 20)
    run(cache, TOKENS, 20, 1)
    grown = cache.grow(late, 4, 2, 20)
    assert grown.start == 16
    assert grown.deltas == (TablePart(0, 0, tuple(late.tables[0])),)
    assert late.capacity_tokens == late.tokens_ready == 16
    assert cache.stats().late_hit_tokens == 16


def test_no_late_hit_off_a_page_border() -> None:
    cache = make()
    late = cache.acquire(1, TOKENS, 20)
    cache.grow(late, 3, 1, 20)
    run(cache, TOKENS, 20, 2)
    assert cache.grow(late, 8, 3, 20).start == 3


def test_max_hit_bounds_early_and_late_hits() -> None:
    cache = make()
    run(cache, TOKENS, 20, 1)
    lease = cache.acquire(2, TOKENS, 20, max_hit=9)
    assert lease.cached_tokens == 8
    assert cache.grow(lease, 16, 2, 20).start == 8
    assert cache.acquire(3, TOKENS, 20, max_hit=0).cached_tokens == 0


def test_growth_is_all_or_nothing_and_says_what_is_missing() -> None:
    cache = make(pages=4)
    lease = cache.acquire(1, TOKENS, 20)
    grown = cache.grow(lease, 20, 1, 20)
    assert grown.short == (1,)
    assert grown.deltas == ()
    assert lease.tables[0] == []
    assert lease.capacity_tokens == lease.tokens_ready == 0
    assert not cache.grow(lease, 16, 1, 20).short
    assert lease.capacity_tokens == 16


def test_growth_within_the_last_page_takes_nothing() -> None:
    cache = make()
    lease = cache.acquire(1, TOKENS, 5)
    cache.grow(lease, 5, 1, 5)
    assert lease.capacity_tokens == 8
    grown = cache.grow(lease, 7, 2, 6)  # position 6 comes from the device: the launch before needed no growth
    assert (grown.start, grown.deltas, grown.short) == (6, (), ())


def test_deltas_are_told_once() -> None:
    cache = make()
    run(cache, TOKENS, 12, 1)
    lease = cache.acquire(2, TOKENS, 13)
    assert lease.deltas() == (TablePart(0, 0, tuple(lease.tables[0])),)
    assert lease.deltas() == ()
    assert cache.grow(lease, 13, 2, 13).deltas == (TablePart(0, 3, (lease.tables[0][3],)),)


def test_pages_are_fenced_until_the_last_step_that_names_them() -> None:
    cache = make(pages=3)
    lease = cache.acquire(1, TOKENS, 9)
    cache.grow(lease, 9, 4, 9)
    cache.release(lease, last_step=4)
    assert cache.pool.groups[0].fenced == 3
    assert cache.pool.shortage([1]) == (1,)
    cache.retire(3)
    assert cache.pool.shortage([1]) == (1,)
    cache.retire(4)
    assert cache.pool.shortage([3]) is None
    assert cache.pool.shortage([4]) == (1,)


def test_rollback_drops_the_tail_only() -> None:
    cache = make()
    lease = cache.acquire(1, TOKENS, 6)
    cache.grow(lease, 6, 1, 6)
    cache.commit(lease, 6, 7, 1)
    cache.grow(lease, 14, 2, 7, drafts=7)
    assert len(lease.tables[0]) == 4
    assert cache.rollback(lease, 8, last_step=2) == 8
    assert (len(lease.tables[0]), lease.capacity_tokens, lease.tokens_ready) == (2, 8, 8)
    assert cache.pool.groups[0].fenced == 2
    cache.check()
    grown = cache.grow(lease, 9, 3, 9)
    assert grown.deltas == (TablePart(0, 2, (lease.tables[0][2],)),)


def test_rejected_drafts_are_never_published() -> None:
    cache = make()
    tokens = TOKENS.copy()
    lease = cache.acquire(1, tokens, 6)
    cache.grow(lease, 6, 1, 6)
    cache.grow(lease, 13, 2, 7, drafts=6)  # the guesses are not in the buffer
    cache.rollback(lease, 7, last_step=2)
    tokens[7] = 55
    cache.commit(lease, 7, 8, 2)
    assert len(cache.pool.names[0]) == 1


def test_release_is_once_only() -> None:
    cache = make()
    lease = cache.acquire(1, TOKENS, 6)
    cache.release(lease, last_step=0)
    with pytest.raises(AssertionError, match="released twice"):
        cache.release(lease, last_step=0)


def test_the_tail_is_evicted_first() -> None:
    cache = make(pages=5)
    run(cache, TOKENS, 16, 1)
    other = cache.acquire(2, buffer(*range(12)), 12)
    cache.grow(other, 8, 2, 12)  # one free page, one evicted
    assert hit(cache, TOKENS, 17) == 12


def test_a_hit_is_pinned_against_eviction() -> None:
    cache = make(pages=5)
    run(cache, TOKENS, 16, 1)
    lease = cache.acquire(2, TOKENS, 17)
    other = cache.acquire(3, buffer(1, 2, 3, 4, 5), 5)
    assert cache.grow(other, 5, 2, 5).short == (1,)
    assert not cache.grow(lease, 17, 2, 17).short


def test_a_failed_step_takes_its_pages_back() -> None:
    cache = make()
    early = run(cache, TOKENS, 8, 1)
    owner = cache.acquire(1, TOKENS, 20)
    cache.grow(owner, 16, 2, 20)
    taker = cache.acquire(2, TOKENS, 20)
    bystander = cache.acquire(3, TOKENS, 8)
    assert taker.cached_tokens == 16
    cache.grow(taker, 20, 3, 20)  # publishes for a step behind the failed one
    assert cache.retract(2) == (2,)
    cache.check()
    assert hit(cache, TOKENS, 20) == 8 == early.tokens_ready
    cache.commit(taker, 20, 20, 3)  # what it holds is void
    assert hit(cache, TOKENS, 20) == 8
    for lease in (owner, taker, bystander):
        cache.release(lease, last_step=3)
    cache.retire(3)
    cache.check()
    assert hit(cache, TOKENS, 20) == 8


def test_one_row_can_fail_alone() -> None:
    cache = make(pages=20)
    leases = [cache.acquire(handle, buffer(*range(handle, handle + 9)), 9) for handle in (1, 50)]
    for lease in leases:
        cache.grow(lease, 9, 1, 9)
    taker = cache.acquire(3, leases[0].tokens.copy(), 9)
    assert cache.retract(1, leases[0]) == (3,)
    assert not taker.publishes
    assert hit(cache, leases[0].tokens, 9) == 0
    assert hit(cache, leases[1].tokens, 9) == 8


def test_a_retired_step_cannot_be_retracted() -> None:
    cache = make()
    run(cache, TOKENS, 12, 1)
    assert cache.retract(1) == ()
    assert hit(cache, TOKENS, 12) == 8


def test_namespaces_do_not_meet() -> None:
    cache = make(pages=20)
    run(cache, TOKENS, 12, 1)
    run(cache, TOKENS, 12, 2, salt="tenant")
    assert hit(cache, TOKENS, 12, salt="tenant") == 8
    assert hit(cache, TOKENS, 12, salt="other") == 0
    assert hit(cache, TOKENS, 12, adapter="tenant") == 0


def test_an_adapter_of_the_same_name_with_other_weights_does_not_hit() -> None:
    cache = make(pages=20)
    cache.register_adapter("lora", b"first weights")
    run(cache, TOKENS, 12, 1, adapter="lora")
    assert hit(cache, TOKENS, 12, adapter="lora") == 8
    cache.register_adapter("lora", b"second weights")
    assert hit(cache, TOKENS, 12, adapter="lora") == 0


def test_switched_off_it_shares_nothing() -> None:
    cache = make(enabled=False)
    run(cache, TOKENS, 12, 1)
    assert hit(cache, TOKENS, 12) == 0
    assert cache.pool.unowned_slabs == 12
    late = cache.acquire(1, TOKENS, 20)
    run(cache, TOKENS, 12, 2)
    assert cache.grow(late, 4, 3, 20).start == 0


def test_reset_forgets_what_nobody_holds() -> None:
    cache = make()
    run(cache, TOKENS, 12, 1)
    held = cache.acquire(1, TOKENS, 9)
    cache.reset()
    cache.check()
    assert hit(cache, TOKENS, 13) == 8
    cache.release(held, last_step=0)
    cache.reset()
    assert hit(cache, TOKENS, 13) == 0


def test_requests_that_can_never_fit() -> None:
    cache = make(pages=5)
    assert cache.capacity == (5,)
    assert cache.needed_pages(20) == (5,)
    assert cache.fits(20)
    assert not cache.fits(21)


def test_reclaimable_pages_are_those_of_one_holder() -> None:
    cache = make()
    run(cache, TOKENS, 12, 1)
    one, two = (cache.acquire(handle, TOKENS, 12) for handle in (1, 2))
    cache.grow(one, 12, 2, 12)
    assert cache.reclaimable_pages(one) == (1,)
    assert cache.reclaimable_pages(two) == (0,)


def test_hits_are_counted_by_cause() -> None:
    cache = make()
    run(cache, TOKENS, 12, 1)
    hit(cache, TOKENS, 12)
    hit(cache, TOKENS, 12, cause="resume")
    stats = cache.stats()
    assert stats.query_tokens_by_cause == {"fresh": 24, "resume": 12}
    assert stats.hit_tokens_by_cause == {"fresh": 8, "resume": 8}
    assert (stats.query_tokens, stats.hit_tokens, stats.queries) == (36, 16, 3)
    assert stats.published_pages == 3
    assert stats.lost_to_sparse_tokens == 0
    assert stats.leases == 0
    assert stats.usage == 0.0


def test_usage_is_the_share_of_held_pages() -> None:
    cache = make(pages=10)
    lease = cache.acquire(1, TOKENS, 20)
    cache.grow(lease, 20, 1, 20)
    assert cache.stats().usage == pytest.approx(0.5)
