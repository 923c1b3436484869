"""From a step plan to the tensors of one step.

Owns: the staging sets that carry a plan's values to the stream, and the arithmetic of ragged rows.
Does not know: models, sampling, what the rows are for.
Invariants: a staging set is written by one launch and not again until that step has run. With depth + 2 sets there is
always a free one; running out is a fault of the caller, never a wait.

    counts        3        1    2
    row_offsets   0        3    4      6
    tokens        | a a a  | b  | c c  |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from aengine.types import Bools, Int32s, Int64s, MediaPlacement, PageMove, SlotSetup, StepPlan, TableDelta


@dataclass(frozen=True, slots=True)
class Staged:
    """A plan's values in a staging set; columns as in StepPlan."""

    step: int
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
    buffers: _Buffers


class _Buffers:
    """The memory of one staging set: grows to the largest plan it has carried."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[np.generic]] = {}

    def copy(self, name: str, values: Int32s | Int64s) -> Int32s:
        held = self._arrays.get(name)
        if held is None or len(held) < len(values):
            held = self._arrays[name] = np.empty(max(64, 2 * len(values)), dtype=np.int32)
        view: Int32s = held[: len(values)]  # type: ignore[assignment]  # all arrays here are int32
        view[:] = values
        return view


class Staging:
    """`sets` reusable staging sets."""

    def __init__(self, sets: int) -> None:
        self._sets = sets
        self._free: SimpleQueue[_Buffers] = SimpleQueue()
        for _ in range(sets):
            self._free.put(_Buffers())

    def stage(self, plan: StepPlan) -> Staged:
        try:
            buffers = self._free.get_nowait()
        except Empty:
            raise RuntimeError(f"step {plan.step}: all {self._sets} staging sets are in flight") from None
        try:
            return _copy(plan, buffers)
        except BaseException:
            self._free.put(buffers)
            raise

    def release(self, staged: Staged) -> None:
        self._free.put(staged.buffers)


def _copy(plan: StepPlan, buffers: _Buffers) -> Staged:
    return Staged(
        step=plan.step,
        slots=buffers.copy("slots", plan.slots),
        starts=buffers.copy("starts", plan.starts),
        counts=buffers.copy("counts", plan.counts),
        samples=buffers.copy("samples", plan.samples),
        relay=buffers.copy("relay", plan.relay.astype(np.int32)).astype(bool),
        ids=buffers.copy("ids", plan.ids),
        tables=plan.tables,
        setups=plan.setups,
        zero=plan.zero,
        media=plan.media,
        moves=plan.moves,
        prompt_logprobs={row: targets.copy() for row, targets in plan.prompt_logprobs.items()},
        deferred=plan.deferred.copy(),
        buffers=buffers,
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
