"""What runs between an engine's start and its close.

Owns: the core loop, whoever takes its outputs, the watch and what touches memory ahead, as supervised tasks; their end,
in order; the collector's view of a loaded engine, and the threads' turns beside it.
Does not know: loading, prompts, the phases that an engine tells.
Invariants: every task is awaited in `close`; when one dies, every open stream ends with EngineDead and `died` is told,
once for each.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from aengine.config import EngineConfig
from aengine.engine.admission import Admission
from aengine.engine.core import Core
from aengine.engine.facts import EngineStats
from aengine.engine.intake import Intake
from aengine.engine.outlet import Outlet
from aengine.engine.output import OutputTask
from aengine.engine.process import collect_seldom, take_short_turns
from aengine.engine.vitals import Vitals
from aengine.errors import NotReady
from aengine.timeline import Timeline

if TYPE_CHECKING:
    from aengine.engine.build import Parts

log = logging.getLogger(__name__)


class Running:
    """Made on the event loop that it runs on. `outlet`: takes the outputs in place of an output task; `died`: is told
    what went wrong, before the streams end."""

    _frozen: ClassVar[int] = 0  # engines of this process whose objects the garbage collector skips
    _turn_s: ClassVar[float] = sys.getswitchinterval()  # as it was before the first of them

    def __init__(self, config: EngineConfig, parts: Parts, outlet: Outlet | None, died: Callable[[str], None]) -> None:
        self._parts = parts
        self._died = died
        self._dead = False
        self._runner = parts.make_runner(asyncio.get_running_loop())
        timeline = self.timeline = Timeline()
        metrics, settings = parts.metrics, config.scheduler
        self.core = Core(parts.scheduler, self._runner, settings, metrics, timeline, parts.grammars.make_masks)
        self.output: OutputTask | None = None
        if outlet is None:
            self.output = OutputTask(self.core.outputs, self.core.abort, metrics, timeline, parts.spans)
            self._taker: Outlet | OutputTask = self.output
            give_out = self.output.run
        else:
            self._taker = outlet
            give_out = partial(outlet.run, self.core.outputs)
        intake = Intake(config, parts.model, parts.text.tokenizer, parts.scheduler.cache)
        self.admission = Admission(settings, intake, self.core, parts.grammars, metrics)
        self.vitals = Vitals(self.core, timeline, metrics, self.admission.name)
        metrics.bind(self.stats)
        metrics.bind_times(timeline.clock.totals, lambda: timeline.device.idle_s(time.perf_counter()))
        parts.text.on_fault = lambda: metrics.fault("tokenizer")
        self._tasks = [
            asyncio.create_task(self._supervise(self.core.run), name="aengine-core"),
            asyncio.create_task(self._supervise(give_out), name="aengine-output"),
            asyncio.create_task(self._supervise(self.vitals.watch), name="aengine-watch"),
        ]
        if parts.touching is not None:
            self._tasks.append(asyncio.create_task(self._supervise(parts.touching.run), name="aengine-touch"))

    def settle(self, *, own_process: bool) -> None:
        """All that was loaded lives on: full collections need not walk it (they took 50 ms and more)."""
        if own_process:
            collect_seldom()
        else:  # in its own there is next to no garbage yet, and looking for it takes 0.1 s
            gc.collect()
        gc.freeze()
        if not Running._frozen:
            Running._turn_s = take_short_turns()
        Running._frozen += 1
        self.timeline.open()

    async def _supervise(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`work` is called here, so that a task cancelled before its first turn leaves no coroutine behind."""
        try:
            await work()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("the engine died")
            self._dead = True
            death = f"{type(error).__name__}: {error}"
            self._died(death)
            self._taker.fail_all(f"the engine died: {death}")
            self.admission.forget_all()

    def stats(self) -> EngineStats:
        return self.vitals.stats(self._taker.open_choices, dead=self._dead)

    async def drain(self, drain_s: float) -> None:
        """Until no choice is open, but for `drain_s` seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._taker.all_done()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.vitals.close()
        await self.core.drain_device()
        await self._runner.close()
        self._parts.close()
        self.timeline.close()
        self.admission.fail_all(NotReady("the engine was shut down before the request ended"))
        if (spans := self._parts.spans) is not None:
            await asyncio.to_thread(spans.close)
        Running._frozen -= 1
        if not Running._frozen:  # another engine of this process may still count on it
            gc.unfreeze()
            sys.setswitchinterval(Running._turn_s)
