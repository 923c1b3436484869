"""How many prompt tokens a step may take beside rows that decode, so that the step ends in time.

Owns: `Pacer`: a model of what a step costs, fitted to measured steps, and the budget it gives.
Does not know: clocks (it is told what steps took), rows, pages, requests.
Invariants: the same calls give the same budgets; a budget is whole pages and at least one; prompts always get a share
of the time, however slow decode rows alone are. Tokens do not depend on budgets.

    seconds = step + row * decode rows + token * prompt tokens

The three costs are one estimate (a Kalman filter), to which every step adds what it shows: while prompts come without
a pause there are no steps of decode rows alone, and yet their number changes. Steps of equal sizes, one behind the
other, show the same of the same three numbers, so until somebody asks they are one observation, of their mean: rows
that decode step after step cost the loop no update a step.
"""

from __future__ import annotations

import math

from aengine.types import StepPlan

DOUBT = 8.0, 2.0, 2.0  # how wrong the first guess may be, that a step, a row and a token cost the same
NOISE = 0.1  # of a step's time that differs from step to step
DRIFT = 0.02, 0.02, 0.05  # of each cost by which it changes a step: a token's moves with the context's length
DRIFT_MAX = 0.3  # of each cost, beyond which what was learnt of it long ago is doubted no more
LEAST = 0.1  # of a step's time; a cost may drift by DRIFT of this at least, or none would rise from zero again
OUTLIER = 3.0  # a step counts as at most so many times what was expected: others use the machine too
SHARE = 0.25  # of the time of decode rows that prompts get at least
RUN = 16  # equal steps that are learnt from at once, at most
PROBE_PAGES = 4  # the budget while nothing is known of prompt tokens, and the least while nothing is of decode rows
SECONDS_MIN = 1e-6  # no device is faster, and no cost may vanish


class Pacer:
    """`target_s`: what a step with decode rows should take at most; `page_tokens`: the grain of budgets."""

    def __init__(self, target_s: float, page_tokens: int) -> None:
        self.target_s = target_s
        self._page = page_tokens
        self._costs = [0.0, 0.0, 0.0]  # of a step, a row, a token
        self._spread: list[list[float]] = []  # their covariance
        self._rows_seen = self._tokens_seen = False
        self._sizes = (1, 0, 0)  # of the steps that are not learnt from yet
        self._run: list[float] = []  # their seconds
        self._most_s = 0.0  # what one of them counts as, at most

    def observe(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step with `decodes` decode positions and `prompt_tokens` others took `seconds`."""
        if seconds <= 0.0 or not (decodes or prompt_tokens):  # not measured, or nothing that is paced
            return
        sizes = (1, decodes, prompt_tokens)
        if len(self._run) in (0, RUN) or sizes != self._sizes:
            self._learn_run()
            self._begin_run(sizes, max(seconds, SECONDS_MIN))
        self._run.append(min(max(seconds, SECONDS_MIN), self._most_s))

    def _begin_run(self, sizes: tuple[int, int, int], seconds: float) -> None:
        _, decodes, prompt_tokens = self._sizes = sizes
        self._most_s = math.inf
        if not self._spread:
            unit = seconds / sum(sizes)
            self._costs = [unit] * 3
            self._spread = [[(DOUBT[i] * unit) ** 2 if i == j else 0.0 for j in range(3)] for i in range(3)]
        elif (self._rows_seen or not decodes) and (self._tokens_seen or not prompt_tokens):
            self._most_s = max(OUTLIER * self._expected(sizes), SECONDS_MIN)
        self._rows_seen |= decodes > 0
        self._tokens_seen |= prompt_tokens > 0

    def _learn_run(self) -> None:
        if self._run:
            steps, self._run = self._run, []
            self._drift(sum(steps) / len(steps), len(steps))
            self._learn(sum(steps) / len(steps), len(steps))

    def _expected(self, sizes: tuple[int, int, int]) -> float:
        return sum(cost * size for cost, size in zip(self._costs, sizes, strict=True))

    def _drift(self, seconds: float, steps: int) -> None:
        """Costs that the steps show may have changed since the last."""
        for i, (cost, size) in enumerate(zip(self._costs, self._sizes, strict=True)):
            if size:
                unit = max(cost, LEAST * seconds / size)
                most = (DRIFT_MAX * unit) ** 2
                if self._spread[i][i] < most:
                    self._spread[i][i] = min(self._spread[i][i] + steps * (DRIFT[i] * unit) ** 2, most)

    def _learn(self, seconds: float, steps: int) -> None:
        sizes, spread = self._sizes, self._spread
        toward = [sum(a * size for a, size in zip(row, sizes, strict=True)) for row in spread]
        total = sum(a * size for a, size in zip(toward, sizes, strict=True)) + (NOISE * seconds) ** 2 / steps
        off = (seconds - self._expected(sizes)) / total
        self._costs = [max(cost + off * a, 0.0) for cost, a in zip(self._costs, toward, strict=True)]
        self._spread = [[spread[i][j] - toward[i] * toward[j] / total for j in range(3)] for i in range(3)]

    @property
    def token_s(self) -> float:
        """Seconds that one prompt token adds to a step; 0.0 while unknown."""
        self._learn_run()
        return self._costs[2] if self._tokens_seen else 0.0

    def decode_s(self, decodes: int) -> float:
        """Seconds of a step of so many decode rows alone; 0.0 while unknown."""
        self._learn_run()
        return self._expected((1, decodes, 0)) if self._rows_seen else 0.0

    def prompt_tokens(self, decodes: int) -> int | None:
        """The most prompt tokens that the next step should take beside `decodes` rows; None: as many as there are."""
        if not decodes:
            return None
        if not self._tokens_seen:
            return PROBE_PAGES * self._page
        decode_s = self.decode_s(decodes)
        room_s = max(self.target_s - decode_s, SHARE * decode_s)
        pages = int(min(room_s / max(self.token_s, SECONDS_MIN / self._page), 2.0**30)) // self._page
        return max(1 if self._rows_seen else PROBE_PAGES, pages) * self._page


def observe(pacer: Pacer, plan: StepPlan, seconds: float) -> None:
    """Tell of a retired step; not of one that computed images, whose cost is not that of tokens."""
    if any(placed.input is not None for placed in plan.media):
        return
    if plan.decodes == len(plan.slots):
        pacer.observe(plan.decodes, 0, seconds)
        return
    prompts = int(plan.counts[plan.samples < plan.counts].sum())
    pacer.observe(plan.n_tokens - prompts, prompts, seconds)
