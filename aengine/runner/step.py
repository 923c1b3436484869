"""Launched steps: from a plan to a handle that is awaited once.

Owns: `StreamRunner`, the `Executor` protocol, step handles, the measured time of a step.
Does not know: torch, devices, scheduling. What a step computes is the executor's.
Invariants: `launch` returns at once and never raises for a step's own fault; that comes out of the handle's `wait` as
StepFailed with the original as `__cause__`. Steps run in launch order and a failed one does not stop the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import msgspec

from aengine.errors import StepFailed
from aengine.runner.protocol import DeviceStream
from aengine.runner.stream import Waiter
from aengine.types import Choices, StepHandle, StepPlan, StepResult

Staged = TypeVar("Staged")


def _nothing() -> None:
    """No staging set to give back."""


class Executor(Protocol[Staged]):
    """Runs one step at a time. `stage` is called on the event loop, `run` on the stream, in the same order."""

    def stage(self, plan: StepPlan) -> Staged:
        """Copy all that `run` needs out of the plan. Cheap; does not wait for the device."""
        ...

    def run(self, staged: Staged) -> StepResult | Launched | Undecided:
        """Compute the step, or enqueue it, and let go of what `stage` took, whether it raises or not. A step with
        deferred rows is left undecided, and lets go when it has been decided."""
        ...


class Launched(Protocol):
    """A step that `run` has only enqueued."""

    def collect(self) -> StepResult:
        """Called on the loop, once, after all that was enqueued has run."""
        ...


@dataclass(frozen=True, slots=True)
class Undecided:
    """A step whose forward was run, or enqueued, and whose deferred rows have not sampled yet. `decide` is called on
    the stream, once, before any later step runs; `release` behind it, whatever it raised."""

    decide: Callable[[Choices], StepResult | Launched]
    release: Callable[[], None] = _nothing

    def choose(self, choices: Choices) -> StepResult | Launched:
        try:
            return self.decide(choices)
        finally:
            self.release()


class _Handle:
    """A `StepHandle` on a future that the waiter resolves."""

    def __init__(
        self,
        step: int,
        future: asyncio.Future[StepResult],
        *,
        launched: bool,
        choose: Callable[[Choices], None] | None = None,
    ) -> None:
        self.step = step
        self.launched = launched
        self.undecided = choose is not None
        self._choose = choose
        self._future = future
        self._awaited = False

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
        return await self._future


class StreamRunner(Generic[Staged]):
    """The `Runner` of every device that has a stream. Used from one event loop."""

    def __init__(self, stream: DeviceStream, executor: Executor[Staged], loop: asyncio.AbstractEventLoop) -> None:
        self._stream = stream
        self._executor = executor
        self._loop = loop
        self._waiter = Waiter(loop)
        self._in_flight: set[asyncio.Future[StepResult]] = set()
        self._closed = False
        self._forward_s = 0.0  # of the undecided step; written and read on the stream

    def launch(self, plan: StepPlan) -> StepHandle:
        if self._closed:
            raise RuntimeError(f"step {plan.step} was launched on a closed runner")
        future: asyncio.Future[StepResult] = self._loop.create_future()
        results: list[StepResult | Launched | Undecided] = []
        try:
            staged = self._executor.stage(plan)
        except Exception as error:  # a plan that cannot be staged is a failed step, in its place in the order
            self._resolve(plan.step, future, results, error)
            return _Handle(plan.step, future, launched=False)
        self._in_flight.add(future)
        self._stream.launch(partial(self._run, staged, results))
        told = partial(self._resolve, plan.step, future, results)
        if len(plan.deferred):
            return _Handle(plan.step, future, launched=True, choose=partial(self._choose, results, told))
        self._waiter.notify(self._stream.record(), told)
        return _Handle(plan.step, future, launched=True)

    def _choose(
        self,
        results: list[StepResult | Launched | Undecided],
        told: Callable[[BaseException | None], None],
        choices: Choices,
    ) -> None:
        self._stream.launch(partial(self._run_choice, results, choices))
        self._waiter.notify(self._stream.record(), told)

    def _run_choice(self, results: list[StepResult | Launched | Undecided], choices: Choices) -> None:
        """Nothing is left to choose where the step itself raised; its error is in the event behind this."""
        if not results:
            return
        started = time.perf_counter() - self._forward_s
        undecided = results.pop()
        assert isinstance(undecided, Undecided)
        results.append(_timed(undecided.choose(choices), started))

    def _run(self, staged: Staged, results: list[StepResult | Launched | Undecided]) -> None:
        started = time.perf_counter()
        result = self._executor.run(staged)
        if isinstance(result, Undecided):
            self._forward_s = time.perf_counter() - started
            results.append(result)
        else:
            results.append(_timed(result, started))

    def _resolve(
        self,
        step: int,
        future: asyncio.Future[StepResult],
        results: list[StepResult | Launched | Undecided],
        error: BaseException | None,
    ) -> None:
        self._in_flight.discard(future)
        try:
            result = None if error is not None else _collected(results[0])
        except Exception as raised:
            result, error = None, raised
        if future.done():  # its awaiter was cancelled
            return
        if result is not None:
            future.set_result(result)
            return
        assert error is not None
        failed = StepFailed(f"step {step} failed: {type(error).__name__}: {error}")
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


def _collected(result: StepResult | Launched | Undecided) -> StepResult:
    assert not isinstance(result, Undecided)
    return result if isinstance(result, StepResult) else result.collect()


def _timed(result: StepResult | Launched, started: float) -> StepResult | Launched:
    if isinstance(result, StepResult) and not result.device_s:
        return msgspec.structs.replace(result, device_s=time.perf_counter() - started)
    return result
