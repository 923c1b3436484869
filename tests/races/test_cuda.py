"""The CUDA runner under the same episodes: copies on a stream of their own, operations in any order streams allow."""

from __future__ import annotations

import dataclasses

import pytest

from tests.races.cuda_device import (
    CudaEpisode,
    EarlyRelay,
    FullCuts,
    HastyCopies,
    LatePieces,
    OneSetNoGuard,
    StalePieces,
)
from tests.races.harness import Setting, Wrong

BASE = Setting(requests=5)
KINDS = [
    BASE,
    dataclasses.replace(BASE, pages=18, seqs=8, budget=40),
    dataclasses.replace(BASE, pages=15, abort=0.15),
    dataclasses.replace(BASE, window=9, pages=36),
    dataclasses.replace(BASE, draft=1.0, pages=24, budget=24),
    dataclasses.replace(BASE, fail=0.05, fail_row=0.05, pages=24),
    dataclasses.replace(BASE, chunk=8, slab=3, pages=36, turns=0.5),
    dataclasses.replace(BASE, state=4, pages=36),
    dataclasses.replace(BASE, state=8, pages=30, abort=0.15),
]


@pytest.mark.parametrize(("depth", "kinds"), [(0, 2), (1, 5), (2, 9)])
def test_tokens_do_not_depend_on_the_order_on_the_device(depth, kinds):
    """Every other episode replays its decode steps as graphs, and all others in pieces."""
    replays = pieces = zombies = 0
    for seed, kind in enumerate(KINDS[:kinds]):
        setting = dataclasses.replace(kind, depth=depth)
        try:
            episode = CudaEpisode(seed, setting, graphs=(seed + depth) % 2 == 0).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}, {setting}: {error!r}") from error
        counts = episode.device.fake.counts
        replays, pieces = replays + counts["replay"], pieces + counts["replay piece"]
        zombies += episode.scheduler.stats().zombie_rows
    assert min(replays, pieces) > 10
    assert zombies == 0 if depth == 0 else zombies > 0 or depth < 2


@pytest.mark.parametrize(
    "fault",
    [{"staging": OneSetNoGuard}, {"device": HastyCopies}, {"executor": EarlyRelay}],
    ids=lambda f: next(iter(f)),
)
def test_planted_faults_are_caught(fault):
    """An exception counts too: ids read from the wrong memory may be out of bounds."""
    caught = 0
    for seed in range(4):
        try:
            CudaEpisode(seed, dataclasses.replace(BASE, depth=2, requests=6), **fault).run()
        except Exception:
            caught += 1
    assert caught >= 2


@pytest.mark.parametrize("fault", [StalePieces, FullCuts, LatePieces])
def test_planted_faults_of_pieces_are_caught(fault):
    with pytest.raises(Wrong):
        CudaEpisode(0, dataclasses.replace(BASE, depth=2), graphs=True, executor=fault).run()
