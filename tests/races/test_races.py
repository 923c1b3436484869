"""Depth, delays, aborts, preemptions, failures and draft tokens never change a token."""

from __future__ import annotations

import dataclasses

import pytest

from tests.races.harness import Episode, Setting

# Per depth. Each fault of test_planted_faults.py that such settings can show is noticed by three of the first 130.
EPISODES = 260
RECURRENT = 110


def settings(depth: int, seed: int) -> Setting:
    """Rotates through roomy and tiny pools, windows, chunks, drafts, failures, small budgets, and large pages that hold
    several pages, which move."""
    base = Setting(depth=depth)
    kinds = [
        base,
        dataclasses.replace(base, pages=18, seqs=8),
        dataclasses.replace(base, pages=15, abort=0.15),
        dataclasses.replace(base, window=9, pages=36),
        dataclasses.replace(base, draft=1.0, pages=24),
        dataclasses.replace(base, draft=1.0, window=6, pages=40),
        dataclasses.replace(base, fail=0.03, pages=24),
        dataclasses.replace(base, budget=5, pages=20, prefix_caching=False),
        dataclasses.replace(base, chunk=8, slab=3, pages=36, turns=0.5),
        dataclasses.replace(base, chunk=12, window=6, slab=4, pages=52, draft=1.0, fail=0.03),
    ]
    return kinds[seed % len(kinds)]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tokens_do_not_depend_on_depth_delays_or_pressure(depth: int) -> None:
    preemptions = zombies = failures = accepted = moved = 0
    for seed in range(EPISODES):
        setting = settings(depth, seed)
        try:
            episode = Episode(seed, setting).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}, {setting}: {error!r}") from error
        stats = episode.scheduler.stats()
        preemptions += stats.preemptions
        zombies += stats.zombie_rows
        accepted += stats.accepted_tokens
        failures += episode.failed_steps
        moved += episode.moved
    # the episodes must really have been under pressure
    assert preemptions > 200
    assert failures > 13
    assert moved > 33
    assert accepted > 330
    assert (zombies > 130) == (depth > 0)


@pytest.mark.parametrize("multi", [3, 8])
def test_tokens_do_not_depend_on_steps_planned_at_once(multi: int) -> None:
    preemptions = zombies = failures = 0
    for seed in range(40):
        setting = dataclasses.replace(settings(0, seed), multi=multi, draft=0.0)
        try:
            episode = Episode(seed, setting).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}, {setting}: {error!r}") from error
        preemptions += episode.scheduler.stats().preemptions
        zombies += episode.scheduler.stats().zombie_rows
        failures += episode.failed_steps
    assert preemptions > 15
    assert zombies > 25
    assert failures >= 1


def recurrent(depth: int, seed: int) -> Setting:
    """The same for models with recurrent state: checkpoints of other sizes than pages, dense and sparse ones, turns
    that go on at the exact end of an earlier request, large pages that hold several pages."""
    base = Setting(depth=depth, state=4, turns=0.5)
    kinds = [
        base,
        dataclasses.replace(base, pages=24, seqs=8),
        dataclasses.replace(base, pages=18, abort=0.15),
        dataclasses.replace(base, pages=30, state=8, window=9),
        dataclasses.replace(base, pages=24, draft=1.0),
        dataclasses.replace(base, pages=36, state=8, draft=1.0, window=6, grid=8),
        dataclasses.replace(base, pages=26, fail=0.04, grid=8),
        dataclasses.replace(base, pages=40, fail_row=0.06, grid=4, draft=1.0),
        dataclasses.replace(base, pages=24, page=8, budget=5, prefix_caching=False),
        dataclasses.replace(base, pages=24, state=12, budget=64, grid=16),
        dataclasses.replace(base, pages=30, slab=3, window=6, budget=8),
    ]
    return kinds[seed % len(kinds)]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_recurrent_state_is_never_stale(depth: int) -> None:
    preemptions = failures = accepted = hits = 0
    for seed in range(RECURRENT):
        setting = recurrent(depth, seed)
        try:
            episode = Episode(seed, setting).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}, {setting}: {error!r}") from error
        preemptions += episode.scheduler.stats().preemptions
        accepted += episode.scheduler.stats().accepted_tokens
        hits += episode.cache.stats().hit_tokens
        failures += episode.failed_steps
    assert preemptions > 70
    assert failures > 3
    assert accepted > 200
    assert hits > 7_000


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_following_copies_changes_no_token(depth: int) -> None:
    """The drafter of the program itself, on texts of three or four different tokens, one of which may end them."""
    base = Setting(depth=depth, lookup=3, abort=0.02)
    kinds = [
        base,
        dataclasses.replace(base, pages=18, seqs=8),
        dataclasses.replace(base, lookup=4, pages=15, abort=0.15),
        dataclasses.replace(base, window=6, pages=40, budget=7),
        dataclasses.replace(base, state=8, window=6, grid=8, pages=36, turns=0.5),
        dataclasses.replace(base, state=4, pages=24, fail_row=0.06, grid=4),
        dataclasses.replace(base, chunk=12, slab=4, pages=52, fail=0.03),
    ]
    preemptions = accepted = rejected = failures = 0
    for seed in range(35):
        setting = kinds[seed % len(kinds)]
        try:
            episode = Episode(seed, setting).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}, {setting}: {error!r}") from error
        stats = episode.scheduler.stats()
        preemptions += stats.preemptions
        accepted += stats.accepted_tokens
        rejected += stats.drafted_tokens - stats.accepted_tokens
        failures += episode.failed_steps
    assert preemptions > 12
    assert accepted > 120
    assert rejected > 120
    assert failures > 2


def test_plans_are_deterministic() -> None:
    for seed in range(12):
        setting = settings(1, seed) if seed % 3 else Setting(lookup=3, pages=24)
        first = Episode(seed, setting).run()
        second = Episode(seed, setting).run()
        assert [repr(plan) for plan in first.plans] == [repr(plan) for plan in second.plans]
