"""Ragged arithmetic and staging sets.

Owns: lay_out, sample_points, Staging.
Does not know: models.
Invariants: every expected array is written out.
"""

from __future__ import annotations

import numpy as np
import pytest

from aengine.runner.batch import Staging, lay_out, sample_points
from aengine.types import StepPlan


def plan(rows, ids, step=1):
    """rows of (slot, start, count, samples, relay)"""
    slots, starts, counts, samples, relay = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    return StepPlan(
        step, slots, slots.astype(np.int64), starts, counts, samples, relay.astype(bool), np.array(ids, np.int32)
    )


ROWS = [(4, 10, 3, 0, 0), (1, 7, 1, 1, 1), (2, 0, 2, 2, 0), (0, 5, 1, 1, 0), (3, 9, 1, 1, 1)]
IDS = [20, 21, 22, 30, 31, 40]


def test_tokens_of_ragged_rows():
    tokens = lay_out(Staging(1).stage(plan(ROWS, IDS)))
    assert tokens.offsets.tolist() == [0, 3, 4, 6, 7, 8]
    assert tokens.rows.tolist() == [0, 0, 0, 1, 2, 2, 3, 4]
    assert tokens.positions.tolist() == [10, 11, 12, 7, 0, 1, 5, 9]
    assert tokens.ids.tolist() == [20, 21, 22, 0, 30, 31, 40, 0]


def test_sample_points_are_the_last_tokens_of_their_rows():
    staged = Staging(1).stage(plan(ROWS, IDS))
    points = sample_points(staged.samples, lay_out(staged))
    assert points.offsets.tolist() == [0, 0, 1, 3, 4, 5]
    assert points.rows.tolist() == [1, 2, 2, 3, 4]
    assert points.tokens.tolist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("ids", [IDS[:-1], [*IDS, 1], []])
def test_ids_must_fill_the_rows(ids):
    with pytest.raises(ValueError, match=f"step 1 has {len(ids)} ids for 6 tokens"):
        lay_out(Staging(1).stage(plan(ROWS, ids)))


def test_a_set_in_use_is_not_written():
    staging = Staging(2)
    first = staging.stage(plan([(1, 2, 1, 1, 0)], [7]))
    second = staging.stage(plan([(3, 4, 1, 1, 0)], [8], step=2))
    assert (first.slots.tolist(), first.ids.tolist()) == ([1], [7])
    with pytest.raises(RuntimeError, match="step 3: all 2 staging sets are in flight"):
        staging.stage(plan([(5, 6, 1, 1, 0)], [9], step=3))
    staging.release(first)
    third = staging.stage(plan([(5, 6, 1, 1, 0)], [9], step=3))
    assert (third.slots.tolist(), third.ids.tolist()) == ([5], [9])
    assert (second.slots.tolist(), second.ids.tolist()) == ([3], [8])


def test_a_set_grows_with_its_plans():
    staging = Staging(1)
    for n in (1, 5000, 3):
        staged = staging.stage(plan([(0, 0, n, 1, 0)], range(n)))
        assert staged.ids.tolist() == list(range(n))
        staging.release(staged)


def test_staged_values_are_copies():
    made = plan(ROWS, IDS)
    targets = np.array([1, 2], np.int32)
    made = StepPlan(
        1, made.slots, made.handles, made.starts, made.counts, made.samples, made.relay, made.ids,
        prompt_logprobs={0: targets},
    )  # fmt: skip
    staged = Staging(1).stage(made)
    for array in (made.slots, made.starts, made.counts, made.samples, made.ids, targets):
        array[...] = 77
    made.relay[...] = True
    assert staged.slots.tolist() == [row[0] for row in ROWS]
    assert staged.starts.tolist() == [row[1] for row in ROWS]
    assert staged.relay.tolist() == [bool(row[4]) for row in ROWS]
    assert staged.ids.tolist() == IDS
    assert staged.prompt_logprobs[0].tolist() == [1, 2]


def test_a_plan_that_cannot_be_copied_gives_its_set_back():
    staging = Staging(1)
    broken = plan(ROWS, IDS)
    with pytest.raises((ValueError, TypeError)):
        staging.stage(
            StepPlan(
                1, broken.slots, broken.handles, broken.starts, broken.counts, broken.samples, broken.relay,
                np.array(["a"]),
            )
        )  # fmt: skip
    staging.stage(broken)
