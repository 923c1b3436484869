"""What comes back from a step on the device.

Owns: a step's output tensors, their copies on the host, and the `StepResult` made of them.
Does not know: streams' order, models.
Invariants: output tensors are kept until they have been copied, so that their memory is not given to a later step
meanwhile. Host copies are read only after the step's event, and the set that holds them is given back once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aengine.runner.batch import SamplePoints, Tokens
from aengine.runner.cuda.api import Event
from aengine.runner.cuda.sampler import MESSAGES, NO_TOKEN, SOUND
from aengine.runner.cuda.staging import StagingSet
from aengine.runner.logprobs import join_logprobs
from aengine.types import Int32s, Int64s, Logprobs, StepResult

LogprobTensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Some positions of one row's prompt, in order."""

    row: int
    tensors: LogprobTensors


@dataclass(frozen=True, slots=True)
class Outputs:
    """On the device: `sampled` int32 [2, N], tokens and faults; None: nothing was sampled."""

    sampled: Tensor | None
    logprobs: tuple[tuple[Int64s, LogprobTensors], ...] = ()
    prompts: tuple[ScoredPrompt, ...] = ()

    def download(self, carrier: StagingSet) -> HostOutputs:
        """Enqueue all copies on the current stream."""
        return HostOutputs(
            None if self.sampled is None else carrier.download(self.sampled),
            [(points, _download(carrier, tensors)) for points, tensors in self.logprobs],
            [(one.row, _download(carrier, one.tensors)) for one in self.prompts],
        )


def _download(carrier: StagingSet, tensors: LogprobTensors) -> Logprobs:
    ids, values, ranks = (carrier.download(tensor) for tensor in tensors)
    return Logprobs(ids, values, ranks)  # type: ignore[arg-type]  # of the dtypes that logprob_tensors makes


@dataclass(frozen=True, slots=True)
class HostOutputs:
    """The same on the host: views of pinned memory, garbage until the step's event."""

    sampled: NDArray[np.generic] | None
    logprobs: list[tuple[Int64s, Logprobs]]
    prompts: list[tuple[int, Logprobs]]


class Collected:
    """A launched step; see `runner.step.Launched`."""

    def __init__(
        self,
        plan: PlanFacts,
        failed: dict[int, str],
        host: HostOutputs,
        times: tuple[Event, Event],
        give_back: Callable[[], None],
        keep: Outputs,
    ) -> None:
        self._plan, self._failed, self._host = plan, failed, host
        self._times, self._give_back, self._keep = times, give_back, keep

    def collect(self) -> StepResult:
        try:
            began, ended = self._times
            return self._result(ended.seconds_since(began))
        finally:
            self._give_back()

    def _result(self, device_s: float) -> StepResult:
        plan, failed = self._plan, dict(self._failed)
        points = plan.points
        rows = len(points.offsets) - 1
        sizes = np.diff(points.offsets)
        tokens = np.zeros((rows, max(1, plan.width)), dtype=np.int32)
        counts = np.zeros(rows, dtype=np.int32)
        logprobs: dict[int, Logprobs] = {}
        if self._host.sampled is not None:
            sampled: Int32s = self._host.sampled[0].astype(np.int32)
            self._note_faults(self._host.sampled[1].astype(np.int32), failed)
            single = np.flatnonzero(sizes == 1)
            tokens[single, 0] = sampled[points.offsets[single]]
            counts[single] = 1
            for row in np.flatnonzero(sizes > 1).tolist():
                counts[row] = self._accept(row, sampled, tokens[row])
            logprobs = self._logprobs(counts)
        prompts = self._prompts(failed)
        wrong = list(failed)
        tokens[wrong], counts[wrong] = 0, 0
        return StepResult(
            step=plan.step,
            tokens=tokens,
            counts=counts,
            logprobs={row: value for row, value in logprobs.items() if row not in failed},
            prompt_logprobs={row: value for row, value in prompts.items() if row not in failed},
            failed=failed,
            device_s=device_s,
        )

    def _note_faults(self, faults: Int32s, failed: dict[int, str]) -> None:
        for point in np.flatnonzero(faults != SOUND).tolist():
            row, code = int(self._plan.points.rows[point]), int(faults[point])
            if code == NO_TOKEN:
                message = f"slot {self._plan.slots[row]} has no sampled token to go on from"
            else:
                message = MESSAGES[code]
            failed.setdefault(row, message)

    def _accept(self, row: int, sampled: Int32s, out: Int32s) -> int:
        """Keep the samples up to the first that differs from the draft after it -> how many."""
        points, tokens = self._plan.points, self._plan.tokens
        first, end = int(points.offsets[row]), int(points.offsets[row + 1])
        drafts = tokens.ids[points.tokens[first + 1 : end]]
        differs = np.flatnonzero(sampled[first : end - 1] != drafts)
        count = int(differs[0]) + 1 if differs.size else end - first
        out[:count] = sampled[first : first + count]
        return count

    def _logprobs(self, counts: Int32s) -> dict[int, Logprobs]:
        by_point: dict[int, Logprobs] = {}
        for points, made in self._host.logprobs:
            for index, point in enumerate(points.tolist()):
                by_point[point] = _copy(made, slice(index, index + 1))
        result = {}
        for row in np.flatnonzero(counts).tolist():
            first = int(self._plan.points.offsets[row])
            if first in by_point:
                result[row] = join_logprobs([by_point[point] for point in range(first, first + int(counts[row]))])
        return result

    def _prompts(self, failed: dict[int, str]) -> dict[int, Logprobs]:
        parts: dict[int, list[Logprobs]] = {}
        for row, made in self._host.prompts:
            parts.setdefault(row, []).append(_copy(made, slice(None)))
        for row, scores in parts.items():
            if any(np.isnan(part.values).any() for part in scores):
                failed.setdefault(row, "the model's logits of the prompt hold NaN")
        return {row: join_logprobs(scores) for row, scores in parts.items()}


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What of a plan the result needs. `width`: the most tokens a row may get."""

    step: int
    slots: Int32s
    width: int
    tokens: Tokens
    points: SamplePoints


def _copy(made: Logprobs, part: slice) -> Logprobs:
    """Out of the pinned memory, which the next step writes to."""
    return Logprobs(made.ids[part].copy(), made.values[part].copy(), made.ranks[part].copy())
