"""What a step of so many positions takes, as measured.

Owns: `StepCosts`: seconds on the device by number of positions, and the seconds that it stands idle when a step waits
for the one before it.
Does not know: clocks (it is told when steps began and ended), rows, why somebody asks.
Invariants: the same calls give the same answers. A step is a level, how fast the machine is now, times a ratio, how
its size compares with others; the level follows quickly, ratios slowly. A size seen a few times only takes no longer
than a greater one: what seems so was disturbed. Sizes never seen lie between those seen, a little lower, so they are
tried.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from aengine.types import StepPlan, StepResult

SIZES: tuple[int, ...] = (*range(1, 17), 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 1024, 2048)
LEVEL_RATE = 0.2  # of a deviation that the level takes up
RATIO_RATE = 0.04  # of it that the ratio does, once it rests on some measurements
OUTLIER = 3.0  # a step counts as at most so many times what was expected: others use the machine too
WAIT_RATE = 0.1
CURIOSITY = 0.9  # of what a size never seen should take, going by those around it
YOUNG = 5  # measurements up to which a size may have been disturbed every time
HOPE = 0.5  # beyond all sizes seen a position costs this part of an average one: it is tried, and then known


class StepCosts:
    def __init__(self) -> None:
        self._level = 0.0
        self._ratios: dict[int, float] = {}  # by index of SIZES
        self._least: dict[int, float] = {}  # likewise; where it is young, of it and all greater ones
        self._counts: dict[int, int] = {}
        self._known: list[int] = []  # the indices, rising
        self._idle_s = [0.0, 0.0]  # before steps that were launched behind another, and before those that waited
        self._before: StepPlan | None = None
        self._ended_s = 0.0

    @property
    def known(self) -> bool:
        return bool(self._known)

    @property
    def wait_s(self) -> float:
        """Seconds that a step's waiting for the one before it adds."""
        return max(0.0, self._idle_s[1] - self._idle_s[0])

    def observe(self, plan: StepPlan, result: StepResult, *, waited: bool) -> None:
        """A step has retired; `waited`: it was planned when the one before it had retired. Those that did more than
        compute positions are passed over."""
        positions = plan.n_tokens
        if result.device_s > 0.0 and positions and not plan.media and not plan.moves and not plan.prompt_logprobs:
            self._learn(positions, result.device_s)
        before, self._before = self._before, plan
        if before is not None and _follows(plan, before):
            seconds = min(max(result.began_s - self._ended_s, 0.0), self._level)
            self._idle_s[waited] += WAIT_RATE * (seconds - self._idle_s[waited])
        self._ended_s = result.ended_s

    def _learn(self, positions: int, seconds: float) -> None:
        index = _index(positions)
        seconds *= SIZES[index] / positions
        if not self._known:
            self._level = seconds
        if index not in self._ratios:
            self._ratios[index] = seconds / self._level
            self._counts[index] = 1
            self._known.insert(bisect_left(self._known, index), index)
        else:
            self._counts[index] += 1
            off = seconds / (self._level * self._ratios[index])
            off = min(max(off, 1 / OUTLIER), OUTLIER)
            self._level *= math.pow(off, LEVEL_RATE)
            self._ratios[index] *= math.pow(off, max(RATIO_RATE, (1 - LEVEL_RATE) / self._counts[index]))
        least = math.inf
        for known in reversed(self._known):
            least = min(least, self._ratios[known])
            self._least[known] = least if self._counts[known] <= YOUNG else self._ratios[known]

    def step_s(self, positions: int) -> float:
        """Seconds on the device of a step of so many positions; only when something is `known`."""
        index = _index(positions)
        ratio = self._least.get(index)
        if ratio is not None:
            return self._level * ratio * positions / SIZES[index]
        after = bisect_left(self._known, index)
        if after == 0:  # smaller than all seen: a step's own cost is not known, so it may be all
            first = self._known[0]
            return self._level * self._least[first] * (1 - HOPE * (1 - positions / SIZES[first]))
        low = self._known[after - 1]
        at, low_ratio = SIZES[low], self._least[low]
        if after == len(self._known):
            return self._level * low_ratio * (1 + HOPE * (positions - at) / at)
        high = self._known[after]
        slope = (self._least[high] - low_ratio) / (SIZES[high] - at)
        return self._level * max(low_ratio, CURIOSITY * (low_ratio + slope * (positions - at)))


def _follows(plan: StepPlan, before: StepPlan) -> bool:
    """Whether the device had work all the time in between: a row of both says so."""
    return plan.step == before.step + 1 and len(before.handles) > 0 and bool(before.handles[-1] in plan.handles)


def _index(positions: int) -> int:
    """Of the nearest size."""
    index = min(bisect_left(SIZES, positions), len(SIZES) - 1)
    if index and positions - SIZES[index - 1] < SIZES[index] - positions:
        index -= 1
    return index
