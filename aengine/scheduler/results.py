"""What a retired step means for its rows.

Owns: appending sampled tokens, finding stops, publishing what was computed, gathering outputs.
Does not know: how rows are chosen.
Invariants: rows of sequences that ended meanwhile (zombies) and of muted ones change nothing but the zombie count; the
common case, one token a row, costs a fixed number of NumPy calls plus Python only for rows that stop or cross a page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aengine.types import Admitted, Bools, Finish, FinishReason, Int64s, Logprobs, StepOutputs, StepPlan, StepResult

if TYPE_CHECKING:
    from aengine.scheduler.scheduler import Scheduler
    from aengine.scheduler.sequence import Sequence


class OutputBuilder:
    """Gathers what one StepOutputs will say."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.handles: list[int] = []
        self.tokens: list[int] = []
        self.logprobs: dict[int, Logprobs] = {}
        self.prompt_logprobs: list[tuple[int, Logprobs]] = []
        self._admitted: list[Admitted] = []
        self._finished: list[Finish] = []

    def admitted(self, handle: int, cached_tokens: int) -> None:
        self._admitted.append(Admitted(handle, cached_tokens))

    def finished(self, handle: int, reason: FinishReason, stop_id: int | None, error: str | None) -> None:
        self._finished.append(Finish(handle, reason, stop_id, error))

    def __bool__(self) -> bool:
        return bool(self.handles or self._finished or self._admitted or self.prompt_logprobs)

    def take(self, step: int) -> StepOutputs:
        outputs = StepOutputs(
            step, self.handles, self.tokens, self.logprobs, self.prompt_logprobs, self._admitted, self._finished
        )
        self._clear()
        return outputs


def commit_rows(scheduler: Scheduler, plan: StepPlan, result: StepResult) -> None:
    c = scheduler.columns
    slots = plan.slots.astype(np.int64)
    live = live_rows(scheduler, plan)
    sampled = plan.samples > 0
    scheduler.zombie_rows += int((~live & sampled).sum())
    rows = np.flatnonzero(live)
    slots = slots[rows]
    c.pending[slots] -= sampled[rows]
    heard = ~c.mute[slots]
    rows, slots = rows[heard], slots[heard]
    if result.failed:
        _fail_rows(scheduler, rows, slots, result)
        standing = live_rows(scheduler, plan)[rows]
        rows, slots = rows[standing], slots[standing]
    plain = plan.samples[rows] <= 1
    c.computed[slots[plain]] = (plan.starts + plan.counts)[rows[plain]]
    if plan.prompt_logprobs:
        _take_prompt_logprobs(scheduler, plan, result)
    one = plan.samples[rows] == 1
    ended = _append_tokens(scheduler, rows[one], slots[one], result)
    if not plain.all():
        for row in rows[~plain].tolist():
            ended += _accept_drafts(scheduler, plan, row, result)
    _publish(scheduler, slots)
    for sequence, reason, stop_id in ended:
        scheduler.finish(sequence, reason, stop_id=stop_id)


def live_rows(scheduler: Scheduler, plan: StepPlan) -> Bools:
    """Rows whose slot still belongs to the request the step was planned for; the others are zombies."""
    live: Bools = scheduler.columns.handle[plan.slots] == plan.handles
    return live


_Ended = list[tuple["Sequence", FinishReason, int | None]]


def _append_tokens(scheduler: Scheduler, rows: Int64s, slots: Int64s, result: StepResult) -> _Ended:
    """The common case: one new token for each of `slots`."""
    c, out = scheduler.columns, scheduler.outputs
    tokens = result.tokens[rows, 0]
    at = c.known[slots]
    c.tokens[slots, at] = tokens
    c.known[slots] = at + 1
    base = len(out.handles)
    out.handles.extend(c.handle[slots].tolist())
    out.tokens.extend(tokens.tolist())
    if result.logprobs:
        for i, row in enumerate(rows.tolist()):
            if row in result.logprobs:
                out.logprobs[base + i] = result.logprobs[row]
    stopped = (c.stop_ids[slots] == tokens[:, None]).any(axis=1) | c.many_stops[slots] | (at + 1 >= c.limit[slots])
    ended: _Ended = []
    for i in np.flatnonzero(stopped).tolist():
        ended += _ending(scheduler, int(slots[i]), int(tokens[i]))
    return ended


def _ending(scheduler: Scheduler, slot: int, token: int) -> _Ended:
    """Whether the sequence in `slot`, whose last token is `token`, ends with it."""
    c = scheduler.columns
    sequence = scheduler.at(slot)
    output_tokens = int(c.known[slot]) - sequence.prompt_tokens
    if token in sequence.request.rules.stop_ids and output_tokens > sequence.request.sampling.min_tokens:
        return [(sequence, FinishReason.STOP, token)]
    if c.known[slot] >= c.limit[slot]:
        return [(sequence, FinishReason.LENGTH, None)]
    return []


def _accept_drafts(scheduler: Scheduler, plan: StepPlan, row: int, result: StepResult) -> _Ended:
    """A draft row: keep the accepted tokens up to a stop, forget the positions behind them."""
    c, out = scheduler.columns, scheduler.outputs
    slot = int(plan.slots[row])
    sequence = scheduler.at(slot)
    start, accepted = int(plan.starts[row]), int(result.counts[row])
    logprobs = result.logprobs.get(row)
    ended: _Ended = []
    kept = 0
    for i in range(accepted):
        token = int(result.tokens[row, i])
        c.tokens[slot, c.known[slot]] = token
        c.known[slot] += 1
        if logprobs is not None:
            out.logprobs[len(out.handles)] = Logprobs(
                logprobs.ids[i : i + 1], logprobs.values[i : i + 1], logprobs.ranks[i : i + 1]
            )
        out.handles.append(int(c.handle[slot]))
        out.tokens.append(token)
        kept += 1
        ended = _ending(scheduler, slot, token)
        if ended:
            break
    scheduler.accepted_tokens += max(0, kept - 1)
    c.drafting[slot] = False
    assert sequence.lease is not None
    frontier = scheduler.cache.rollback(sequence.lease, start + kept, last_step=plan.step)
    c.scheduled[slot] = c.computed[slot] = frontier  # before start + kept where a state must be computed again
    c.capacity[slot] = sequence.lease.capacity_tokens
    return ended


def _fail_rows(scheduler: Scheduler, rows: Int64s, slots: Int64s, result: StepResult) -> None:
    for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
        if row in result.failed:
            scheduler.finish(scheduler.at(slot), FinishReason.ERROR, error=result.failed[row], keep=False)


def _take_prompt_logprobs(scheduler: Scheduler, plan: StepPlan, result: StepResult) -> None:
    for row, logprobs in result.prompt_logprobs.items():
        sequence = scheduler.sequence(int(plan.handles[row]))
        if sequence is None or sequence.slot < 0 or scheduler.columns.mute[sequence.slot]:
            continue
        again = sequence.prompt_logprobs_done - int(plan.starts[row])  # positions delivered before a preemption
        fresh = Logprobs(logprobs.ids[again:], logprobs.values[again:], logprobs.ranks[again:])
        sequence.prompt_logprobs_done += len(fresh.ranks)
        scheduler.outputs.prompt_logprobs.append((sequence.request.handle, fresh))


def _publish(scheduler: Scheduler, slots: Int64s) -> None:
    """Tell the cache of every row that crossed a page border."""
    c = scheduler.columns
    due = slots[c.computed[slots] >= c.commit_at[slots]]
    page = scheduler.page_tokens
    for slot in due.tolist():
        sequence = scheduler.at(slot)
        assert sequence.lease is not None
        computed = int(c.computed[slot])
        scheduler.cache.commit(sequence.lease, computed, int(c.known[slot]), int(c.last_step[slot]))
        c.commit_at[slot] = computed - computed % page + page
