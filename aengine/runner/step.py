"""Launched steps: from a plan to a handle that is awaited once.

Owns: `StreamRunner`, the `Executor` protocol, step handles, the measured times of a step.
Does not know: torch, devices, scheduling. What a step computes is the executor's.
Invariants: `launch` returns at once and never raises for a step's own fault; that comes out of the handle's `wait` as
StepFailed with the original as `__cause__`. Steps run in launch order and a failed one does not stop the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

import msgspec

from aengine.errors import StepFailed
from aengine.runner.protocol import DeviceStream, Event
from aengine.runner.stream import Waiter
from aengine.types import Choices, StepHandle, StepPlan, StepResult

Staged = TypeVar("Staged")


class Executor(Protocol[Staged]):
    """Runs one step at a time. `stage` is called on the event loop, `run` on the stream, in the same order."""

    def stage(self, plan: StepPlan) -> Staged:
        """What `run` needs of the plan, where the device can read it. Cheap; does not wait for the device."""
        ...

    def run(self, staged: Staged) -> StepResult | Launched | Undecided:
        """Compute the step, or enqueue it, and let go of what `stage` took, whether it raises or not. A step with
        deferred rows is left undecided, and what it needs for deciding is let go of then."""
        ...


class Launched(Protocol):
    """A step that `run` has only enqueued."""

    def collect(self) -> StepResult:
        """Called on the loop, once, after all that was enqueued has run."""
        ...


@dataclass(frozen=True, slots=True)
class Undecided:
    """A step whose forward was run, or enqueued, and whose deferred rows have not sampled yet. `decide` is called on
    the stream, once, before any later step runs."""

    decide: Callable[[Choices], StepResult | Launched]


@dataclass(slots=True)
class _Step:
    """A step on its way. `results`: what its run gave, once it has run."""

    number: int
    future: asyncio.Future[StepResult]
    results: list[StepResult | Launched | Undecided] = field(default_factory=list)
    arrived_s: float = 0.0


class _Arrival:
    """An event that notes when the host saw it."""

    def __init__(self, event: Event, step: _Step) -> None:
        self._event = event
        self._step = step

    def wait(self) -> None:
        try:
            self._event.wait()
        finally:
            self._step.arrived_s = time.perf_counter()

    def done(self) -> bool:
        return self._event.done()


class _Handle:
    """A `StepHandle` on a future that the waiter resolves."""

    def __init__(
        self,
        step: _Step,
        *,
        launched: bool,
        staged_s: float,
        choose: Callable[[Choices], None] | None = None,
    ) -> None:
        self.step = step.number
        self.launched = launched
        self.staged_s = staged_s
        self.undecided = choose is not None
        self._choose = choose
        self._step = step
        self._awaited = False

    @property
    def arrived_s(self) -> float:
        return self._step.arrived_s

    def choose(self, choices: Choices) -> None:
        if self._choose is None:
            raise RuntimeError(f"step {self.step} has nothing to choose")
        choose, self._choose, self.undecided = self._choose, None, False
        choose(choices)

    async def wait(self) -> StepResult:
        if self.undecided:
            raise RuntimeError(f"step {self.step} was awaited before its rows were chosen for")
        if self._awaited:
            raise RuntimeError(f"step {self.step} was awaited twice")
        self._awaited = True
        return await self._step.future


class StreamRunner(Generic[Staged]):
    """The `Runner` of every device that has a stream. Used from one event loop."""

    def __init__(self, stream: DeviceStream, executor: Executor[Staged], loop: asyncio.AbstractEventLoop) -> None:
        self._stream = stream
        self._executor = executor
        self._loop = loop
        self._waiter = Waiter(loop)
        self._in_flight: set[asyncio.Future[StepResult]] = set()
        self._closed = False
        self._forward = (0.0, 0.0)  # beginning and seconds, of the undecided step; written and read on the stream

    def launch(self, plan: StepPlan) -> StepHandle:
        if self._closed:
            raise RuntimeError(f"step {plan.step} was launched on a closed runner")
        step = _Step(plan.step, self._loop.create_future())
        try:
            staged = self._executor.stage(plan)
        except Exception as error:  # a plan that cannot be staged is a failed step, in its place in the order
            self._resolve(step, error)
            return _Handle(step, launched=False, staged_s=time.perf_counter())
        staged_s = time.perf_counter()
        self._in_flight.add(step.future)
        self._stream.launch(partial(self._run, staged, step))
        if len(plan.deferred):
            return _Handle(step, launched=True, staged_s=staged_s, choose=partial(self._choose, step))
        self._notify(step)
        return _Handle(step, launched=True, staged_s=staged_s)

    def _notify(self, step: _Step) -> None:
        self._waiter.notify(_Arrival(self._stream.record(), step), partial(self._resolve, step))

    def _choose(self, step: _Step, choices: Choices) -> None:
        self._stream.launch(partial(self._run_choice, step, choices))
        self._notify(step)

    def _run_choice(self, step: _Step, choices: Choices) -> None:
        """Nothing is left to choose where the step itself raised; its error is in the event behind this."""
        if not step.results:
            return
        began_s, forward_s = self._forward
        started_s = time.perf_counter()
        undecided = step.results.pop()
        assert isinstance(undecided, Undecided)
        step.results.append(_timed(undecided.decide(choices), began_s, started_s - forward_s))

    def _run(self, staged: Staged, step: _Step) -> None:
        began_s = time.perf_counter()
        result = self._executor.run(staged)
        if isinstance(result, Undecided):
            self._forward = (began_s, time.perf_counter() - began_s)
            step.results.append(result)
        else:
            step.results.append(_timed(result, began_s, began_s))

    def _resolve(self, step: _Step, error: BaseException | None) -> None:
        future = step.future
        self._in_flight.discard(future)
        try:
            result = None if error is not None else _collected(step)
        except Exception as raised:
            result, error = None, raised
        if future.done():  # its awaiter was cancelled
            return
        if result is not None:
            future.set_result(result)
            return
        assert error is not None
        failed = StepFailed(f"step {step.number} failed: {type(error).__name__}: {error}")
        failed.__cause__ = error
        future.set_exception(failed)

    async def close(self) -> None:
        """Wait for launched steps, then end the stream and the waiter. May be called twice."""
        self._closed = True
        if self._in_flight:
            done, _ = await asyncio.wait(set(self._in_flight))
            for future in done:
                if not future.cancelled():
                    future.exception()  # seen, so that a step nobody awaited does not log on collection
        await asyncio.to_thread(self._stream.close)
        await asyncio.to_thread(self._waiter.close)


def _collected(step: _Step) -> StepResult:
    result = step.results[0]
    assert not isinstance(result, Undecided)
    if isinstance(result, StepResult):
        return result
    collected = result.collect()
    ended_s = step.arrived_s  # the device's own clock gives the length of a step, the host's when it was over
    return msgspec.structs.replace(collected, began_s=ended_s - collected.device_s, ended_s=ended_s)


def _timed(result: StepResult | Launched, began_s: float, busy_since_s: float) -> StepResult | Launched:
    """With the times that the executor did not tell; `busy_since_s` is later where the step waited in between."""
    if not isinstance(result, StepResult) or result.ended_s:
        return result
    now_s = time.perf_counter()
    device_s = result.device_s or now_s - busy_since_s
    return msgspec.structs.replace(result, device_s=device_s, began_s=began_s, ended_s=now_s)
