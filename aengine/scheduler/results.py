"""What a retired step means for its rows.

Owns: appending sampled tokens, finding stops, publishing what was computed, gathering outputs.
Does not know: how rows are chosen.
Invariants: rows of sequences that ended meanwhile (zombies) and of muted ones change nothing but the zombie count; the
common case, one token a row, costs a fixed number of NumPy calls plus Python only for rows that stop or cross a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from aengine.scheduler.steady import SteadyRows
from aengine.scheduler.structured import Ending, advance
from aengine.types import (
    NO_HANDLES,
    NO_TOKENS,
    Admitted,
    Bools,
    Finish,
    FinishReason,
    Int32s,
    Int64s,
    Logprobs,
    StepOutputs,
    StepPlan,
    StepResult,
)

if TYPE_CHECKING:
    from aengine.scheduler.scheduler import Scheduler
    from aengine.scheduler.sequence import Sequence


_Column = TypeVar("_Column", Int32s, Int64s)


FEW_ROWS = 4  # that Python goes through in less time than a dozen NumPy calls take


class OutputBuilder:
    """Gathers what one StepOutputs will say."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._handles: list[Int64s] = []
        self._tokens: list[Int32s] = []
        self._count = 0
        self.logprobs: dict[int, Logprobs] = {}
        self.prompt_logprobs: list[tuple[int, Logprobs]] = []
        self._admitted: list[Admitted] = []
        self._finished: list[Finish] = []

    def admitted(self, handle: int, cached_tokens: int) -> None:
        self._admitted.append(Admitted(handle, cached_tokens))

    def finished(self, handle: int, reason: FinishReason, stop_id: int | None, error: str | None) -> None:
        self._finished.append(Finish(handle, reason, stop_id, error))

    def sampled(self, handles: Int64s, tokens: Int32s) -> int:
        """One token each for `handles`; returns the index of the first among all tokens so far."""
        first = self._count
        self._handles.append(handles)
        self._tokens.append(tokens)
        self._count += len(handles)
        return first

    def take(self, step: int) -> StepOutputs:
        outputs = StepOutputs(
            step,
            _joined(self._handles, NO_HANDLES),
            _joined(self._tokens, NO_TOKENS),
            self.logprobs,
            self.prompt_logprobs,
            self._admitted,
            self._finished,
        )
        self._clear()
        return outputs


def _joined(parts: list[_Column], nothing: _Column) -> _Column:
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else nothing


def commit_rows(scheduler: Scheduler, plan: StepPlan, result: StepResult) -> None:
    c = scheduler.columns
    steady = c.steady
    if steady is not None and plan.step >= steady.since and not result.failed:
        ended = _commit_steady(scheduler, steady, plan, result)
        for sequence, reason, stop_id, error in ended:
            scheduler.finish(sequence, reason, stop_id=stop_id, error=error)
        return
    live = live_rows(scheduler, plan)
    alive = int(np.count_nonzero(live))
    plain = not result.failed and not np.count_nonzero(c.mute) and not _settled(scheduler, plan)
    if plan.decodes == alive == len(live) and plain:
        ended = _commit_decodes(scheduler, plan, result)
    elif plain and alive == len(live) <= FEW_ROWS and not plan.prompt_logprobs and min(plan.samples.tolist()) > 1:
        ended = _commit_drafts(scheduler, plan, result)
    else:
        ended = _commit_some(scheduler, plan, result, live)
    for sequence, reason, stop_id, error in ended:
        scheduler.finish(sequence, reason, stop_id=stop_id, error=error)


def _settled(scheduler: Scheduler, plan: StepPlan) -> bool:
    """Whether a row's sample was known before it was made."""
    return bool(len(plan.deferred)) and bool((scheduler.columns.settled[plan.slots] == plan.step).any())


def _commit_decodes(scheduler: Scheduler, plan: StepPlan, result: StepResult) -> list[Ending]:
    """The common case: every row has one new token, and somebody to hear of it. It computed its last known position."""
    c, slots = scheduler.columns, plan.slots
    computed = plan.starts + 1
    c.computed[slots] = computed
    ended = _append_tokens(scheduler, slots, computed, plan.handles, result.tokens[:, 0], result.logprobs)
    _publish_due(scheduler, slots, plan.starts, computed)
    return ended


def _commit_steady(scheduler: Scheduler, steady: SteadyRows, plan: StepPlan, result: StepResult) -> list[Ending]:
    """The same for rows that go on from step to step."""
    tokens = result.tokens[:, 0]
    _hear(scheduler, plan.handles, tokens, result.logprobs)
    ended: list[Ending] = []
    for i in steady.append(plan, tokens).tolist():
        ended += _ending(scheduler, int(plan.slots[i]), int(tokens[i]))
    if len(plan.deferred):
        ended = _with_grammars(ended, advance(scheduler, plan.slots, tokens))
    lane = steady.lane(plan.step + 1)
    if lane is None or not lane.commit(scheduler):
        _publish_due(scheduler, plan.slots, plan.starts, plan.starts + 1)
    return ended


def _commit_drafts(scheduler: Scheduler, plan: StepPlan, result: StepResult) -> list[Ending]:
    """Few rows, each with drafts: the device waits for this, and NumPy calls would take longer than what they do."""
    ended: list[Ending] = []
    for row in range(len(plan.slots)):
        ended += _accept_drafts(scheduler, plan, row, result)
    _publish_due(scheduler, plan.slots, plan.starts, scheduler.columns.computed[plan.slots])
    return ended


def _commit_some(scheduler: Scheduler, plan: StepPlan, result: StepResult, live: Bools) -> list[Ending]:
    c = scheduler.columns
    sampled = plan.samples > 0
    scheduler.zombie_rows += int(np.count_nonzero(~live & sampled))
    rows = np.flatnonzero(live)
    slots = plan.slots[rows]
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
    one = (plan.samples[rows] == 1) & (c.settled[slots] != plan.step)
    told = rows[one]
    logprobs = {i: result.logprobs[row] for i, row in enumerate(told.tolist()) if row in result.logprobs}
    slots_one = slots[one]
    tokens = result.tokens[told, 0]
    ended = _append_tokens(scheduler, slots_one, c.known[slots_one], plan.handles[told], tokens, logprobs)
    if not plain.all():
        for row in rows[~plain].tolist():
            ended += _accept_drafts(scheduler, plan, row, result)
    _publish_due(scheduler, slots, plan.starts[rows], c.computed[slots])
    return ended


def live_rows(scheduler: Scheduler, plan: StepPlan) -> Bools:
    """Rows whose slot still belongs to the request the step was planned for; the others are zombies."""
    live: Bools = scheduler.columns.handle[plan.slots] == plan.handles
    return live


def _append_tokens(
    scheduler: Scheduler,
    slots: Int64s,
    known: Int32s,
    handles: Int64s,
    tokens: Int32s,
    logprobs: Mapping[int, Logprobs],
) -> list[Ending]:
    """One new token for each of `slots`, which know known[i] of them; `logprobs` by index into these."""
    _hear(scheduler, handles, tokens, logprobs)
    ended: list[Ending] = []
    for i in scheduler.columns.append(slots, known, tokens).tolist():
        ended += _ending(scheduler, int(slots[i]), int(tokens[i]))
    if np.count_nonzero(scheduler.columns.structured):
        ended = _with_grammars(ended, advance(scheduler, slots, tokens))
    return ended


def _hear(scheduler: Scheduler, handles: Int64s, tokens: Int32s, logprobs: Mapping[int, Logprobs]) -> None:
    out = scheduler.outputs
    first = out.sampled(handles, tokens)
    for i, values in logprobs.items():
        out.logprobs[first + i] = values


def _with_grammars(ended: list[Ending], by_grammar: list[Ending]) -> list[Ending]:
    """A sequence ends once. A stop token comes first, then what its grammar says, then its length."""
    stopped = [ending for ending in ended if ending[1] is FinishReason.STOP]
    taken = {ending[0] for ending in stopped}
    ruled = [ending for ending in by_grammar if ending[0] not in taken]
    taken |= {ending[0] for ending in ruled}
    return [*stopped, *ruled, *(ending for ending in ended if ending[0] not in taken)]


def _ending(scheduler: Scheduler, slot: int, token: int) -> list[Ending]:
    """Whether the sequence in `slot`, whose last token is `token`, ends with it."""
    return _ending_at(scheduler.at(slot), scheduler.columns.known.item(slot), scheduler.columns.limit.item(slot), token)


def _ending_at(sequence: Sequence, known: int, limit: int, token: int) -> list[Ending]:
    """Whether it ends with `token`, the last of `known`."""
    request = sequence.request
    if token in request.rules.stop_ids and known - sequence.prompt_tokens > request.sampling.min_tokens:
        return [(sequence, FinishReason.STOP, token, None)]
    if known >= limit:
        return [(sequence, FinishReason.LENGTH, None, None)]
    return []


def _accept_drafts(scheduler: Scheduler, plan: StepPlan, row: int, result: StepResult) -> list[Ending]:
    """A draft row: keep the accepted tokens up to a stop, forget the positions behind them."""
    c, out = scheduler.columns, scheduler.outputs
    slot, start, accepted = plan.slots.item(row), plan.starts.item(row), result.counts.item(row)
    sequence = scheduler.at(slot)
    known, limit = c.known.item(slot), c.limit.item(slot)
    logprobs = result.logprobs.get(row)
    ended: list[Ending] = []
    kept = 0
    for token in result.tokens[row, :accepted].tolist():
        kept += 1
        ended = _ending_at(sequence, known + kept, limit, token)
        if ended:
            break
    tokens = result.tokens[row, :kept]
    c.tokens[slot, known : known + kept] = tokens
    c.known[slot] = c.expected[slot] = known + kept
    first = out.sampled(plan.handles[row : row + 1].repeat(kept), tokens)
    if logprobs is not None:
        for i in range(kept):
            one = slice(i, i + 1)
            out.logprobs[first + i] = Logprobs(logprobs.ids[one], logprobs.values[one], logprobs.ranks[one])
    scheduler.drafts.retired(max(0, min(kept, accepted - 1)))
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


def _publish_due(scheduler: Scheduler, slots: Int64s, starts: Int32s, computed: Int32s) -> None:
    """Tell the cache of the rows that it wants to hear of: those that have crossed a page border since `starts`."""
    every = scheduler.cache.commit_tokens
    if every:
        due = (computed // every > starts // every).nonzero()[0]
        if len(due):
            _publish(scheduler, slots[due], computed[due])


def _publish(scheduler: Scheduler, slots: Int64s, computed: Int32s) -> None:
    c, cache, leases = scheduler.columns, scheduler.cache, scheduler.leases(slots)
    if cache.commits_rows:
        full = computed // c.page
        cache.commit_rows(leases, full.tolist(), c.pages.take(c.first_page[slots] + (full - 1), 0))
        return
    columns = zip(leases, computed.tolist(), c.known[slots].tolist(), c.last_step[slots].tolist(), strict=True)
    for lease, upto, known, last_step in columns:
        cache.commit(lease, upto, known, last_step)
