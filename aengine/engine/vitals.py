"""How an engine is: what it has done, and whether it moves.

Owns: the task that looks at the event loop, at steps and at requests; what health and statistics are made of.
Does not know: phases of the engine's life, text, HTTP.
Invariants: looking changes nothing but counters; a standstill is named with how long it has lasted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from aengine.engine.core import Core
from aengine.engine.facts import EngineStats
from aengine.engine.watchdog import LOOK_EVERY_S, GcPauses, LoopWatch, Stalls
from aengine.metrics import Metrics
from aengine.timeline import Timeline

LAG_EVERY_S = 0.1
STALL_S = 60.0  # no step has ended for so long while work waits: unhealthy


class Vitals:
    """Made on the event loop's thread. `name_of`: a handle as people know it."""

    def __init__(self, core: Core, timeline: Timeline, metrics: Metrics, name_of: Callable[[int | None], str]) -> None:
        self.loop_watch = LoopWatch()
        self._core = core
        self._timeline = timeline
        self._metrics = metrics
        self._name_of = name_of

    async def watch(self) -> None:
        """How late the event loop wakes a sleeper: what every timer, socket and step result waits for. And once a
        second, whether steps and requests move."""
        pauses, stalls = GcPauses(), Stalls(self._metrics, self._name_of)
        look_s = 0.0
        try:
            while True:
                due_s = time.perf_counter() + LAG_EVERY_S
                await asyncio.sleep(LAG_EVERY_S)
                woken_s, now_s = time.perf_counter(), time.monotonic()
                self._metrics.loop_lag(max(0.0, woken_s - due_s))
                self._timeline.lag(due_s, woken_s)
                self._turned(pauses)
                if now_s >= look_s:
                    look_s = now_s + LOOK_EVERY_S
                    stalls.look(now_s, self._core.progress, self._core.scheduler)
        finally:
            pauses.close()

    def _turned(self, pauses: GcPauses) -> None:
        self.loop_watch.beat()
        for _ in range(self.loop_watch.take_faults()):
            self._metrics.fault("loop_blocked")
        for seconds in pauses.take():
            self._metrics.gc_pause(seconds)

    async def close(self) -> None:
        await asyncio.to_thread(self.loop_watch.close)

    def standstill(self) -> str | None:
        """What does not move, in words; None: all is well."""
        if self.loop_watch.blocked:
            return f"the event loop has not turned for {self.loop_watch.silent_s:.1f} s"
        progress, scheduler = self._core.progress, self._core.scheduler
        still_s = time.monotonic() - progress.at_s
        if scheduler.has_unfinished and still_s > STALL_S:
            stuck = f"no progress for {still_s:.0f} s, waiting for {progress.waiting_for}"
            return f"{stuck}; oldest request: {self._name_of(scheduler.oldest())}"
        return None

    def stats(self, open_streams: int, *, dead: bool) -> EngineStats:
        """`dead`: nothing runs any more, whatever the scheduler last said."""
        progress = self._core.progress
        scheduler, cache = self._core.scheduler.stats(), self._core.scheduler.cache.stats()
        return EngineStats(
            running=0 if dead else scheduler.running,
            waiting=0 if dead else self._core.queued,
            in_flight=scheduler.in_flight,
            preemptions=scheduler.preemptions,
            zombie_rows=scheduler.zombie_rows,
            steps=progress.steps,
            steps_overlapped=progress.steps_overlapped,
            drafts=scheduler.drafts,
            drafted_tokens=scheduler.drafted_tokens,
            accepted_tokens=scheduler.accepted_tokens,
            accepted_by_position=scheduler.accepted_by_position,
            forced_tokens=scheduler.forced_tokens,
            kv_usage=cache.usage,
            kv_waste=cache.pool.waste(),
            kv_stranded_bytes=max(group.stranded_bytes for group in cache.pool.groups),
            kv_moved_bytes=cache.pool.moved_bytes,
            prefix_queries=cache.query_tokens,
            prefix_hits=cache.hit_tokens,
            device_s=progress.device_s,
            open_streams=open_streams,
            media_items=scheduler.media_items,
            media_computed=scheduler.media_computed,
        )
