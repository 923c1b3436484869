"""Workloads made to break pools and caches."""

from __future__ import annotations

import random

import numpy as np
import pytest

from aengine.memory import Cross, Full, Pool, Window, uniform_plan
from aengine.prefix_cache import MediaItem, PrefixCache
from tests.prefix_cache.layouts import LAYOUTS, attention, items, random_media, small_plan
from tests.prefix_cache.test_episodes import add_some
from tests.prefix_cache.world import World

PAGE = 4


@pytest.mark.parametrize("prompt", [PAGE * 5, PAGE * 5 - 1, PAGE * 5 + 1])
def test_sixty_four_forks(prompt: int) -> None:
    """Of a page-aligned prompt all but the last page is a hit, not nothing and not everything."""
    cache = PrefixCache(Pool(uniform_plan(200, PAGE)))
    tokens = np.arange(100, dtype=np.int32)
    leases = [cache.acquire(handle, tokens.copy(), prompt, cause="fork") for handle in range(64)]
    for lease in leases:
        start = 0
        while start < prompt:
            upto = min(prompt, start + 100)
            start = max(upto, cache.grow(lease, upto, 1, prompt).start)
    cache.check()
    shared = (prompt - 1) // PAGE
    assert cache.pool.groups[0].live == shared + 64 * (-(-prompt // PAGE) - shared)
    assert cache.stats().hit_tokens_by_cause == {"fork": 63 * shared * PAGE}
    for lease in leases:
        cache.release(lease, last_step=1)
    cache.retire(1)
    assert cache.pool.groups[0].live == 0
    assert cache.pool.groups[0].cached == prompt // PAGE


def test_one_pinned_page_per_slab() -> None:
    """The other group gets nothing, is told so exactly, and gets it all once the pins have gone."""
    cache = PrefixCache(Pool(small_plan([attention("small", Full()), attention("large", Window(100), layers=4)], 8)))
    pool = cache.pool
    slots = pool.groups[0].slots
    pages = pool.take([8 * slots, 0])[0]
    pinned = [page for page in pages if page.slot == slots - 1]
    for page in pages:
        if page not in pinned:
            pool.drop(page, 0)
    assert len(pinned) == 8
    lease = cache.acquire(1, np.arange(40, dtype=np.int32), 40)
    assert cache.grow(lease, 4, 1, 40).short == (0, 1)
    assert pool.stranded_bytes(1) == 8 * (slots - 1) * pool.plan.groups[0].pitch
    pool.drop(pinned[0], 0)
    assert not cache.grow(lease, 4, 1, 40).short
    assert pool.shortage([0, 1]) == (0, 1)
    for page in pinned[1:]:
        pool.drop(page, 0)
    assert pool.shortage([0, 6]) is None  # all but the slabs that the lease is in


def test_from_all_vision_to_all_text_and_back() -> None:
    specs = [attention("self", Full(), layers=4), items("cross", Cross())]
    cache = PrefixCache(Pool(small_plan(specs, 30)))
    slots = cache.pool.groups[1].slots
    step = 0
    for phase in range(4):
        for index in range(20):
            step += 1
            tokens = np.full(64, 1000 * phase + index, np.int32)
            media = (
                [MediaItem(bytes([phase, index]) * 16, 1, 1, 20 * slots * PAGE)] if phase % 2 == 0 else []
            )  # 20 of 30 large pages
            known = 8 if media else 60
            lease = cache.acquire(step, tokens, known, media=media)
            assert not cache.grow(lease, known, step, known).short
            cache.commit(lease, known, known, step)
            cache.release(lease, last_step=step)
            cache.retire(step)
            cache.check()
    assert cache.pool.groups[1].evicted_by_steal > 0
    assert cache.pool.retypes > 0
    cache.reset()
    assert cache.pool.unowned_slabs == 30


EDGES = sorted({n + d for n in (PAGE, 2 * PAGE, 8, 12, 16) for d in (-1, 0, 1)})


@pytest.mark.parametrize("layout", ["full+window", "full+chunk", "state+window+full", "odd pages", "all"])
def test_lengths_at_every_edge(layout: str) -> None:
    """Prompts of page, window and chunk sizes, one more and one less, each extending and cutting the others."""
    world = World(11, small_plan(LAYOUTS[layout](), 40, 2), grid_tokens=8)
    world.budget = 5
    for known in EDGES:
        prompt = [0, 1, 1] * 9
        world.add(prompt[:known], known + 5)
        world.add([*prompt[: known - 1], 1 - prompt[known - 1]], known + 5)
        for _ in range(25):
            world.tick()
            world.cache.check()
    while world.running or world.waiting:
        world.tick()
    world.close()
    assert world.finished == 2 * len(EDGES)


@pytest.mark.parametrize("large_pages", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arenas_of_a_few_slabs(layout: str, large_pages: int) -> None:
    """Whatever fits alone runs to its end alone; the rest waits, and nothing is lost."""
    specs = LAYOUTS[layout]()
    for seed in range(6):
        world = World(seed, small_plan(specs, large_pages), grid_tokens=8)
        rng = random.Random(seed)
        for _ in range(60):
            if rng.random() < 0.3:
                add_some(world, rng, [[0, 1] * 4, [1] * 9, [0]], per_item="cross" in layout or layout == "all")
            world.tick()
            world.cache.check()
        world.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_longest_request_that_fits_runs_alone(layout: str) -> None:
    specs = LAYOUTS[layout]()
    world = World(3, small_plan(specs, 7), grid_tokens=8)
    limit = world.plan.max_tokens(120, in_flight_tokens=world.cache.in_flight_tokens)
    if limit < 2:
        pytest.fail(f"{layout}: nothing fits")
    assert limit == 120 or world.add([0, 1] * 60, limit + 1) is None
    sequence = world.add([0, 1, 1] * (limit // 6) or [0], limit)
    world.admit(sequence)
    while world.running:
        if (not world.launch() and world.in_flight) or len(world.in_flight) > 2:
            world.retire()
        if sequence.known >= limit and world.running:
            world.finish(sequence)
        world.cache.check()
    world.close()


@pytest.mark.parametrize("layout", ["full", "full+window", "state+window+full", "full+cross"])
def test_colliding_keys_break_no_invariant(layout: str) -> None:
    """With 8-bit keys wrong hits are certain. Ownership, conservation and the fence must hold regardless, and the
    shadow must see the wrong hits."""
    bad = 0
    for seed in range(25):
        world = World(seed, small_plan(LAYOUTS[layout](), 30, 2), grid_tokens=8, key_bytes=1)
        world.collisions_allowed = True
        rng = random.Random(seed)
        for _ in range(60):
            if rng.random() < 0.3:
                prompt = [rng.randrange(2) for _ in range(rng.choice((8, 16, 24)))]
                media = random_media(rng, len(prompt)) if "cross" in layout else ()
                world.add(prompt, len(prompt) + 4, media=media)
            world.tick(fail=0.05)
            world.cache.check()
        world.close()
        bad += world.bad_rows
    assert bad > 0


def test_preempt_ping_pong() -> None:
    """Two sequences that together do not fit take turns; each resumes from its own pages where they survived."""
    cache = PrefixCache(Pool(uniform_plan(6, PAGE)))
    buffers = [np.arange(100 * i, 100 * i + 64, dtype=np.int32) for i in (1, 2)]
    known = [9, 9]
    step = 0
    for turn in range(12):
        who = turn % 2
        lease = cache.acquire(who, buffers[who], known[who], cause="resume")
        for _ in range(2):
            step += 1
            known[who] = min(known[who] + 1, 20)
            assert not cache.grow(lease, known[who], step, known[who]).short
            cache.commit(lease, known[who], known[who], step)
            cache.retire(step)
            cache.check()
        cache.release(lease, last_step=step)
    assert cache.stats().hit_tokens_by_cause["resume"] > 0
    assert cache.pool.stats().live_bytes == 0


def test_twins_that_commit_in_one_step() -> None:
    """Two sequences generate the same tokens in the same steps: one page gets the name, both stay right."""
    cache = PrefixCache(Pool(uniform_plan(20, PAGE)))
    tokens = np.arange(64, dtype=np.int32)
    twins = [cache.acquire(handle, tokens.copy(), 3) for handle in (1, 2)]
    for step, upto in enumerate(range(3, 14), 1):
        for lease in twins:
            if upto > lease.capacity_tokens:
                cache.grow(lease, upto, step, upto - 1)
        for lease in twins:
            cache.commit(lease, upto, upto, step)
        cache.retire(step)
        cache.check()
    assert len(cache.pool.names[0]) == 3
    keyed = [[page.key is not None for page in hold.pages] for hold in (lease.holds[0] for lease in twins)]
    assert sorted(a + b for a, b in zip(*keyed, strict=True)) == [0, 1, 1, 1]
    for lease in twins:
        cache.release(lease, last_step=step)
    cache.check()
    assert cache.pool.groups[0].cached == 3


def test_a_page_lost_in_the_middle_ends_the_hit_there() -> None:
    cache = PrefixCache(Pool(uniform_plan(20, PAGE)))
    tokens = np.arange(64, dtype=np.int32)
    lease = cache.acquire(1, tokens, 24)
    cache.grow(lease, 24, 1, 24)
    cache.release(lease, last_step=0)
    cache.pool.unpublish(cache.pool.names[0][lease.chain.digests[2]])
    assert cache.acquire(2, tokens, 24).cached_tokens == 8
    cache.check()
