"""Server-sent events: one response that streams frames.

Owns: the headers, the opening frames, keep-alive comments, error frames; when a frame may go to the socket at once.
Does not know: what is in a frame, the engine.
Invariants: headers leave with the first frame, so an error before it is a plain HTTP error; the first bytes are never a
comment; one write per call of `send` or `take`; the keep-alive task ends with the response. After a write that filled
the socket's buffer the handler waits until it is empty enough, and deltas merge behind it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from aengine.errors import AengineError
from aengine.server.envelope import encode_json, error_object
from aengine.server.jobs import Job
from aengine.types import OutputDelta

log = logging.getLogger("aengine.server")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
LOOKS = 4  # in the time after which an idle stream gets a comment
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would otherwise hold the stream back
}


_SIZE_LINES = [b"%x\r\n" % size for size in range(1024)]  # of chunks; looking one up is half of a write's own cost


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

    __slots__ = (
        "_chunked",
        "_frames",
        "_free",
        "_idle",
        "_idle_s",
        "_keeper",
        "_protocol",
        "_request",
        "_writer",
        "_writing",
        "_wrote",
        "opened",
        "response",
    )

    def __init__(self, request: web.Request, frames: Frames, idle_s: float, keep_alive: bytes) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self.opened = False
        self._request = request
        self._protocol = request.protocol
        self._frames = frames
        self._idle_s = idle_s
        self._idle = keep_alive
        self._writing = False
        self._free = False  # the headers have left, and nobody writes
        self._wrote = False  # since the keeper looked; a time would be a new object for each token
        self._keeper: asyncio.Task[None] | None = None
        self._writer: AbstractStreamWriter | None = None  # once the headers have left
        self._chunked = False

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
        await self._write(frames if self.opened else self._frames.opening() + frames)
        if self._writer is not None and self._protocol.writing_paused:
            await self._writer.drain()

    @property
    def free(self) -> bool:
        """Whether the stream is open, nobody writes, and the socket takes more."""
        return self._free and not self._protocol.writing_paused

    def take(self, delta: OutputDelta) -> bool:
        """`send` of a delta's frames from anywhere on the loop, without a task; False, and nothing is done, unless
        `free`.

        Writes what the response's own writer would write, and nothing once the client has left; the handler hears of
        that by being cancelled.
        """
        protocol = self._protocol
        if not self._free or protocol.writing_paused:
            return False
        frames = self._frames.delta(delta)
        transport = protocol.transport
        if frames and transport is not None:
            transport.write(_chunk(frames) if self._chunked else frames)
            self._wrote = True
        return True

    async def _write(self, data: bytes) -> None:
        self._writing, self._free = True, False
        try:
            if not self.opened:
                self.opened = True
                writer = await self.response.prepare(self._request)
                await self.response.write(data)
                self._chunked = self.response.headers.get("Transfer-Encoding") == "chunked"
                self._writer = writer
            else:
                await self.response.write(data)
            self._wrote = True
        finally:
            self._writing, self._free = False, self._writer is not None

    async def _keep_alive(self) -> None:
        """Writes when nothing was written for the idle interval, or up to a LOOKS-th of it longer, and only while no
        `send` is under way: two waiters on one full socket would cancel each other."""
        still = 0
        with suppress(ConnectionError):  # the handler hears of it too
            while True:
                await asyncio.sleep(self._idle_s / LOOKS)
                still = 0 if self._wrote else still + 1
                self._wrote = False
                if still >= LOOKS and not self._writing:
                    await self._write(self._idle if self.opened else self._frames.idle_opening())


def _chunk(data: bytes) -> bytes:
    """HTTP/1.1's chunk."""
    size = len(data)
    return b"".join((_SIZE_LINES[size] if size < len(_SIZE_LINES) else b"%x\r\n" % size, data, b"\r\n"))


async def stream_job(
    request: web.Request, job: Job, frames: Frames, idle_s: float, dialect: Dialect = OPENAI
) -> web.StreamResponse:
    """Streams a job to its end. Errors before the first frame are raised; later ones become an error frame."""
    async with EventStream(request, frames, idle_s, dialect.keep_alive) as events:
        job.tap(events.take if job.thoughts is None else partial(_take_counted, events, job))
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


def _take_counted(events: EventStream, job: Job, delta: OutputDelta) -> bool:
    """The frame may tell how many tokens were thoughts, so they are counted before it is made."""
    if not events.free:
        return False
    job.count_thoughts(delta)
    return events.take(delta)


async def _send_error(events: EventStream, error: Exception, id: str, dialect: Dialect) -> None:
    if not isinstance(error, AengineError):
        log.exception("request %s failed on an internal fault", id, exc_info=error)
        error = AengineError("internal error; see the server's log")
    with suppress(ConnectionError):
        await events.send(dialect.failure(error) + dialect.done)
