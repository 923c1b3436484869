"""Why the device was idle.

Owns: `DeviceClock`: busy seconds, and idle seconds by cause, from the times of steps.
Does not know: what measured those times.
Invariants: steps are told in the order in which the device ran them. Busy and idle time add up to the time between the
beginning of the first step and the end of the last, but for gaps beside failed steps, whose times nobody knows. All
times are seconds of one clock.

    step N ended     result arrived           step N + 1 launched    began
        |--- copy ---------|------- host --------------|---- copy ----|      the loop waited for N
        |------------------ host ----------------------|---- copy ----|      it did not
        |------- no_work ------| woken  |---- host ----|---- copy ----|      nothing could run
        |------- decide -------| chosen |---- host ----|---- copy ----|      N had rows that waited for masks
"""

from __future__ import annotations

import msgspec

from aengine.timeline.names import CAUSES, COPY, DEVICE, IDLE
from aengine.timeline.ring import Ring

_NO_WORK, _HOST, _COPY, _DECIDE = range(len(CAUSES))


class StepTimes(msgspec.Struct, frozen=True):
    """`busy_s`: what the device computed between `began_s` and `ended_s`. `launched_s`: when the host had launched the
    step; `arrived_s`: when it had the result; `chosen_s`: when its masks were there, 0.0 where it needed none;
    `waited`: whether the host had the result of the step before when it launched this one."""

    step: int
    launched_s: float
    began_s: float
    ended_s: float
    arrived_s: float
    busy_s: float
    chosen_s: float = 0.0
    waited: bool = True


class DeviceClock:
    def __init__(self, ring: Ring) -> None:
        self.busy_s = 0.0
        self._idle_s = [0.0] * len(CAUSES)
        self._ring = ring
        self._last: StepTimes | None = None
        self._woken_s = 0.0
        self._waiting = False

    def wait(self) -> None:
        """Nothing is in flight and nothing can run."""
        self._waiting = True

    def wake(self, at_s: float) -> None:
        """Something may run again."""
        self._waiting, self._woken_s = False, at_s

    def forget(self) -> None:
        """A step failed: when it ended is unknown."""
        self._last = None

    def step(self, times: StepTimes) -> None:
        last, self._last = self._last, times
        self.busy_s += times.busy_s
        self._ring.add(DEVICE, times.began_s, times.ended_s, times.step)
        self._ring.add(COPY, times.ended_s, max(times.ended_s, times.arrived_s), times.step)
        if last is not None:
            self._gap(last, times)
        if times.chosen_s:
            self._idle_s[_DECIDE] += max(0.0, times.ended_s - times.began_s - times.busy_s)

    def _gap(self, last: StepTimes, times: StepTimes) -> None:
        at_s, until_s = last.ended_s, times.began_s
        if at_s < self._woken_s:
            at_s = self._idle(_NO_WORK, at_s, min(self._woken_s, until_s), times.step)
        elif at_s < last.chosen_s:
            at_s = self._idle(_DECIDE, at_s, min(last.chosen_s, until_s), times.step)
        elif times.waited:
            at_s = self._idle(_COPY, at_s, min(last.arrived_s, until_s), times.step)
        at_s = self._idle(_HOST, at_s, min(times.launched_s, until_s), times.step)
        self._idle(_COPY, at_s, until_s, times.step)

    def _idle(self, cause: int, from_s: float, to_s: float, step: int) -> float:
        """Returns where the rest begins."""
        if to_s <= from_s:
            return from_s
        self._idle_s[cause] += to_s - from_s
        self._ring.add(IDLE + cause, from_s, to_s, step)
        return to_s

    def idle_s(self, now_s: float) -> dict[str, float]:
        """By cause, the time since the last step included where nothing can run."""
        seconds = dict(zip(CAUSES, self._idle_s, strict=True))
        if self._waiting and self._last is not None:
            seconds["no_work"] += max(0.0, now_s - self._last.ended_s)
        return seconds
