"""The core loop: plan step N + 1 while step N runs.

Owns: the scheduler, the runner, the inbox, and the queue of step outputs.
Does not know: text, HTTP, how tokens are computed.
Invariants: only the loop task touches the scheduler; a handle is awaited exactly once and in order; at most `depth` + 1
steps are in flight, and `len(in_flight) > depth` is the only line that knows it. The inbox is bounded by the façade's
waiting room; the output queue by OUTPUT_BACKLOG steps, behind which the loop waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from aengine.errors import StepFailed
from aengine.metrics import Metrics
from aengine.runner.protocol import Runner
from aengine.scheduler import Matcher, Scheduler
from aengine.types import (
    NO_CHOICES,
    Choices,
    Int32s,
    Request,
    StepHandle,
    StepOutputs,
    StepPlan,
    StepResult,
)

log = logging.getLogger(__name__)

MaskMaker = Callable[[Sequence[Matcher]], Awaitable[Int32s]]
"""Masks int32 [n, ceil(V / 32)] of what n matchers allow next, made off the loop."""

OUTPUT_BACKLOG = 256
FAILURES_MAX = 16  # steps that fail in a row before the engine gives up: a broken device must not look alive


@dataclass(slots=True)
class FailedLaunch:
    """Stands in for the handle of a step whose launch raised, so that it fails in its turn."""

    step: int
    error: BaseException
    launched: bool = False
    undecided: bool = False

    def choose(self, choices: Choices) -> None:
        raise AssertionError(f"step {self.step} was not launched")

    async def wait(self) -> StepResult:
        raise StepFailed(f"step {self.step} could not be launched: {self.error}") from self.error


@dataclass(slots=True)
class Progress:
    """When the loop last moved, on the clock of time.monotonic; read by health checks.

    `waiting_for` names what the loop is doing now.
    """

    at_s: float = field(default_factory=time.monotonic)
    waiting_for: str = "requests"
    steps: int = 0
    steps_overlapped: int = 0
    device_s: float = 0.0
    failures: int = 0  # steps that failed since one did not

    def move(self, waiting_for: str) -> None:
        self.at_s = time.monotonic()
        self.waiting_for = waiting_for


class Core:
    def __init__(
        self, scheduler: Scheduler, runner: Runner, depth: int, metrics: Metrics, make_masks: MaskMaker | None = None
    ) -> None:
        self.scheduler = scheduler
        self.outputs: asyncio.Queue[StepOutputs] = asyncio.Queue(OUTPUT_BACKLOG)
        self.progress = Progress()
        self._runner = runner
        self._depth = depth
        self._metrics = metrics
        self._make_masks = make_masks
        self._inbox: deque[tuple[Request, Matcher | None] | int] = deque()
        self._wake = asyncio.Event()
        self._in_flight: deque[tuple[StepHandle, float]] = deque()
        self._preemptions = 0

    # ---- called by the façade, on the loop's thread

    def submit(self, request: Request, matcher: Matcher | None = None) -> None:
        self._inbox.append((request, matcher))
        self._wake.set()

    def abort(self, handle: int) -> None:
        self._inbox.append(handle)
        self._wake.set()

    @property
    def queued(self) -> int:
        """Requests that have no slot yet, those in the inbox included."""
        return len(self.scheduler.waiting) + sum(not isinstance(item, int) for item in self._inbox)

    @property
    def idle(self) -> bool:
        return not self._inbox and not self._in_flight and not self.scheduler.has_unfinished

    # ---- the loop

    async def run(self) -> None:
        """Until cancelled. An exception that leaves it is an internal fault: the engine is dead."""
        in_flight = self._in_flight
        while True:
            self._drain_inbox()
            plan = self.scheduler.plan()
            if plan is not None:
                in_flight.append((self._launch(plan), time.perf_counter()))
            await self._emit(self.scheduler.flush())
            while in_flight and not in_flight[-1][0].launched:
                await self._retire_oldest()
            if in_flight and in_flight[-1][0].undecided:
                await self._decide()
            if len(in_flight) > self._depth or (in_flight and plan is None):
                await self._retire_oldest()
            elif plan is None and not in_flight and not self._inbox:
                await self._wait_for_work()

    def _drain_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, int):
                self.scheduler.abort(item)
            else:
                self.scheduler.submit(*item)

    def _launch(self, plan: StepPlan) -> StepHandle:
        self.progress.steps += 1
        self.progress.steps_overlapped += bool(self._in_flight)
        try:
            return self._runner.launch(plan)
        except Exception as error:  # fails this step's rows in order, not the loop
            return FailedLaunch(plan.step, error)

    async def _decide(self) -> None:
        """Launch the sampling of the newest step's deferred rows, once what their masks depend on is committed. The
        step's forward runs meanwhile, so the device does not wait."""
        while len(self._in_flight) > 1:
            await self._retire_oldest()
        rows, matchers = self.scheduler.decide()
        choices = NO_CHOICES
        if matchers:
            assert self._make_masks is not None
            choices = Choices(rows, await self._make_masks(matchers))
        self._in_flight[-1][0].choose(choices)

    async def _retire_oldest(self) -> None:
        handle, launched_s = self._in_flight.popleft()
        overlapped = bool(self._in_flight)
        self.progress.move(f"step {handle.step}")
        try:
            result = await handle.wait()
        except StepFailed as error:
            self._metrics.step_failed()
            self._metrics.fault("step")
            log.error("%s; its requests end with this error", error)
            self.progress.failures += 1
            if self.progress.failures >= FAILURES_MAX:
                raise RuntimeError(f"{FAILURES_MAX} steps failed in a row, the last with: {error}") from error
            outputs = self.scheduler.fail(handle.step, str(error))
        else:
            self.progress.failures = 0
            outputs = self.scheduler.commit(result)
            self.progress.device_s += result.device_s
            self._metrics.step(time.perf_counter() - launched_s, result.device_s, overlapped=overlapped)
        self.progress.move("planning")
        await self._emit(outputs)

    async def _emit(self, outputs: StepOutputs) -> None:
        if outputs:
            await self.outputs.put(outputs)

    async def _wait_for_work(self) -> None:
        self._wake.clear()
        idle = not self.scheduler.has_unfinished
        self.progress.waiting_for = "requests" if idle else "a plan: nothing can run"
        await self._wake.wait()
        if idle:  # a request that comes while others are stuck is no progress
            self.progress.move("planning")

    async def drain_device(self) -> None:
        """After the loop was cancelled: let launched steps end, ignoring their results."""
        while self._in_flight:
            handle, _ = self._in_flight.popleft()
            if handle.undecided:
                handle.choose(NO_CHOICES)
            try:
                await handle.wait()
            except StepFailed:
                continue
