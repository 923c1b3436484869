"""A device that takes modelled time and costs the host next to nothing.

Owns: when each step begins and ends on the modelled device, tokens that follow from the token before them, how long the
device had nothing to do.
Does not know: KV pages (`sim` checks those), scheduling, text.
Invariants: the device is serial: a step begins when it is launched or when the step before it ends, whichever is later,
and ends `step_s` after that, however late this thread wakes. A token depends on the input token and its position alone,
so a lost, doubled or reordered token changes all that follow, whatever was cached or chunked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aengine.runner.sim import allowed_tokens
from aengine.runner.step import Undecided
from aengine.types import Choices, Int32s, Int64s, Logprobs, StepPlan, StepResult

_FIRST_ID = 256  # lower ones are special tokens in most vocabularies


class StepTime(Protocol):
    def step_s(self, rows: int, tokens: int, context: int) -> float: ...


@dataclass(slots=True)
class Occupancy:
    """What the modelled device did since it began its first step, in seconds of `time.perf_counter`."""

    steps: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    ended_s: float = 0.0  # when the last step ends or ended


@dataclass(frozen=True, slots=True)
class StagedModel:
    """A plan, and when it was launched."""

    plan: StepPlan
    launched_s: float


def following(ids: Int32s, positions: Int64s, seeds: NDArray[np.uint64], vocab: int) -> Int32s:
    """The token after each input token at its position: int32 [n], from int32 [n], int64 [n] and uint64 [n]."""
    with np.errstate(over="ignore"):
        state = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state ^= (positions.astype(np.uint64) << np.uint64(32)) ^ seeds
        for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # the finaliser of splitmix64
            state ^= state >> np.uint64(29)
            state *= np.uint64(multiplier)
        state ^= state >> np.uint64(32)
        first = min(_FIRST_ID, vocab - 1)
        out: Int32s = (np.uint64(first) + state % np.uint64(vocab - first)).astype(np.int32)
        return out


class ModelledExecutor:
    """Executor of StreamRunner. `sleep_until(s)` returns at or after `s` on the clock of `now`."""

    def __init__(
        self,
        profile: StepTime,
        *,
        max_seqs: int,
        vocab: int,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.occupancy = Occupancy()
        self._profile = profile
        self._vocab = vocab
        self._now = now
        self._sleep = sleep
        self._relay = np.full(max_seqs, -1, np.int32)
        self._seeds = np.zeros(max_seqs, np.uint64)
        self._scored = np.zeros(max_seqs, np.bool_)

    def stage(self, plan: StepPlan) -> StagedModel:
        return StagedModel(plan, self._now())

    def run(self, staged: StagedModel) -> StepResult | Undecided:
        plan = staged.plan
        step_s = self._profile.step_s(len(plan.slots), plan.n_tokens, int((plan.starts + plan.counts).sum()))
        began_s = self._occupy(staged.launched_s, step_s)
        for setup in plan.setups:
            self._seeds[setup.slot] = 0 if setup.sampling.greedy else setup.seed % 2**64
            self._scored[setup.slot] = setup.sampling.logprobs is not None
            self._relay[setup.slot] = -1
        tokens, counts = self._draw(plan)
        if len(plan.deferred):
            result: StepResult | Undecided = Undecided(partial(self._decide, plan, tokens, counts, began_s, step_s))
        else:
            result = self._result(plan, tokens, counts, began_s, step_s)
        left_s = self.occupancy.ended_s - self._now()
        if left_s > 0:
            self._sleep(left_s)
        return result

    def _occupy(self, launched_s: float, step_s: float) -> float:
        """When the step begins."""
        at = self.occupancy
        begins_s = max(launched_s, at.ended_s)
        if at.steps:
            at.idle_s += begins_s - at.ended_s
        at.steps += 1
        at.busy_s += step_s
        at.ended_s = begins_s + step_s
        return begins_s

    def _draw(self, plan: StepPlan) -> tuple[Int32s, Int32s]:
        """tokens int32 [R, K], counts int32 [R]; drafts are accepted as far as they are what would have been drawn."""
        rows = len(plan.slots)
        lasts = np.empty(rows, np.int32)
        lasts[plan.relay] = self._relay[plan.slots[plan.relay]]
        told = np.flatnonzero(~plan.relay)
        ends = np.cumsum(plan.counts[told])
        lasts[told] = plan.ids[ends - 1] if len(told) else 0
        positions = (plan.starts + plan.counts - 1).astype(np.int64)
        tokens = np.zeros((rows, max(1, int(plan.samples.max(initial=0)))), np.int32)
        tokens[:, 0] = following(lasts, positions, self._seeds[plan.slots], self._vocab)
        counts = np.minimum(plan.samples, 1).astype(np.int32)
        for row in np.flatnonzero(plan.samples > 1).tolist():
            end = int(ends[np.searchsorted(told, row)])
            count = int(plan.counts[row])
            drafts, first = plan.ids[end - count : end], int(plan.starts[row])
            seeds = np.full(count, self._seeds[plan.slots[row]])
            drawn = following(drafts, np.arange(first, first + count), seeds, self._vocab)
            wrong = np.flatnonzero(drawn[:-1] != drafts[1:])
            counts[row] = count if not len(wrong) else int(wrong[0]) + 1
            tokens[row, :count] = drawn
        return tokens, counts

    def _decide(
        self, plan: StepPlan, tokens: Int32s, counts: Int32s, began_s: float, step_s: float, choices: Choices
    ) -> StepResult:
        tokens[choices.rows, 0] = allowed_tokens(tokens[choices.rows, 0], choices.masks)
        return self._result(plan, tokens, counts, began_s, step_s)

    def _result(self, plan: StepPlan, tokens: Int32s, counts: Int32s, began_s: float, step_s: float) -> StepResult:
        sampled = counts > 0
        self._relay[plan.slots[sampled]] = tokens[sampled, counts[sampled] - 1]
        scored = np.flatnonzero(sampled & self._scored[plan.slots]).tolist()
        return StepResult(
            plan.step,
            tokens,
            counts,
            {row: _certain(tokens[row, : counts[row]]) for row in scored},
            {row: _certain(targets) for row, targets in plan.prompt_logprobs.items()},
            device_s=step_s,
            began_s=began_s,
            ended_s=began_s + step_s,
        )


def _certain(ids: Int32s) -> Logprobs:
    column = np.asarray(ids, np.int32)[:, None]
    return Logprobs(column, np.zeros(column.shape, np.float32), np.ones(len(column), np.int32))
