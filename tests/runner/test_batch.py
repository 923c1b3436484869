"""Ragged arithmetic.

Owns: lay_out, sample_points.
Does not know: models.
Invariants: every expected array is written out.
"""

from __future__ import annotations

import numpy as np
import pytest

from aengine.runner.batch import lay_out, sample_points
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
    tokens = lay_out(plan(ROWS, IDS))
    assert tokens.offsets.tolist() == [0, 3, 4, 6, 7, 8]
    assert tokens.rows.tolist() == [0, 0, 0, 1, 2, 2, 3, 4]
    assert tokens.positions.tolist() == [10, 11, 12, 7, 0, 1, 5, 9]
    assert tokens.ids.tolist() == [20, 21, 22, 0, 30, 31, 40, 0]


def test_sample_points_are_the_last_tokens_of_their_rows():
    made = plan(ROWS, IDS)
    points = sample_points(made.samples, lay_out(made))
    assert points.offsets.tolist() == [0, 0, 1, 3, 4, 5]
    assert points.rows.tolist() == [1, 2, 2, 3, 4]
    assert points.tokens.tolist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("ids", [IDS[:-1], [*IDS, 1], []])
def test_ids_must_fill_the_rows(ids):
    with pytest.raises(ValueError, match=f"step 1 has {len(ids)} ids for 6 tokens"):
        lay_out(plan(ROWS, ids))
