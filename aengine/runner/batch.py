"""From a step plan to the rows and tokens of one step.

Owns: the arithmetic of ragged rows.
Does not know: models, sampling, what the rows are for.
Invariants: a plan whose ids do not fill its rows is refused; nothing here writes to a plan.

    counts        3        1    2
    row_offsets   0        3    4      6
    tokens        | a a a  | b  | c c  |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aengine.types import Int32s, Int64s, StepPlan


@dataclass(frozen=True, slots=True)
class Tokens:
    """The step's tokens, on the host. offsets int64 [R + 1]; rows, positions int64 [T]; ids int32 [T].

    `ids` of relay rows are 0: they are on the device.
    """

    offsets: Int64s
    rows: Int64s
    positions: Int64s
    ids: Int32s


def lay_out(plan: StepPlan) -> Tokens:
    """Raises ValueError when the plan's ids do not fill its rows exactly."""
    offsets = _offsets(plan.counts)
    rows = np.repeat(np.arange(len(plan.counts)), plan.counts)
    positions = np.arange(offsets[-1]) + (plan.starts - offsets[:-1])[rows]
    given = ~plan.relay[rows]
    if np.count_nonzero(given) != len(plan.ids):
        raise ValueError(f"step {plan.step} has {len(plan.ids)} ids for {np.count_nonzero(given)} tokens")
    ids = np.zeros(len(rows), dtype=np.int32)
    ids[given] = plan.ids
    return Tokens(offsets, rows, positions, ids)


@dataclass(frozen=True, slots=True)
class SamplePoints:
    """The S tokens after which something is sampled. offsets int64 [R + 1] into S; rows, tokens int64 [S]."""

    offsets: Int64s
    rows: Int64s
    tokens: Int64s


def sample_points(samples: Int32s, tokens: Tokens) -> SamplePoints:
    """The last samples[i] tokens of each row i, rows in order."""
    offsets = _offsets(samples)
    rows = np.repeat(np.arange(len(samples)), samples)
    ends = tokens.offsets[1:] - offsets[1:]
    return SamplePoints(offsets, rows, np.arange(offsets[-1]) + ends[rows])


def _offsets(counts: Int32s) -> Int64s:
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
