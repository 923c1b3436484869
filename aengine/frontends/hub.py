"""The engine's side of all front-ends.

Owns: who gets which outputs, the front-ends' requests on their way in, what they are told of the engine.
Does not know: processes and signals (parent.py), text, HTTP.
Invariants: one message per step and front-end. A front-end that is slow holds the engine up, as a slow output task
would; one that takes nothing for a while, or says nothing, is cut off. When a front-end is gone its requests are
aborted in the same turn of the loop, and nobody else's outputs change.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from aengine.engine.async_engine import AsyncEngine
from aengine.errors import AengineError, NotReady
from aengine.frontends.seat import Seat
from aengine.frontends.wire import (
    Abort,
    Accepted,
    Answer,
    Ask,
    Counted,
    Fault,
    Outputs,
    Pipe,
    Refused,
    State,
    Stop,
    Submit,
    ToEngine,
    ToFrontend,
    Up,
)
from aengine.types import NO_HANDLES, Finish, HttpFigures, Int64s, SamplingParams, StepOutputs

log = logging.getLogger("aengine.frontends")

LOOK_EVERY_S = 0.05
SILENT_S = 15.0  # a front-end tells its counters every second, and the stack of a loop that is blocked after 5
COUNTING_S = 0.5
NOBODY = -1
NO_SEATS: NDArray[np.int16] = np.zeros(0, np.int16)


@dataclass(slots=True)
class Open:
    """A submitted prompt: `left` of its choices have not finished."""

    left: int
    release: Callable[[], None]


class Lost(NamedTuple):
    """What a front-end left behind: `sequences` that the engine knew; `connections` as it told last, a second before
    its end or before it stopped, and how many of them had a request under way, whatever had become of that."""

    sequences: int
    connections: int = 0
    busy: int = 0

    def __str__(self) -> str:
        return (
            f"{self.sequences} sequences aborted, {self.connections} connections lost, {self.busy} of them with a "
            "request under way"
        )


class Hub:
    """An `Outlet` for front-ends. `engine` is set before any front-end is served."""

    engine: AsyncEngine

    def __init__(self, frontends: int) -> None:
        self._expected = frontends
        self._seats: dict[int, Seat] = {}
        self._seat_of: dict[int, int] = {}  # handle -> index of the front-end, or NOBODY when that is gone
        self._open: dict[int, Open] = {}
        self._nothing_open = asyncio.Event()
        self._nothing_open.set()
        self._works: set[asyncio.Task[None]] = set()
        self._split_handles: Int64s = NO_HANDLES
        self._split_seats = NO_SEATS
        self._told: State | None = None
        self.all_up = asyncio.Event()  # once every front-end could serve

    # ---- outputs

    @property
    def open_choices(self) -> int:
        return len(self._open)

    async def all_done(self) -> None:
        await self._nothing_open.wait()

    async def run(self, queue: asyncio.Queue[StepOutputs]) -> None:
        while True:
            outputs = await queue.get()
            for seat, part in self._split(outputs):
                seat.pipe.send(Outputs(part))
            for finish in outputs.finished:
                self._finish(finish)
            for seat in list(self._seats.values()):
                if seat.pipe.crowded and not await seat.pipe.room():
                    log.error("front-end %d does not take its outputs; it is cut off", seat.index)
                    seat.pipe.cut()

    def _split(self, outputs: StepOutputs) -> Iterator[tuple[Seat, StepOutputs]]:
        owners, seat_of = self._owners(outputs.handles), self._seat_of.get
        for index, seat in self._seats.items():
            rows = np.flatnonzero(owners == index)
            logprobs = {}
            if outputs.logprobs:
                logprobs = {i: outputs.logprobs[row] for i, row in enumerate(rows.tolist()) if row in outputs.logprobs}
            part = StepOutputs(
                outputs.step,
                outputs.handles[rows],
                outputs.tokens[rows],
                logprobs,
                [entry for entry in outputs.prompt_logprobs if seat_of(entry[0]) == index],
                [admitted for admitted in outputs.admitted if seat_of(admitted.handle) == index],
                [finish for finish in outputs.finished if seat_of(finish.handle) == index],
            )
            if part:
                yield seat, part

    def _owners(self, handles: Int64s) -> NDArray[np.int16]:
        """The front-end of each row. Most steps have the rows of the one before."""
        if not np.array_equal(handles, self._split_handles):
            seat_of = self._seat_of.get
            self._split_seats = np.array([seat_of(handle, NOBODY) for handle in handles.tolist()], np.int16)
            self._split_handles = handles
        return self._split_seats

    def _finish(self, finish: Finish) -> None:
        entry = self._open.pop(finish.handle, None)
        if entry is None:
            return
        index = self._seat_of.pop(finish.handle)
        if index != NOBODY:
            self._seats[index].handles.discard(finish.handle)
        entry.left -= 1
        if not entry.left:
            entry.release()
        if not self._open:
            self._nothing_open.set()

    def fail_all(self, message: str) -> None:
        """The front-ends end their streams when they hear of it."""
        self._open.clear()
        self._seat_of.clear()
        for seat in self._seats.values():
            seat.handles.clear()
        self._nothing_open.set()
        self.tell()

    # ---- front-ends

    async def serve(self, index: int, pipe: Pipe) -> Lost:
        """Until the front-end is gone."""
        seat = self._seats[index] = Seat(index, pipe)
        pipe.send(self._state())
        try:
            while (message := await pipe.receive()) is not None:
                seat.heard_s = time.monotonic()
                self._take(seat, message)
        except Exception:  # whatever it says, others are served
            log.exception("front-end %d says what cannot be understood; it is cut off", index)
        return self._left(seat)

    def _left(self, seat: Seat) -> Lost:
        del self._seats[seat.index]
        seat.leave()
        for handle in seat.handles:
            self._seat_of[handle] = NOBODY
        self._split_handles, self._split_seats = NO_HANDLES, NO_SEATS
        self.engine.abort_rows(seat.handles)
        with suppress(NotReady):
            if seat.counts is not None:
                self.engine.metrics.absorb(seat.counts)
        http = seat.counts.http if seat.counts is not None else HttpFigures()
        return Lost(len(seat.handles), http.connections, http.connections_busy)

    def _take(self, seat: Seat, message: ToEngine) -> None:
        match message:
            case Submit():
                if message.submission.sampling.grammar is None:
                    self._submit(seat, message)
                else:
                    self._work(self._prepare_and_submit(seat, message))
            case Abort():
                self.engine.abort_rows(handle for handle in message.handles if handle in seat.handles)
            case Ask():
                self._work(self._answer(seat, message))
            case Counted():
                seat.counted(message.number, message.counts)
            case Up():
                seat.up = True
                if sum(one.up for one in self._seats.values()) == self._expected:
                    self.all_up.set()
                    self.tell()

    def _work(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._works.add(task)
        task.add_done_callback(self._works.discard)

    async def _prepare_and_submit(self, seat: Seat, message: Submit) -> None:
        try:
            await self.engine.prepare(message.submission.sampling)
        except Exception as error:
            seat.pipe.send(Refused(message.number, fault(error)))
            return
        if not seat.left:
            self._submit(seat, message)

    def _submit(self, seat: Seat, message: Submit) -> None:
        try:
            images = tuple(seat.take(message.submission.images))
            handles, release = self.engine.submit_rows(msgspec.structs.replace(message.submission, images=images))
        except Exception as error:
            seat.pipe.send(Refused(message.number, fault(error)))
            return
        entry = Open(len(handles), release)
        for handle in handles:
            self._seat_of[handle] = seat.index
            self._open[handle] = entry
        seat.handles.update(handles)
        self._nothing_open.clear()
        seat.pipe.send(Accepted(message.number, handles))

    # ---- what they ask

    async def _answer(self, seat: Seat, ask: Ask) -> None:
        try:
            answer = await self._done(seat, ask)
        except Exception as error:
            answer = Answer(ask.number, fault=fault(error))
        if not seat.left:
            seat.pipe.send(answer)

    async def _done(self, seat: Seat, ask: Ask) -> Answer:
        match ask.what:
            case "metrics":
                return Answer(ask.number, await self.metrics_text())
            case "trace":
                return Answer(ask.number, await self.engine.trace(ask.seconds))
            case "reset_prefix_cache":
                await self.engine.reset_prefix_cache()
            case "prepare":
                await self.engine.prepare(SamplingParams(grammar=ask.grammar))
            case "images":
                return Answer(ask.number, images=seat.keep(await self.engine.read_images(ask.sources)))
            case _:
                raise AengineError(f"a front-end asks for {ask.what!r}, which nobody knows")
        return Answer(ask.number)

    async def metrics_text(self) -> bytes:
        """The engine's and all front-ends' counters, summed; of one that does not answer, what it told last."""
        metrics = self.engine.metrics
        counting = [seat.ask_counts() for seat in self._seats.values() if seat.up]
        if counting:
            await asyncio.wait(counting, timeout=COUNTING_S)
        return metrics.with_others(seat.counts for seat in self._seats.values() if seat.counts is not None).render()

    # ---- what they are told

    def _state(self) -> State:
        health, phase = self.engine.health(), self.engine.phase
        if phase == "ready" and not self.all_up.is_set():
            return State("starting front-ends", False, "front-ends are starting", self.engine.model)
        model = self.engine.model if phase in ("ready", "draining", "dead") else None
        return State(phase, health.ok, health.reason, model)

    def tell(self) -> None:
        """The engine's state, to all, if it has changed."""
        state = self._state()
        if state == self._told:
            return
        known = self._told is not None and self._told.model == state.model
        self._told = state
        brief = msgspec.structs.replace(state, model=None) if known else state
        self.send_all(brief)

    def send_all(self, message: ToFrontend) -> None:
        for seat in self._seats.values():
            seat.pipe.send(message)

    def stop_all(self) -> None:
        self.send_all(Stop())

    async def watch(self) -> None:
        """Until cancelled: tells of changes, cuts off whoever is silent."""
        while True:
            self.tell()
            silent = time.monotonic() - SILENT_S
            for seat in list(self._seats.values()):
                if seat.up and seat.heard_s < silent:
                    log.error("front-end %d has said nothing for %.0f s; it is cut off", seat.index, SILENT_S)
                    seat.pipe.cut()
            await asyncio.sleep(LOOK_EVERY_S)


def fault(error: Exception) -> Fault:
    if not isinstance(error, AengineError):
        log.exception("a front-end's request failed on an internal fault", exc_info=error)
    return Fault.of(error)
