"""Server-sent events: one response that streams frames.

Owns: the headers, the opening frames, keep-alive comments, error frames.
Does not know: what is in a frame, the engine.
Invariants: headers leave with the first frame, so an error before it is a plain HTTP error; the first bytes are never a
comment; one write per call of `send`; the keep-alive task ends with the response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from aiohttp import web

from aengine.errors import AengineError
from aengine.server.envelope import encode_json, error_object
from aengine.server.jobs import Job
from aengine.types import OutputDelta

log = logging.getLogger("aengine.server")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would otherwise hold the stream back
}


def frame(value: object) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What streams of one API family have in common: the last frame, what is sent in idle times, how an error looks
    once the headers are out (that frame comes before the last one)."""

    done: bytes
    keep_alive: bytes
    failure: Callable[[AengineError], bytes]


OPENAI = Dialect(DONE, KEEP_ALIVE, lambda error: frame(error_object(error)))


class Frames(Protocol):
    """Makes the frames of one endpoint. Each method returns zero or more whole frames."""

    def opening(self) -> bytes: ...  # leave before the first delta's frames
    def idle_opening(self) -> bytes: ...  # leave instead when nothing came for the idle interval; never empty
    def delta(self, delta: OutputDelta) -> bytes: ...
    def closing(self) -> bytes: ...


class EventStream:
    """An SSE response. `send` is for one task only; a full socket makes it wait, and nobody else."""

    def __init__(
        self,
        request: web.Request,
        opening: Callable[[], bytes],
        idle_opening: Callable[[], bytes],
        idle_s: float,
        keep_alive: bytes,
    ) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self.opened = False
        self._request = request
        self._opening = opening
        self._idle_opening = idle_opening
        self._idle_s = idle_s
        self._idle = keep_alive
        self._writing = False
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._keeper = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeper is not None
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)

    async def send(self, frames: bytes) -> None:
        """Writes whole frames, after the opening if they are the first. Raises ConnectionError when the client left."""
        await self._write(frames if self.opened else self._opening() + frames)

    async def _write(self, data: bytes) -> None:
        self._writing = True
        try:
            if not self.opened:
                self.opened = True
                await self.response.prepare(self._request)
            await self.response.write(data)
            self._last_s = self._loop.time()
        finally:
            self._writing = False

    async def _keep_alive(self) -> None:
        """Writes only while no `send` is under way: two waiters on one full socket would cancel each other."""
        with suppress(ConnectionError):  # the handler hears of it too
            while True:
                idle_s = self._loop.time() - self._last_s
                if idle_s >= self._idle_s and not self._writing:
                    await self._write(self._idle if self.opened else self._idle_opening())
                await asyncio.sleep(self._idle_s - idle_s if idle_s < self._idle_s else self._idle_s)


async def stream_job(
    request: web.Request, job: Job, frames: Frames, idle_s: float, dialect: Dialect = OPENAI
) -> web.StreamResponse:
    """Streams a job to its end. Errors before the first frame are raised; later ones become an error frame."""
    async with EventStream(request, frames.opening, frames.idle_opening, idle_s, dialect.keep_alive) as events:
        try:
            async with aclosing(job.deltas()) as deltas:
                async for delta in deltas:
                    data = frames.delta(delta)
                    if job.done:
                        data += frames.closing() + dialect.done
                    if data:
                        await events.send(data)
        except ConnectionError:
            log.debug("the client of %s left", job.head.id)
        except Exception as error:
            if not events.opened:
                raise
            await _send_error(events, error, job.head.id, dialect)
    return events.response


async def _send_error(events: EventStream, error: Exception, id: str, dialect: Dialect) -> None:
    if not isinstance(error, AengineError):
        log.exception("request %s failed on an internal fault", id, exc_info=error)
        error = AengineError("internal error; see the server's log")
    with suppress(ConnectionError):
        await events.send(dialect.failure(error) + dialect.done)
