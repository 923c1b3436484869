"""What stands still, told from outside it and by name.

Owns: `LoopWatch` (a thread that notices an event loop which does not turn), `Stalls` (steps that are overdue, running
requests that get nothing), `GcPauses`.
Does not know: what the loop, a step or a request does.
Invariants: each standstill is told once, with how long it has lasted, and counted; watching costs one comparison of
columns a second and one wake-up of a thread a second.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from aengine.engine.core import Progress
    from aengine.metrics import Metrics
    from aengine.scheduler import Scheduler

log = logging.getLogger(__name__)

BLOCKED_S = 5.0  # the event loop has not turned for so long: its stack is logged and health fails
OVERDUE_S = 20.0  # no step has ended for so long while work waits
REQUEST_STALL_S = 60.0  # a running request has had no position computed for so long while steps end
LOOK_EVERY_S = 1.0


class LoopWatch:
    """Watches the loop of the thread that makes it. `beat` is called on the loop, several times a second."""

    def __init__(self, blocked_s: float = BLOCKED_S, look_every_s: float = LOOK_EVERY_S) -> None:
        self.blocked_s = blocked_s
        self.faults = 0  # standstills that were told and not yet counted by `take_faults`
        self._look_every_s = look_every_s
        self._watched = threading.get_ident()
        self._beat_s = time.monotonic()
        self._told = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="aengine-watchdog", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        self._beat_s = time.monotonic()

    @property
    def silent_s(self) -> float:
        """How long ago the loop last turned."""
        return time.monotonic() - self._beat_s

    @property
    def blocked(self) -> bool:
        return self.silent_s > self.blocked_s

    def take_faults(self) -> int:
        """Standstills since the last call; called on the loop."""
        taken, self.faults = self.faults, 0
        return taken

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(self._look_every_s):
            if not self.blocked:
                if self._told:
                    log.warning("the event loop turns again")
                self._told = False
            elif not self._told:
                self._told = True
                self.faults += 1
                log.error("the event loop has not turned for %.1f s; it is at:\n%s", self.silent_s, self._stack())

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._watched)
        return "its thread has ended" if frame is None else "".join(traceback.format_stack(frame)).rstrip()


class Stalls:
    """Looks at an engine's progress once a second. `name_of`: a handle as people know it."""

    def __init__(self, metrics: Metrics, name_of: Callable[[int | None], str]) -> None:
        self._metrics = metrics
        self._name_of = name_of
        self._overdue_at_s = -1.0  # the standstill that was told, by when it began
        self._handles = np.zeros(0, np.int64)
        self._computed = np.zeros(0, np.int32)
        self._since_s = np.zeros(0)
        self._told = np.zeros(0, np.bool_)

    def look(self, now_s: float, progress: Progress, scheduler: Scheduler) -> None:
        still_s = now_s - progress.at_s
        if scheduler.has_unfinished and still_s > OVERDUE_S:
            self._overdue(still_s, progress, scheduler)
        else:
            self._requests(now_s, *scheduler.positions())

    def _overdue(self, still_s: float, progress: Progress, scheduler: Scheduler) -> None:
        self._since_s += LOOK_EVERY_S  # nobody moves now: that is the step's fault, not a request's
        if progress.at_s == self._overdue_at_s:
            return
        self._overdue_at_s = progress.at_s
        self._metrics.fault("step_overdue")
        oldest = self._name_of(scheduler.oldest())
        what = progress.waiting_for
        log.error("no step has ended for %.0f s: waiting for %s; oldest request: %s", still_s, what, oldest)

    def _requests(self, now_s: float, handles: np.ndarray[Any, Any], computed: np.ndarray[Any, Any]) -> None:
        if len(handles) != len(self._handles):
            self._handles, self._computed = np.full_like(handles, -1), np.zeros_like(computed)
            self._since_s, self._told = np.zeros(len(handles)), np.zeros(len(handles), np.bool_)
        moved = (handles != self._handles) | (computed != self._computed)
        self._since_s[moved] = now_s
        self._told[moved] = False
        self._handles, self._computed = handles, computed
        stuck = (handles >= 0) & ~self._told & (now_s - self._since_s > REQUEST_STALL_S)
        self._told |= stuck
        for slot in np.flatnonzero(stuck).tolist():
            self._metrics.fault("request_stalled")
            name, still_s = self._name_of(int(handles[slot])), now_s - self._since_s[slot]
            log.error("request %s runs, but has not moved for %.0f s: position %d", name, still_s, computed[slot])


class GcPauses:
    """Pauses of the garbage collector, whichever thread met them."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._pauses: deque[float] = deque(maxlen=10_000)
        gc.callbacks.append(self._event)

    def _event(self, phase: str, info: dict[str, int]) -> None:
        now_s = time.perf_counter()
        if phase == "start":
            self._began_s = now_s
        else:
            self._pauses.append(now_s - self._began_s)

    def take(self) -> list[float]:
        """Seconds of each pause since the last call."""
        return [self._pauses.popleft() for _ in range(len(self._pauses))]

    def close(self) -> None:
        gc.callbacks.remove(self._event)
