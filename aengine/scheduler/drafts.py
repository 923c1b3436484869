"""Draft tokens: guesses of sequences' next tokens, verified by the model in one step.

Owns: the `Drafter` protocol and `PromptLookup`, which guesses that a text goes on as it did before and decides when
that is worth a step's time.
Does not know: pages, plans, devices.
Invariants: drafting never changes a request's tokens: noise is keyed by position, so a draft is accepted exactly when
it equals what would have been sampled. The same calls give the same drafts.

    rows -> copies followed -> chance of each further token | costs of steps -> how many drafts, and whose
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from aengine.scheduler.copies import Copies, Odds, predicted
from aengine.scheduler.step_costs import StepCosts
from aengine.types import Int32s, StepPlan, StepResult

ROWS_MAX = 32  # with more rows steps are bound by arithmetic, and looking at each costs more than it can give
WAIT_GAIN = 1.15  # to be waited for, drafts must promise so many times the tokens a second: what the host does in
# between takes time from others, too, which nothing measures
GAIN = 1.05  # the same of drafts that need no waiting: estimates err
CHANCE_MIN = 0.5  # of a draft, while nothing is known of what steps cost
CHANCE_LEAST = 0.05  # no draft is worth less


class DraftRow(NamedTuple):
    """A running row: its request, the ids known of it (int32 [known], a view), how many tokens of it are in flight,
    and how many drafts may follow behind those."""

    slot: int
    handle: int
    ids: Int32s
    unknown: int
    most: int


class Drafter(Protocol):
    rows_max: int
    """While more rows run, nobody asks."""

    def waits(self, rows: Sequence[DraftRow], others: int) -> bool:
        """Whether the next step should wait until all tokens of `rows`, still in flight, are known, so that it can
        bring drafts. `others`: rows that bring none. Not asked while prompts are computed."""
        ...

    def propose(self, rows: Sequence[DraftRow], others: int, room: int) -> Sequence[Int32s]:
        """For each row, of which no token is in flight, its drafts: at most `most`; at most `room` in all."""
        ...

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """A step has retired."""
        ...


class PromptLookup:
    """Prompt lookup decoding (Saxena, 2023) that follows its copies: at most `most_tokens` drafts a row and step.

    Every row has a place in its own text that it seems to repeat; how often such a place was right, given for how long
    it has been right, is the chance of each draft. What a step of so many positions takes is learnt from results.
    The drafts chosen are those that give most tokens a second; a step waits for them only if that pays for the time
    that the device then stands idle, too. `recomputes`: what was accepted before a wrong draft is computed once more.
    """

    def __init__(self, most_tokens: int, *, recomputes: bool = False, rows_max: int = ROWS_MAX) -> None:
        self.rows_max = rows_max
        self._recomputes = recomputes
        self.costs = StepCosts()
        self._most_tokens = most_tokens
        self._odds = Odds()
        self._copies = Copies(self._odds)
        self._waited = False  # the step that is planned next waits for the one in flight
        self._after_wait = False  # the step to retire next was planned so

    def waits(self, rows: Sequence[DraftRow], others: int) -> bool:
        """The tokens in flight have to be as predicted before drafts can follow them."""
        chances = [self._chances(row) for row in rows]
        room = len(rows) * self._most_tokens
        self._waited = bool(self._choose(chances, len(rows) + others, room, self.costs.wait_s, WAIT_GAIN))
        return self._waited

    def propose(self, rows: Sequence[DraftRow], others: int, room: int) -> Sequence[Int32s]:
        chances = [self._chances(row) for row in rows]
        chosen = self._choose(chances, len(rows) + others, room, 0.0, GAIN)
        counts = [0] * len(rows)
        for row in chosen:
            counts[row] += 1
        return [
            predicted(row.ids, self._copies.of(row.slot).source, count) for row, count in zip(rows, counts, strict=True)
        ]

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        self.costs.observe(plan, result, waited=self._after_wait)
        self._after_wait = self._waited or bool((plan.samples > 1).any())
        self._waited = False

    def _chances(self, row: DraftRow) -> list[float]:
        """For the first, second, … draft, how likely it and all before it are right; falling."""
        copy = self._copies.follow(row.slot, row.handle, row.ids)
        if copy.source < 0:
            return []
        most = row.unknown + min(row.most, self._most_tokens)
        return self._odds.chain(copy, most, CHANCE_LEAST)[row.unknown :]

    def _choose(self, chances: Sequence[list[float]], rows: int, room: int, wait_s: float, gain: float) -> list[int]:
        """The rows, once for each draft that they should bring: the most likely drafts, as many as pay."""
        listed = [(chance, -row) for row, own in enumerate(chances) for chance in own]
        falling = sorted(listed, reverse=True)[:room]
        if not self.costs.known:
            return [-row for chance, row in falling if chance >= CHANCE_MIN]
        plain_s = self.costs.step_s(rows)
        best, best_rate, tokens = 0, gain * rows / plain_s, float(rows)
        for count, (chance, _) in enumerate(falling, start=1):
            tokens += chance
            step_s = self.costs.step_s(rows + count)
            again_s = (1 - chance) * (step_s - plain_s) if self._recomputes else 0.0
            rate = tokens / (step_s + wait_s + again_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return [-row for _, row in falling[:best]]
