"""All clocks of one engine.

Owns: its ring, its stage clock with a span per stage, its device clock, the hook into the garbage collector.
Does not know: the engine.
Invariants: made on the event loop's thread; between `open` and `close` it hears of every collection in the process.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping

from aengine.timeline import names
from aengine.timeline.device import DeviceClock
from aengine.timeline.ring import KEPT_S, Ring, Spans
from aengine.timeline.stages import Span, StageClock


class Timeline:
    def __init__(self) -> None:
        self.ring = Ring()
        self.clock = StageClock(self.ring)
        self.device = DeviceClock(self.ring)
        self.drain, self.plan, self.stage, self.launch, self.commit, self.detokenise, self.write, self._collect = (
            Span(self.clock, code) for code in range(len(names.STAGES))
        )
        self._thread = threading.get_ident()
        self._elsewhere_s = 0.0

    def open(self) -> None:
        gc.callbacks.append(self._on_collection)

    def close(self) -> None:
        """May be called twice."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: Mapping[str, int]) -> None:
        here = threading.get_ident() == self._thread
        if phase == "start":
            if here:
                self._collect.value = info["generation"]
                self._collect.__enter__()
            else:
                self._elsewhere_s = time.perf_counter()
        elif here:
            self._collect.__exit__()
        else:
            self.ring.add(names.OTHER_GC, self._elsewhere_s, time.perf_counter(), info["generation"])

    def lag(self, due_s: float, woken_s: float) -> None:
        """The event loop was to wake a sleeper at `due_s`."""
        self.ring.add(names.LAG, due_s, max(due_s, woken_s))

    def last(self, seconds: float) -> tuple[Spans, float, float]:
        """(spans, beginning and end of the window) of the last `seconds`, at most KEPT_S."""
        to_s = time.perf_counter()
        from_s = to_s - min(seconds, KEPT_S)
        return self.ring.since(from_s), from_s, to_s
