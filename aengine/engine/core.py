"""The core loop: plan step N + 1 while step N runs.

Owns: the scheduler, the runner, the inbox, the queue of step outputs, and the spans of its own work.
Does not know: text, HTTP, how tokens are computed.
Invariants: only the loop task touches the scheduler; a handle is awaited exactly once and in order; at most `depth` + 1
steps are in flight, and `len(in_flight) > depth` is the only line that knows it. The inbox is bounded by the façade's
waiting room; the output queue by OUTPUT_BACKLOG steps, behind which the loop waits. With `multi_step` K > 1, the way it
was done before overlap, up to K decode steps are planned and launched at once, and all of them awaited before any is
accounted: the device has no gap between them, and until the last is through nobody sees a token or an end, nor gets in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from aengine.config import SchedulerConfig
from aengine.errors import StepFailed
from aengine.metrics import Metrics
from aengine.runner.protocol import Runner
from aengine.scheduler import Matcher, Scheduler
from aengine.timeline import StepTimes, Timeline
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
    staged_s: float = 0.0
    arrived_s: float = 0.0

    def choose(self, choices: Choices) -> None:
        raise AssertionError(f"step {self.step} was not launched")

    async def wait(self) -> StepResult:
        raise StepFailed(f"step {self.step} could not be launched: {self.error}") from self.error


@dataclass(slots=True)
class InFlight:
    """A launched step. `waited`: nothing was in flight when it was launched. `chosen_s`: when its deferred rows got
    their masks. Times of time.perf_counter."""

    handle: StepHandle
    launched_s: float
    waited: bool
    overlapped: bool = False  # another step is launched behind it
    chosen_s: float = 0.0


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
        self,
        scheduler: Scheduler,
        runner: Runner,
        settings: SchedulerConfig,
        metrics: Metrics,
        timeline: Timeline,
        make_masks: MaskMaker | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.outputs: asyncio.Queue[StepOutputs] = asyncio.Queue(OUTPUT_BACKLOG)
        self.progress = Progress()
        self._runner = runner
        self._multi_step = settings.multi_step
        self._depth = 0 if settings.multi_step > 1 else settings.depth
        self._metrics = metrics
        self._timeline = timeline
        self._make_masks = make_masks
        self._inbox: deque[tuple[Request, Matcher | None] | int] = deque()
        self._wake = asyncio.Event()
        self._in_flight: deque[InFlight] = deque()
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
            plan = self._plan(self.scheduler.plan)
            if plan is not None:
                self._launch(plan)
                self._launch_again(plan)
            await self._emit(self.scheduler.flush())
            while in_flight and not in_flight[-1].handle.launched:
                await self._retire()
            if in_flight and in_flight[-1].handle.undecided:
                await self._decide()
            if len(in_flight) > self._depth or (in_flight and plan is None):
                await self._retire(self._multi_step)
            elif plan is None and not in_flight and not self._inbox:
                await self._wait_for_work()

    def _drain_inbox(self) -> None:
        if not self._inbox:
            return
        with self._timeline.drain as span:
            span.value = len(self._inbox)
            while self._inbox:
                item = self._inbox.popleft()
                if isinstance(item, int):
                    self.scheduler.abort(item)
                else:
                    self.scheduler.submit(*item)

    def _plan(self, plan: Callable[[], StepPlan | None]) -> StepPlan | None:
        with self._timeline.plan as span:
            made = plan()
            span.value = 0 if made is None else len(made.slots)
        return made

    def _launch(self, plan: StepPlan) -> None:
        waited = not self._in_flight
        if not waited:
            self._in_flight[-1].overlapped = True
            self.progress.steps_overlapped += 1
        self.progress.steps += 1
        with self._timeline.launch as span:
            span.value = plan.step
            try:
                handle = self._runner.launch(plan)
            except Exception as error:  # fails this step's rows in order, not the loop
                handle = FailedLaunch(plan.step, error)
            span.after(self._timeline.stage, handle.staged_s)
        self._in_flight.append(InFlight(handle, time.perf_counter(), waited))

    def _launch_again(self, plan: StepPlan | None) -> None:
        """Multi-step: the next steps of rows that only decode, and whose sampling waits for nobody."""
        for _ in range(self._multi_step - 1):
            if plan is None or plan.decodes < len(plan.slots) or len(plan.deferred):
                return
            if not self._in_flight[-1].handle.launched:
                return
            plan = self._plan(self.scheduler.again)
            if plan is not None:
                self._launch(plan)

    async def _decide(self) -> None:
        """Launch the sampling of the newest step's deferred rows, once what their masks depend on is committed. The
        step's forward runs meanwhile, so the device does not wait."""
        while len(self._in_flight) > 1:
            await self._retire()
        rows, matchers = self.scheduler.decide()
        choices = NO_CHOICES
        if matchers:
            assert self._make_masks is not None
            choices = Choices(rows, await self._make_masks(matchers))
        newest = self._in_flight[-1]
        newest.handle.choose(choices)
        newest.chosen_s = time.perf_counter()

    async def _retire(self, most: int = 1) -> None:
        """The oldest steps: await as many as are in flight, `most` at most, and only then account them."""
        retired = [await self._await_oldest() for _ in range(min(most, len(self._in_flight)))]
        self.progress.move("planning")
        for step, outcome in retired:
            with self._timeline.commit as span:
                span.value = step.handle.step
                outputs = self._account(step, outcome)
            await self._emit(outputs)

    async def _await_oldest(self) -> tuple[InFlight, StepResult | StepFailed]:
        step = self._in_flight.popleft()
        self.progress.move(f"step {step.handle.step}")
        try:
            return step, await step.handle.wait()
        except StepFailed as error:
            return step, error

    def _account(self, step: InFlight, outcome: StepResult | StepFailed) -> StepOutputs:
        if isinstance(outcome, StepFailed):
            self._metrics.step_failed()
            self._timeline.device.forget()
            self._metrics.fault("step")
            log.error("%s; its requests end with this error", outcome)
            self.progress.failures += 1
            if self.progress.failures >= FAILURES_MAX:
                raise RuntimeError(f"{FAILURES_MAX} steps failed in a row, the last with: {outcome}") from outcome
            return self.scheduler.fail(step.handle.step, str(outcome))
        self.progress.failures = 0
        self.progress.device_s += outcome.device_s
        self._metrics.step(time.perf_counter() - step.launched_s, outcome.device_s, overlapped=step.overlapped)
        self._timeline.device.step(
            StepTimes(
                outcome.step,
                step.launched_s,
                outcome.began_s,
                outcome.ended_s,
                step.handle.arrived_s,
                outcome.device_s,
                step.chosen_s,
                step.waited,
            )
        )
        return self.scheduler.commit(outcome)

    async def _emit(self, outputs: StepOutputs) -> None:
        if outputs:
            await self.outputs.put(outputs)

    async def _wait_for_work(self) -> None:
        self._wake.clear()
        idle = not self.scheduler.has_unfinished
        self.progress.waiting_for = "requests" if idle else "a plan: nothing can run"
        self._timeline.device.wait()
        await self._wake.wait()
        self._timeline.device.wake(time.perf_counter())
        if idle:  # a request that comes while others are stuck is no progress
            self.progress.move("planning")

    async def drain_device(self) -> None:
        """After the loop was cancelled: let launched steps end, ignoring their results."""
        while self._in_flight:
            handle = self._in_flight.popleft().handle
            if handle.undecided:
                handle.choose(NO_CHOICES)
            try:
                await handle.wait()
            except StepFailed:
                continue
