"""From a step plan to the tensors of one step.

Owns: the copy of a plan's values that goes to the stream, and the arithmetic of ragged rows.
Does not know: models, sampling, what the rows are for.
Invariants: what was staged shares no memory with the plan. The columns of a step are one block, copied by one call.

    counts        3        1    2
    row_offsets   0        3    4      6
    tokens        | a a a  | b  | c c  |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from aengine.types import Bools, Int32s, Int64s, MediaPlacement, PageMove, SlotSetup, StepPlan, TableDelta


@dataclass(frozen=True, slots=True)
class Staged:
    """A plan's values; columns as in StepPlan. `block` int32 [5, R] holds the first four and, as 0 or 1, `relay`."""

    step: int
    block: Int32s
    slots: Int32s
    starts: Int32s
    counts: Int32s
    samples: Int32s
    relay: Bools
    ids: Int32s
    tables: tuple[TableDelta, ...]
    setups: tuple[SlotSetup, ...]
    zero: tuple[int, ...]
    media: tuple[MediaPlacement, ...]
    moves: tuple[PageMove, ...]
    prompt_logprobs: Mapping[int, Int32s]
    deferred: Int64s


def stage(plan: StepPlan) -> Staged:
    columns = (plan.slots, plan.starts, plan.counts, plan.samples, plan.relay)
    block = np.concatenate(columns, dtype=np.int32, casting="unsafe").reshape(len(columns), -1)
    slots, starts, counts, samples, _ = block
    return Staged(
        step=plan.step,
        block=block,
        slots=slots,
        starts=starts,
        counts=counts,
        samples=samples,
        relay=plan.relay.copy(),
        ids=plan.ids.copy(),
        tables=plan.tables,
        setups=plan.setups,
        zero=plan.zero,
        media=plan.media,
        moves=plan.moves,
        prompt_logprobs={row: targets.copy() for row, targets in plan.prompt_logprobs.items()},
        deferred=plan.deferred.copy(),
    )


@dataclass(frozen=True, slots=True)
class Tokens:
    """The step's tokens, on the host. offsets int64 [R + 1]; rows, positions int64 [T]; ids int32 [T].

    `ids` of relay rows are 0: they are on the device.
    """

    offsets: Int64s
    rows: Int64s
    positions: Int64s
    ids: Int32s


def lay_out(staged: Staged | StepPlan) -> Tokens:
    """Raises ValueError when the plan's ids do not fill its rows exactly."""
    offsets = _offsets(staged.counts)
    rows = np.repeat(np.arange(len(staged.counts)), staged.counts)
    positions = np.arange(offsets[-1]) + (staged.starts - offsets[:-1])[rows]
    given = ~staged.relay[rows]
    if np.count_nonzero(given) != len(staged.ids):
        raise ValueError(f"step {staged.step} has {len(staged.ids)} ids for {np.count_nonzero(given)} tokens")
    ids = np.zeros(len(rows), dtype=np.int32)
    ids[given] = staged.ids
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
