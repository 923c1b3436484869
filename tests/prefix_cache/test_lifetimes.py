"""Window, chunk, state and media groups: what hits, what is kept, what is lost."""

from __future__ import annotations

import numpy as np
import pytest

from aengine.memory import Chunk, Cross, Full, Media, Pool, Window
from aengine.prefix_cache import Lease, MediaItem, PrefixCache
from aengine.prefix_cache.tails import TailIndex
from tests.prefix_cache.layouts import attention, items, small_plan, state

PAGE = 4
TOKENS = np.arange(1000, 1512, dtype=np.int32)


def make(*specs, pages: int = 60, grid: int = 0, **options) -> PrefixCache:
    return PrefixCache(Pool(small_plan(list(specs), pages)), grid_tokens=grid, **options)


def prefill(cache: PrefixCache, tokens: np.ndarray, known: int, step: int, chunk: int = 8, **options) -> Lease:
    """Prefill in chunks that respect the boundaries, one step each; the lease stays open."""
    lease = cache.acquire(1, tokens, known, **options)
    at = lease.cached_tokens
    while at < known:
        upto = min(at + chunk, known, lease.next_boundary(at))
        grown = cache.grow(lease, upto, step, known)
        assert not grown.short
        cache.commit(lease, upto, known, step)
        cache.retire(step)
        cache.check()
        at, step = max(upto, grown.start), step + 1
    return lease


def run(cache: PrefixCache, tokens: np.ndarray, known: int, step: int, **options) -> Lease:
    lease = prefill(cache, tokens, known, step, **options)
    cache.release(lease, last_step=step, scheduled=known)
    cache.retire(step + 1000)
    return lease


def hit(cache: PrefixCache, tokens: np.ndarray, known: int, **options) -> int:
    lease = cache.acquire(9, tokens, known, **options)
    cache.release(lease, last_step=0)
    cache.check()
    return lease.cached_tokens


@pytest.mark.parametrize("window", [7, 8, 9])
@pytest.mark.parametrize("known", [31, 32, 33])
def test_a_window_needs_only_its_last_pages(window: int, known: int) -> None:
    cache = make(attention("full", Full()), attention("window", Window(window)))
    lease = prefill(cache, TOKENS, known, 1)
    live = Window(window).first_live(known) // PAGE
    assert lease.tables[1][:live] == [0] * live
    assert 0 not in lease.tables[1][live:]
    cache.release(lease, last_step=0)
    assert hit(cache, TOKENS, known + 1) == (known) // PAGE * PAGE
    assert hit(cache, TOKENS, known) == (known - 1) // PAGE * PAGE


def test_windows_lose_the_middle_and_the_counter_says_so() -> None:
    cache = make(attention("full", Full()), attention("window", Window(8)))
    run(cache, TOKENS, 64, 1)
    other = TOKENS.copy()
    other[40:] = 0
    assert hit(cache, other, 64) == 0
    assert cache.stats().lost_to_sparse_tokens == 40


def test_the_junction_is_kept_when_it_is_computed_again() -> None:
    cache = make(attention("full", Full()), attention("window", Window(8)))
    run(cache, TOKENS, 64, 1)
    branch, third = TOKENS.copy(), TOKENS.copy()
    branch[40:], third[40:] = 0, 7
    run(cache, branch, 64, 2000)
    assert hit(cache, third, 64) == 40


def test_the_grid_is_kept() -> None:
    cache = make(attention("full", Full()), attention("window", Window(8)), grid=32)
    run(cache, TOKENS, 100, 1)
    for cut in (100, 99, 97, 96, 80, 64, 40, 33):
        other = TOKENS.copy()
        other[cut:] = 0
        want = cut // PAGE * PAGE if cut >= 96 else cut // 32 * 32
        assert hit(cache, other, 120) == want, cut
    # what is not read by any retention point has gone: three windows of at most three pages
    assert cache.pool.groups[1].cached <= 9
    assert cache.pool.groups[0].cached == 25


def test_a_dense_grid_keeps_every_page() -> None:
    cache = make(attention("full", Full()), attention("window", Window(8)), grid=1)
    run(cache, TOKENS, 64, 1)
    assert cache.pool.groups[1].cached == 16
    other = TOKENS.copy()
    other[41:] = 0
    assert hit(cache, other, 64) == 40


def test_window_pages_leave_by_computed_not_by_scheduled() -> None:
    cache = make(attention("full", Full()), attention("window", Window(4)))
    lease = cache.acquire(1, TOKENS, 40)
    cache.grow(lease, 20, 1, 40)
    cache.grow(lease, 40, 2, 40)
    cache.commit(lease, 20, 40, 2)  # step 2 still reads from position 17 on
    assert [bool(page) for page in lease.tables[1]] == [False] * 4 + [True] * 6
    assert cache.pool.groups[1].fenced == 4
    cache.retire(1)
    assert cache.pool.groups[1].fenced == 4
    cache.retire(2)
    assert cache.pool.groups[1].fenced == 0


@pytest.mark.parametrize(("known", "live"), [(15, 0), (16, 4), (17, 4), (23, 4), (24, 4), (33, 8)])
def test_chunk_pages_leave_at_the_chunk_edge(known: int, live: int) -> None:
    cache = make(attention("full", Full()), attention("chunk", Chunk(16)))
    lease = prefill(cache, TOKENS, known, 1)
    assert lease.tables[1][:live] == [0] * live
    assert 0 not in lease.tables[1][live:]


def test_a_hit_at_a_chunk_edge_needs_no_chunk_page() -> None:
    cache = make(attention("full", Full()), attention("chunk", Chunk(16)))
    run(cache, TOKENS, 40, 1)
    other = TOKENS.copy()
    other[33:] = 0
    assert hit(cache, other, 60) == 32
    other[32:] = 0
    assert hit(cache, other, 60) == 32
    other[31:] = 0
    assert hit(cache, other, 60) == 16


def test_groups_reconcile_to_a_fixed_point() -> None:
    """A cut by one group uncovers a hole of another: full 48, window only at 40, chunk only at 32."""
    cache = make(attention("full", Full()), attention("window", Window(8)), attention("chunk", Chunk(16)), grid=1)
    lease = run(cache, TOKENS, 48, 1)
    digests = lease.chain.digests
    pool = cache.pool
    for group, page in ((1, 11), (2, 9), (1, 8)):
        pool.unpublish(pool.names[group][digests[page]])
    assert hit(cache, TOKENS, 60) == 32
    for page in (7, 6):
        pool.unpublish(pool.names[1][digests[page]])
    assert hit(cache, TOKENS, 60) == 16 + 8
    pool.unpublish(pool.names[2][digests[4]])
    assert hit(cache, TOKENS, 60) == 16
    cache.check()


def test_pages_of_different_token_counts() -> None:
    cache = make(attention("full", Full(), page=8), attention("window", Window(6), page=4, layers=2), grid=1)
    run(cache, TOKENS, 40, 1)
    assert hit(cache, TOKENS, 40) == 32
    other = TOKENS.copy()
    other[29:] = 0
    assert hit(cache, other, 40) == 24


# -- state


def test_state_hits_at_checkpoints_only() -> None:
    cache = make(attention("full", Full()), state(), grid=32)
    run(cache, TOKENS, 75, 1)
    for cut, want in ((75, 75), (74, 72), (73, 72), (72, 72), (71, 64), (64, 64), (63, 32), (31, 0)):
        other = TOKENS.copy()
        other[cut:] = 0
        assert hit(cache, other, 100) == want, cut
    assert cache.pool.groups[1].cached == 4  # 32, 64, the prompt end and the release point


def test_boundaries_are_where_chunks_should_end() -> None:
    cache = make(attention("full", Full()), state(), grid=32)
    lease = cache.acquire(1, TOKENS, 75)
    assert [lease.next_boundary(at) for at in (0, 31, 32, 63, 64, 71, 72)] == [32, 32, 64, 64, 72, 72, 96]
    no_state = make(attention("full", Full()), grid=32)
    assert no_state.acquire(1, TOKENS, 75).next_boundary(0) > 10**9


def test_a_checkpoint_is_never_written_again() -> None:
    cache = make(attention("full", Full()), state())
    lease = cache.acquire(1, TOKENS, 18)
    cache.grow(lease, 16, 1, 18)
    read, write = lease.tables[1]
    assert (read, write != 0) == (0, True)
    assert len(cache.pool.names[1]) == 0  # the step that writes it has not even begun
    cache.grow(lease, 18, 2, 18)
    assert lease.tables[1][0] == write != lease.tables[1][1]
    assert len(cache.pool.names[1]) == 1
    cache.commit(lease, 18, 19, 2)
    grown = cache.grow(lease, 19, 3, 19)
    assert lease.tables[1][0] == lease.tables[1][1]
    assert [part.group for part in grown.deltas] == [1]


def test_state_is_not_shared_within_the_step_that_writes_it() -> None:
    cache = make(attention("full", Full()), state())
    first, second = (cache.acquire(handle, TOKENS, 18) for handle in (1, 2))
    cache.grow(first, 16, 1, 18)
    assert cache.grow(second, 16, 1, 18).start == 0
    cache.grow(first, 18, 2, 18)
    third = cache.acquire(3, TOKENS, 18)
    assert third.cached_tokens == 16


def test_decoding_leaves_checkpoints_on_the_grid() -> None:
    cache = make(attention("full", Full()), state(), grid=8)
    tokens = TOKENS.copy()
    lease = prefill(cache, tokens, 3, 1)
    for known in range(4, 30):
        if known > lease.capacity_tokens:
            assert not cache.grow(lease, known, known, known).short
        cache.commit(lease, known, known + 1, known)
        cache.retire(known)
        cache.check()
    cache.release(lease, last_step=0)
    assert [hit(cache, tokens, cut) for cut in (8, 9, 16, 17, 25, 29)] == [0, 8, 8, 16, 24, 24]


def test_rejected_drafts_go_back_to_the_state_before_them() -> None:
    cache = make(attention("full", Full()), state())
    lease = prefill(cache, TOKENS, 6, 1)
    before = lease.tables[1][1]
    grown = cache.grow(lease, 10, 11, 7, drafts=3)
    assert grown.start == 6
    assert lease.tables[1][0] == before != lease.tables[1][1]
    assert cache.rollback(lease, 8, last_step=11) == 6
    cache.check()
    assert cache.grow(lease, 8, 12, 9).start == 6
    assert lease.tables[1][0] == before


def test_accepted_drafts_cost_nothing() -> None:
    cache = make(attention("full", Full()), state())
    lease = prefill(cache, TOKENS, 6, 1)
    cache.grow(lease, 10, 11, 7, drafts=3)
    written = lease.tables[1][1]
    assert cache.rollback(lease, 10, last_step=11) == 10
    cache.commit(lease, 10, 11, 11)
    cache.grow(lease, 11, 12, 11)
    assert lease.tables[1] == [written, written]


def test_the_release_point_is_kept_where_it_ends_a_page() -> None:
    cache = make(attention("full", Full()), state())
    lease = prefill(cache, TOKENS, 6, 1)
    cache.grow(lease, 8, 11, 8)
    cache.commit(lease, 8, 9, 11)
    cache.release(lease, last_step=11, scheduled=8)
    cache.retire(11)
    assert hit(cache, TOKENS, 20) == 8


def ended(cache: PrefixCache, length: int, step: int = 11, *, keep: bool = True) -> None:
    """A sequence that decoded from 6 to `length` tokens and was released there."""
    lease = prefill(cache, TOKENS, 6, 1)
    cache.grow(lease, length, step, length)
    cache.commit(lease, length, length, step)
    cache.release(lease, last_step=step, scheduled=length, keep=keep)
    cache.retire(step)


@pytest.mark.parametrize("length", [7, 9, 10, 11])
def test_a_sequence_resumes_exactly_where_it_was_released(length: int) -> None:
    cache = make(attention("full", Full()), state(), attention("window", Window(6)))
    ended(cache, length)
    lease = cache.acquire(2, TOKENS, 20, cause="resume")
    assert lease.cached_tokens == length
    cache.check()
    grown = cache.grow(lease, length + 1, 12, 20)
    assert grown.start == length
    assert lease.tables[1][0] != lease.tables[1][1]  # the state it read stays
    assert hit(cache, TOKENS, 20) == 4  # the unfinished page has an owner now
    cache.grow(lease, 20, 13, 20)
    cache.commit(lease, 20, 20, 13)
    cache.check()
    assert len(lease.chain.digests) == 5
    assert lease.holds[0].pages[length // PAGE].key == lease.chain.digests[length // PAGE]


def test_an_unused_tail_is_not_lost() -> None:
    cache = make(attention("full", Full()), state())
    ended(cache, 9)
    for _ in range(3):
        assert hit(cache, TOKENS, 20) == 9
    assert hit(cache, TOKENS, 9) == 4
    other = TOKENS.copy()
    other[8] = 0
    assert hit(cache, other, 20) == 4


def test_a_tail_has_one_owner() -> None:
    cache = make(attention("full", Full()), state())
    ended(cache, 9)
    first, second = (cache.acquire(handle, TOKENS, 20) for handle in (1, 2))
    assert (first.cached_tokens, second.cached_tokens) == (9, 4)
    cache.check()


def test_no_tail_while_a_step_may_still_fail_it() -> None:
    cache = make(attention("full", Full()), state())
    lease = prefill(cache, TOKENS, 6, 1)
    cache.grow(lease, 9, 11, 9)
    cache.release(lease, last_step=11, scheduled=9)
    assert hit(cache, TOKENS, 20) == 4
    assert cache.retract(11) == ()
    cache.retire(11)
    assert hit(cache, TOKENS, 20) == 4


def test_an_aborted_sequence_leaves_no_tail() -> None:
    cache = make(attention("full", Full()), state())
    ended(cache, 9, keep=False)
    assert hit(cache, TOKENS, 20) == 4


def test_the_tail_index_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.prefix_cache.tails.PREFIXES", 3)
    index = TailIndex()
    for prefix in range(5):
        for tokens in range(6):
            index.add(bytes([prefix]), tokens, bytes([tokens]))
    assert index.of(bytes([1])) == []
    assert [tokens for tokens, _ in index.of(bytes([4]))] == [5, 4, 3, 2]


def test_a_lone_sequence_never_starves_for_state_pages() -> None:
    """Two state pages are what a sequence holds at once, so an arena of two must do."""
    cache = make(state(), pages=2, grid=4)
    assert cache.needed_pages(100) == (2,)
    prefill(cache, TOKENS, 100, 1, chunk=3)


# -- media


def item(name: bytes, position: int, span: int = 2, tokens: int = 10) -> MediaItem:
    return MediaItem(name * 32, position, span, tokens)


def test_the_same_image_hits_under_any_text() -> None:
    cache = make(attention("full", Full()), items("cross", Cross()))
    first = cache.acquire(1, TOKENS, 20, media=[item(b"a", 3)])
    assert cache.grow(first, 20, 1, 20).media == ((1, 0),)
    other = TOKENS[::-1].copy()
    second = cache.acquire(2, other, 20, media=[item(b"b", 1), item(b"a", 9)])
    assert second.cached_tokens == 0
    grown = cache.grow(second, 20, 1, 20)
    assert grown.media == ((1, 0),)  # only the other image
    assert second.item_columns(1) == (3, 0)
    assert second.tables[1][:3] == first.tables[1]
    cache.check()


def test_another_image_breaks_the_text_hit_where_it_stands() -> None:
    cache = make(attention("full", Full()), items("cross", Cross()))
    lease = cache.acquire(1, TOKENS, 24, media=[item(b"a", 9)])
    cache.grow(lease, 24, 1, 24)
    assert hit(cache, TOKENS, 24, media=[item(b"a", 9)]) == 20
    assert hit(cache, TOKENS, 24, media=[item(b"b", 9)]) == 8
    assert hit(cache, TOKENS, 24, media=[item(b"a", 10)]) == 8
    assert hit(cache, TOKENS, 24) == 8


def test_an_image_of_another_tenant_never_hits() -> None:
    cache = make(attention("full", Full()), items("cross", Cross()))
    cache.grow(cache.acquire(1, TOKENS, 20, media=[item(b"a", 3)]), 20, 1, 20)
    other = cache.acquire(2, TOKENS, 20, media=[item(b"a", 3)], salt="t")
    assert cache.grow(other, 20, 1, 20).media == ((1, 0),)


def test_a_lost_image_is_computed_again_without_the_text() -> None:
    cache = make(attention("full", Full()), items("cross", Cross()))
    lease = cache.acquire(1, TOKENS, 20, media=[item(b"a", 3)])
    cache.grow(lease, 20, 1, 20)
    cache.release(lease, last_step=1)
    cache.retire(1)
    cache.pool.unpublish(next(iter(cache.pool.names[1].values())))
    again = cache.acquire(2, TOKENS, 20, media=[item(b"a", 3)])
    assert again.cached_tokens == 16
    grown = cache.grow(again, 20, 2, 20)
    assert grown.media == ((1, 0),)
    assert len(cache.pool.names[1]) == 3
    cache.check()


def test_images_get_pages_when_the_text_reaches_them() -> None:
    cache = make(attention("full", Full()), items("cross", Cross()))
    lease = cache.acquire(1, TOKENS, 40, media=[item(b"a", 2), item(b"b", 30)])
    assert cache.grow(lease, 16, 1, 40).media == ((1, 0),)
    assert lease.item_columns(1) == (0, -1)
    assert cache.grow(lease, 30, 2, 40).media == ()
    assert lease.capacity_tokens == 30
    assert cache.grow(lease, 31, 3, 40).media == ((1, 1),)


def test_embeddings_leave_when_their_placeholders_are_computed() -> None:
    cache = make(attention("full", Full()), items("media", Media()))
    lease = cache.acquire(1, TOKENS, 40, media=[item(b"a", 2, span=10)])
    cache.grow(lease, 8, 1, 40)
    cache.commit(lease, 8, 40, 1)
    assert len(cache.reclaimable_pages(lease)) == 2
    assert cache.pool.groups[1].live == 3
    cache.grow(lease, 16, 2, 40)
    cache.commit(lease, 16, 40, 2)
    cache.retire(2)
    assert (cache.pool.groups[1].live, cache.pool.groups[1].cached) == (0, 3)
    assert lease.tables[1] == [0, 0, 0]


def test_embeddings_are_not_needed_when_the_text_hits() -> None:
    cache = make(attention("full", Full()), items("media", Media()))
    media = [item(b"a", 2, span=10)]
    lease = cache.acquire(1, TOKENS, 40, media=media)
    cache.grow(lease, 40, 1, 40)
    cache.release(lease, last_step=1)
    cache.retire(1)
    again = cache.acquire(2, TOKENS, 40, media=media)
    assert again.cached_tokens == 36
    assert cache.grow(again, 40, 2, 40).media == ()
    assert again.tables[1] == []


def test_a_failed_step_takes_media_pages_back() -> None:
    cache = make(attention("full", Full()), items("cross", Cross()))
    owner = cache.acquire(1, TOKENS, 20, media=[item(b"a", 3)])
    cache.grow(owner, 20, 1, 20)
    taker = cache.acquire(2, TOKENS[::-1].copy(), 20, media=[item(b"a", 3)])
    cache.grow(taker, 20, 1, 20)
    assert cache.retract(1, owner) == (2,)
    assert not cache.pool.names[1]


def test_requests_with_too_many_images_never_fit() -> None:
    cache = make(attention("full", Full(), layers=4), items("cross", Cross()), pages=3)
    slots = cache.pool.plan.groups[1].slots
    assert cache.fits(8, [slots * PAGE])
    assert not cache.fits(8, [slots * PAGE, 1])
    assert cache.needed_pages(8, [5, 4]) == (2, 3)
