"""Sequences whose output a grammar rules.

Owns: moving their matchers along with the tokens, taking over tokens that the grammar forces, telling which rows need a
mask.
Does not know: what masks are made of, how rows are chosen.
Invariants: a matcher accepts a token when the sequence learns it, never before. Forced tokens become known at once and
are computed as a chunk; the sample that was already in flight for the first of them is settled: nobody hears of it. One
alone is left to that sample, which its mask decides: no step would be saved. No tokens are taken over where their
log-probabilities are wanted, or where sampling must see each of them (penalties, or because it might refuse one:
allowed tokens); nor is a stop token, or what comes behind it.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from aengine.scheduler.matcher import Matcher
from aengine.types import NO_ROWS, FinishReason, Int32s, Int64s, StepPlan

if TYPE_CHECKING:
    from aengine.scheduler.scheduler import Scheduler
    from aengine.scheduler.sequence import Sequence

WORTH_TAKING = 2  # forced tokens: the sample in flight gives one of them in the same step
Ending = tuple["Sequence", FinishReason, int | None, str | None]
"""(sequence, reason, stop token, error message)"""


def advance(scheduler: Scheduler, slots: Int64s, tokens: Int32s) -> list[Ending]:
    """One token more for each of `slots`; those that a grammar ends with it."""
    endings: list[Ending] = []
    ruled = scheduler.columns.structured[slots].nonzero()[0]
    for slot, token in zip(slots[ruled].tolist(), tokens[ruled].tolist(), strict=True):
        sequence = scheduler.at(slot)
        matcher = sequence.matcher
        assert matcher is not None
        if not matcher.accept(token):
            endings += _ending(sequence, matcher)
    return endings


def _ending(sequence: Sequence, matcher: Matcher) -> list[Ending]:
    if matcher.error is not None:
        return [(sequence, FinishReason.ERROR, None, matcher.error)]
    return [(sequence, FinishReason.STOP, None, None)] if matcher.ended else []


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Rows of `step` for which masks were asked. The first is nobody's."""

    step: int = 0
    rows: Int64s = field(default_factory=lambda: NO_ROWS)
    matchers: list[Matcher] = field(default_factory=list)

    def broken(self, plan: StepPlan) -> dict[int, str]:
        """Those whose mask could not be made, and why."""
        if self.step != plan.step:
            return {}
        faults = ((row, matcher.error) for row, matcher in zip(self.rows.tolist(), self.matchers, strict=True))
        return {row: error for row, error in faults if error is not None}


def decide_rows(scheduler: Scheduler, plan: StepPlan) -> MaskedRows:
    """Rows of `plan`, the only step in flight, that need a mask, and their matchers."""
    c, by_slot = scheduler.columns, scheduler.by_slot
    rows: list[int] = []
    matchers: list[Matcher] = []
    taking: list[tuple[int, Tokens[int]]] = []
    slots = plan.slots[plan.deferred]
    heard = (c.handle[slots] == plan.handles[plan.deferred]) & ~c.mute[slots]
    for row, slot in zip(plan.deferred[heard].tolist(), slots[heard].tolist(), strict=True):
        sequence = by_slot[slot]
        assert sequence is not None
        matcher = sequence.matcher
        assert matcher is not None
        if sequence.takes_over and (forced := _forced(scheduler, sequence, matcher)):
            taking.append((slot, forced))
        else:
            rows.append(row)
            matchers.append(matcher)
    if taking:
        _take_over(scheduler, plan.step, taking)
    return MaskedRows(plan.step, np.array(rows, np.int64), matchers)


def _forced(scheduler: Scheduler, sequence: Sequence, matcher: Matcher) -> Tokens[int]:
    """Tokens to take over, as far as the row's limit and its stop tokens let them come: those that must come next; none
    where there are too few."""
    forced = matcher.forced()
    if len(forced) < WORTH_TAKING:
        return ()
    c, slot = scheduler.columns, sequence.slot
    stops = sequence.request.rules.stop_ids
    forced = forced[: c.limit.item(slot) - c.known.item(slot)]
    # The tokens before a stop token: that one is sampled, so that it ends the request, or is refused below min_tokens.
    forced = forced[: next((i for i, token in enumerate(forced) if token in stops), len(forced))]
    return forced if len(forced) >= WORTH_TAKING else ()


def _take_over(scheduler: Scheduler, step: int, taking: list[tuple[int, Tokens[int]]]) -> None:
    """Forced tokens by slot, as if they had been sampled."""
    c, out = scheduler.columns, scheduler.outputs
    endings: list[Ending] = []
    told: list[int] = []
    slots: list[int] = []
    for slot, forced in taking:
        sequence = scheduler.at(slot)
        matcher = sequence.matcher
        assert matcher is not None
        known = c.known.item(slot)
        limit = known + len(forced) == c.limit.item(slot)
        for number, token in enumerate(forced, start=1):
            told.append(token)
            slots.append(slot)
            if not matcher.accept(token):
                endings += _ending(sequence, matcher)
                limit = False
                forced = forced[:number]
                break
        if limit:
            endings.append((sequence, FinishReason.LENGTH, None, None))
        c.tokens[slot, known : known + len(forced)] = forced
        c.known[slot] = c.expected[slot] = known + len(forced)
        c.settled[slot] = step
    c.disturb()  # these rows have more than one token to compute now
    out.sampled(c.handle[slots], np.array(told, np.int32))
    scheduler.forced_tokens += len(told)
    for sequence, reason, stop_id, error in endings:
        scheduler.finish(sequence, reason, stop_id=stop_id, error=error)
