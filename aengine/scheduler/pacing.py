"""How many prompt tokens a step may take beside rows that decode, so that the step ends in time.

Owns: `Pacer`: a model of what a step costs, fitted to measured steps, and the budget it gives.
Does not know: clocks (it is told what steps took), rows, pages, requests.
Invariants: the same calls give the same budgets; a budget is whole pages and at least one; prompts always get a share
of the time, however slow decode rows alone are. Tokens do not depend on budgets.

    seconds = step + row * decode rows + token * prompt tokens
"""

from __future__ import annotations

from aengine.types import StepPlan

MEMORY = 0.95  # weight of what is known when another decode-only step is measured: about twenty steps count
TOKEN_MEMORY = 0.8  # the same for steps with prompt tokens, whose cost moves with the length of the context
OUTLIER = 3.0  # a step counts as at most so many times what was expected: others use the machine too
SHARE = 0.25  # of the time of decode rows that prompts get at least
PROBE_PAGES = 4  # the budget while nothing is known of prompt tokens, and the least while nothing is of decode rows
LEAST_PART = 0.05  # of a step's time that its prompt tokens are taken to cost at least: nothing is free
SECONDS_MIN = 1e-6  # no device is faster, and no cost may vanish
SPREAD_MIN = 0.25  # variance of row counts (rows squared) below which they say nothing about the cost of a row


class Pacer:
    """`target_s`: what a step with decode rows should take at most; `page_tokens`: the grain of budgets."""

    def __init__(self, target_s: float, page_tokens: int) -> None:
        self.target_s = target_s
        self._page = page_tokens
        # Decode-only steps: weight, and weighted means, of rows and seconds; and their second moments.
        self._steps = 0.0
        self._rows = self._seconds = 0.0
        self._rows_rows = self._rows_seconds = 0.0
        # Steps with prompt tokens: decayed sums.
        self._tokens = self._tokens_seconds = 0.0

    def observe(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step with `decodes` decode positions and `prompt_tokens` others took `seconds`."""
        if seconds <= 0.0:  # not measured
            return
        seconds = max(seconds, SECONDS_MIN)
        if prompt_tokens:
            self._observe_prompt(prompt_tokens, seconds, self.decode_s(decodes))
        elif decodes:
            self._observe_decodes(decodes, seconds)

    def _observe_decodes(self, decodes: int, seconds: float) -> None:
        if self._steps:
            seconds = min(seconds, OUTLIER * self.decode_s(decodes))
        self._steps = MEMORY * self._steps + 1.0
        gain = 1.0 / self._steps
        rows_off, seconds_off = decodes - self._rows, seconds - self._seconds
        self._rows += gain * rows_off
        self._seconds += gain * seconds_off
        self._rows_rows += gain * ((1.0 - gain) * rows_off * rows_off - self._rows_rows)
        self._rows_seconds += gain * ((1.0 - gain) * rows_off * seconds_off - self._rows_seconds)

    def _observe_prompt(self, tokens: int, seconds: float, decode_s: float) -> None:
        spent = max(seconds - decode_s, LEAST_PART * seconds)
        if self._tokens:
            spent = min(spent, OUTLIER * self.token_s * tokens)
        self._tokens = TOKEN_MEMORY * self._tokens + tokens
        self._tokens_seconds = TOKEN_MEMORY * self._tokens_seconds + spent

    @property
    def token_s(self) -> float:
        """Seconds that one prompt token adds to a step; 0.0 while unknown."""
        return self._tokens_seconds / self._tokens if self._tokens else 0.0

    def decode_s(self, decodes: int) -> float:
        """Seconds of a step of so many decode rows alone; 0.0 while unknown."""
        if not self._steps:
            return 0.0
        row_s = 0.0
        if self._rows_rows > SPREAD_MIN:
            row_s = min(max(self._rows_seconds / self._rows_rows, 0.0), self._seconds / self._rows)
        return max(self._seconds + row_s * (decodes - self._rows), 0.0)

    def prompt_tokens(self, decodes: int) -> int | None:
        """The most prompt tokens that the next step should take beside `decodes` rows; None: as many as there are."""
        if not decodes:
            return None
        if not self._tokens:
            return PROBE_PAGES * self._page
        decode_s = self.decode_s(decodes)
        room_s = max(self.target_s - decode_s, SHARE * decode_s)
        pages = int(min(room_s / self.token_s, 2.0**30)) // self._page
        return max(1 if self._steps else PROBE_PAGES, pages) * self._page


def observe(pacer: Pacer, plan: StepPlan, seconds: float) -> None:
    """Tell of a retired step; not of one that computed images, whose cost is not that of tokens."""
    if any(placed.input is not None for placed in plan.media):
        return
    prompts = int(plan.counts[plan.samples < plan.counts].sum())
    pacer.observe(plan.n_tokens - prompts, prompts, seconds)
