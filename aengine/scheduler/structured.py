"""Sequences whose output a grammar rules.

Owns: moving their matchers along with the tokens, taking over tokens that the grammar forces, telling which rows need a
mask.
Does not know: what masks are made of, how rows are chosen.
Invariants: a matcher accepts a token when the sequence learns it, never before. Forced tokens become known at once and
are computed as a chunk; the sample that was already in flight for the first of them is settled: nobody hears of it. No
tokens are taken over where their log-probabilities are wanted, or where sampling must see each of them (penalties, or
because it might refuse one: allowed tokens); nor is a stop token, or what comes behind it.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

import numpy as np

from aengine.scheduler.matcher import Matcher
from aengine.types import FinishReason, Int32s, Int64s, StepPlan

if TYPE_CHECKING:
    from aengine.scheduler.scheduler import Scheduler
    from aengine.scheduler.sequence import Sequence

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
        matcher.accept(token)
        endings += _ending(sequence, matcher)
    return endings


def _ending(sequence: Sequence, matcher: Matcher) -> list[Ending]:
    if matcher.error is not None:
        return [(sequence, FinishReason.ERROR, None, matcher.error)]
    return [(sequence, FinishReason.STOP, None, None)] if matcher.ended else []


def broken_rows(scheduler: Scheduler, plan: StepPlan) -> dict[int, str]:
    """Deferred rows whose mask could not be made, and why."""
    broken = {}
    for row, handle in zip(plan.deferred.tolist(), plan.handles[plan.deferred].tolist(), strict=True):
        sequence = scheduler.sequence(handle)
        if sequence is not None and sequence.matcher is not None and sequence.matcher.error is not None:
            broken[row] = sequence.matcher.error
    return broken


def decide_rows(scheduler: Scheduler, plan: StepPlan) -> tuple[Int64s, list[Matcher]]:
    """Rows of `plan`, the only step in flight, that need a mask, and their matchers."""
    c = scheduler.columns
    rows: list[int] = []
    matchers: list[Matcher] = []
    slots = plan.slots[plan.deferred]
    heard = (c.handle[slots] == plan.handles[plan.deferred]) & ~c.mute[slots]
    for row, slot in zip(plan.deferred[heard].tolist(), slots[heard].tolist(), strict=True):
        sequence = scheduler.at(slot)
        assert sequence.matcher is not None
        if not _jump(scheduler, plan.step, sequence, sequence.matcher):
            rows.append(row)
            matchers.append(sequence.matcher)
    return np.array(rows, np.int64), matchers


def _jump(scheduler: Scheduler, step: int, sequence: Sequence, matcher: Matcher) -> bool:
    """Take over the tokens that must come next; False when there are none."""
    sampling = sequence.request.sampling
    if sampling.logprobs is not None or sampling.needs_history or sampling.allowed_token_ids is not None:
        return False
    forced = matcher.forced()
    if not forced:
        return False
    c, slot = scheduler.columns, sequence.slot
    forced = _before_stop(sequence, forced[: int(c.limit[slot] - c.known[slot])])
    if not forced:
        return False
    ending: list[Ending] = []
    for taken, token in enumerate(forced, start=1):
        matcher.accept(token)
        ending = _ending(sequence, matcher)
        if ending:
            forced = forced[:taken]
            break
    known = int(c.known[slot])
    tokens = np.array(forced, np.int32)
    c.tokens[slot, known : known + len(tokens)] = tokens
    c.known[slot] = c.expected[slot] = known + len(tokens)
    c.disturb()  # the row may have more than one token to compute now
    c.settled[slot] = step
    scheduler.outputs.sampled(np.full(len(tokens), c.handle[slot]), tokens)
    scheduler.forced_tokens += len(tokens)
    if not ending and c.known[slot] >= c.limit[slot]:
        ending = [(sequence, FinishReason.LENGTH, None, None)]
    for ended, reason, stop_id, error in ending:
        scheduler.finish(ended, reason, stop_id=stop_id, error=error)
    return True


def _before_stop(sequence: Sequence, forced: Tokens[int]) -> Tokens[int]:
    """The tokens before a stop token: that one is sampled, so that it ends the request, or is refused below min_tokens,
    as any other."""
    stops = sequence.request.rules.stop_ids
    return forced[: next((i for i, token in enumerate(forced) if token in stops), len(forced))]
