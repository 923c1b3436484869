"""Which stage the event loop's thread is in: a clock that gives each moment to exactly one.

Owns: seconds by stage, spans that may lie inside each other.
Does not know: asyncio, what the stages do.
Invariants: what the stages have, with "other" and "waiting", adds up to the time since the clock began: every change of
stage adds the time since the last change to the stage that ends. A span holds no `await`, except `write`, which is open
while other spans come and go inside it.

How much of the rest is "other" depends on the thread's processor time inside spans. Asking for that costs more than
a span, so one in SAMPLED is asked, and the others are taken to have computed the same share of their time.
"""

from __future__ import annotations

import time
from types import TracebackType

from aengine.timeline.names import STAGES
from aengine.timeline.ring import Ring

_BETWEEN = len(STAGES)
SAMPLED = 17  # odd, so that it meets each of a step's spans in turn


class StageClock:
    """Made on the thread whose time it tells; read there too."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.stage = _BETWEEN
        self.seconds = [0.0] * (len(STAGES) + 1)
        self.began_s = self.since_s = time.perf_counter()
        self.until_sample = SAMPLED
        self.sample_s = 0.0  # processor time when the span that is sampled began; 0.0: none is
        self.sampled_s = self.sampled_processor_s = 0.0
        self._processor_s = time.thread_time()
        self._told = [0.0] * (len(STAGES) + 1)
        self._other_s = self._waiting_s = 0.0

    def totals(self) -> dict[str, float]:
        """Seconds by stage since the clock began. What lies between spans is "other" as far as the thread computed, and
        "waiting" (in the selector, or for the processor) for the rest."""
        now_s, processor_s = time.perf_counter(), time.thread_time()
        self.seconds[self.stage] += now_s - self.since_s
        self.since_s = now_s
        grown = [after - before for after, before in zip(self.seconds, self._told, strict=True)]
        between_s = grown.pop()
        share = min(self.sampled_processor_s / self.sampled_s, 1.0) if self.sampled_s else 1.0
        other_s = min(max(processor_s - self._processor_s - share * sum(grown), 0.0), between_s)
        self._other_s += other_s
        self._waiting_s += between_s - other_s
        self._told, self._processor_s = list(self.seconds), processor_s
        named = dict(zip(STAGES, self.seconds, strict=False))
        return named | {"other": self._other_s, "waiting": self._waiting_s}


class Span:
    """A stage as a context manager. One object per stage and clock, used again and again, never inside itself."""

    __slots__ = ("_clock", "_now", "_outer", "began_s", "code", "value")

    def __init__(self, clock: StageClock, code: int) -> None:
        self.code = code
        self.value = 0  # shown with the span; may be set while it is open
        self.began_s = 0.0
        self._clock = clock
        self._now = time.perf_counter
        self._outer = _BETWEEN

    def __enter__(self) -> Span:
        clock = self._clock
        self._outer = clock.stage
        if self._outer == _BETWEEN:
            clock.until_sample -= 1
            if not clock.until_sample:
                clock.sample_s = time.thread_time()
        self.began_s = now_s = self._now()
        clock.seconds[clock.stage] += now_s - clock.since_s
        clock.since_s = now_s
        clock.stage = self.code
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        clock = self._clock
        now_s = self._now()
        clock.seconds[self.code] += now_s - clock.since_s
        clock.since_s = now_s
        clock.stage = self._outer
        if clock.sample_s and self._outer == _BETWEEN:
            clock.sampled_s += now_s - self.began_s
            clock.sampled_processor_s += time.thread_time() - clock.sample_s
            clock.until_sample, clock.sample_s = SAMPLED, 0.0
        clock.ring.add(self.code, self.began_s, now_s, self.value)

    def after(self, first: Span, until_s: float) -> None:
        """While open: what this span has had until `until_s` was the stage `first`."""
        clock = self._clock
        until_s = min(max(until_s, clock.since_s), self._now())
        clock.seconds[first.code] += until_s - clock.since_s
        clock.since_s = until_s
        clock.ring.add(first.code, self.began_s, until_s, self.value)
        self.began_s = until_s
