"""Depth, delays, aborts, preemptions, failures and draft tokens never change a token."""

from __future__ import annotations

import dataclasses

import pytest

from tests.races.harness import Episode, Setting

EPISODES = 400  # per depth


def settings(depth: int, seed: int) -> Setting:
    """Rotates through roomy and tiny pools, windows, drafts, failures, small budgets."""
    kind = seed % 8
    base = Setting(depth=depth)
    return [
        base,
        dataclasses.replace(base, pages=18, seqs=8),
        dataclasses.replace(base, pages=15, abort=0.15),
        dataclasses.replace(base, window=9, pages=36),
        dataclasses.replace(base, draft=1.0, pages=24),
        dataclasses.replace(base, draft=1.0, window=6, pages=40),
        dataclasses.replace(base, fail=0.03, pages=24),
        dataclasses.replace(base, budget=5, pages=20, prefix_caching=False),
    ][kind]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tokens_do_not_depend_on_depth_delays_or_pressure(depth: int) -> None:
    preemptions = zombies = failures = accepted = 0
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
    # the episodes must really have been under pressure
    assert preemptions > 300
    assert failures > 20
    assert accepted > 500
    assert (zombies > 200) == (depth > 0)


def test_plans_are_deterministic() -> None:
    for seed in range(12):
        first = Episode(seed, settings(1, seed)).run()
        second = Episode(seed, settings(1, seed)).run()
        assert [repr(plan) for plan in first.plans] == [repr(plan) for plan in second.plans]
