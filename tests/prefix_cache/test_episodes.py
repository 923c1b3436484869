"""Random episodes over every lifetime, each checked by shadow KV and by the audit after every event."""

from __future__ import annotations

import random

import pytest

from tests.prefix_cache.layouts import LAYOUTS, random_media, small_plan
from tests.prefix_cache.world import World

EPISODES = 190  # per layout; 11 layouts
TICKS = 60


def episode(seed: int, layout: str, *, check_every: int = 1) -> World:
    rng = random.Random(f"{layout} {seed}")
    specs = LAYOUTS[layout]()
    plan = small_plan(specs, rng.choice((3, 6, 12, 24)), rng.choice((1, 1, 2, 3)))
    world = World(seed, plan, grid_tokens=rng.choice((0, 8, 16)), enabled=rng.random() < 0.95)
    per_item = any(spec.lifetime.per_item for spec in specs)
    prompts = [[rng.randrange(2) for _ in range(rng.choice((3, 4, 5, 8, 9, 15, 16, 17, 24, 33)))] for _ in range(3)]
    fail = rng.choice((0.0, 0.0, 0.1))
    for tick in range(TICKS):
        if rng.random() < 0.2 and len(world.waiting) + len(world.running) < 6:
            add_some(world, rng, prompts, per_item=per_item)
        world.tick(fail=fail)
        if tick % check_every == 0:
            world.cache.check()
    world.close()
    return world


def add_some(world: World, rng: random.Random, prompts: list[list[int]], *, per_item: bool) -> None:
    """One request or several forks, often a continuation or a variation of an earlier prompt."""
    prompt = list(rng.choice(prompts))
    if rng.random() < 0.3:
        prompt = prompt[: rng.randint(1, len(prompt))] + [rng.randrange(2) for _ in range(rng.randint(0, 6))]
        prompts[rng.randrange(3)] = prompt or [0]
    prompt = prompt or [0]
    media = random_media(random.Random(len(prompt)), len(prompt)) if per_item and rng.random() < 0.7 else ()
    salt = rng.choice(("", "", "", "b"))
    adapter = rng.choice(("", "", "", "lora"))
    for _ in range(rng.choice((1, 1, 2, 4))):
        world.add(prompt, len(prompt) + rng.choice((1, 4, 12, 30)), salt=salt, adapter=adapter, media=media)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_episodes(layout: str) -> None:
    hits = finished = 0
    for seed in range(EPISODES):
        world = episode(seed, layout)
        hits += world.cache.stats().hit_tokens
        finished += world.finished
    assert finished > EPISODES
    assert hits > EPISODES  # the episodes do exercise reuse


def test_same_calls_same_pages() -> None:
    """Two runs of an episode take the same pages, for every layout."""
    for layout in LAYOUTS:
        tables = [_tables(layout) for _ in range(2)]
        assert tables[0] == tables[1]


def _tables(layout: str) -> list[object]:
    world = World(3, small_plan(LAYOUTS[layout](), 24, 2), grid_tokens=16)
    rng = random.Random(5)
    log: list[object] = []
    for _ in range(40):
        if rng.random() < 0.2:
            add_some(world, rng, [[0, 1] * 8, [1] * 17, [0] * 5], per_item=False)
        world.tick()
        log.append([[list(table) for table in s.lease.tables] for s in world.running if s.lease])
    return log
