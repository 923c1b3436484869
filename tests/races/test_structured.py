"""Grammars under the same episodes: rows that wait for masks, tokens that are forced, others beside them."""

from __future__ import annotations

import dataclasses

import pytest

from tests.races.cuda_device import CudaEpisode
from tests.races.harness import Episode, Setting

BASE = Setting(structured=0.5)
KINDS = [
    BASE,
    dataclasses.replace(BASE, pages=15, seqs=8, abort=0.15),
    dataclasses.replace(BASE, fail=0.03, fail_row=0.03, pages=24),
    dataclasses.replace(BASE, window=9, pages=36, budget=7),
    dataclasses.replace(BASE, state=4, turns=0.5, pages=40),
    dataclasses.replace(BASE, draft=1.0, pages=24),
    dataclasses.replace(BASE, multi=4, seqs=6, budget=5),
]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_grammars_rule_tokens_alike_at_any_depth_and_under_pressure(depth):
    preemptions = forced = failures = 0
    for seed in range(30):
        setting = dataclasses.replace(KINDS[seed % len(KINDS)], depth=depth)
        try:
            episode = Episode(seed, setting).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}, {setting}: {error!r}") from error
        stats = episode.scheduler.stats()
        preemptions += stats.preemptions
        forced += stats.forced_tokens
        failures += episode.failed_steps
    assert preemptions > 8
    assert forced > 150
    assert failures > 1


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_on_cuda(depth):
    forced = 0
    for seed, kind in enumerate(KINDS[:3]):
        setting = dataclasses.replace(kind, depth=depth, requests=5)
        try:
            episode = CudaEpisode(seed, setting, graphs=seed % 2 == 0).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}, {setting}: {error!r}") from error
        forced += episode.scheduler.stats().forced_tokens
    assert forced > 0
