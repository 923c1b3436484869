"""Connections: how many there may be, and which have to go.

Owns: `Gate` (who is idle, who is busy, who takes nothing), the protocol of one connection, the runner that uses both.
Does not know: requests beyond their beginning and end, bodies.
Invariants: a connection that answers a request is never closed for lack of room, nor one that has come, or begun to
ask, within GRACE_S. Of the others first those go that have never asked, then those with an answer, the longest silent
first, so strangers who connect and say nothing cannot keep anybody out. Bytes that are no HTTP get one small answer and
one line at most in the log (level debug), and nothing of them is repeated.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import resource
import struct
import termios
import time
from typing import Any, NamedTuple, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from aengine.errors import InvalidRequest
from aengine.server.counters import Counters
from aengine.server.envelope import encode_json, error_response

log = logging.getLogger("aengine.server")

OTHER_FILES = 64  # descriptors for everything that is no connection
REFUSALS = 256  # connections at once that are refused with patience
REFUSE_S = 1.0
GRACE_S = 1.0  # for a new connection to ask, and for a request's head to come
SWEEP_EVERY_S = 5.0
TOLD_EVERY_S = 60.0  # a flood is one line a minute, not one a connection
_FULL = encode_json(
    {"error": {"message": "all connections are busy", "type": "service_unavailable", "param": None, "code": "busy"}}
)
_REFUSAL = b"\r\n".join(
    (
        b"HTTP/1.1 503 Service Unavailable",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(_FULL),
        b"Retry-After: 1",
        b"Connection: close",
        b"",
        _FULL,
    )
)


class Room(NamedTuple):
    """How many connections, and refusals at once beside them, this process may hold."""

    connections: int
    refusals: int


def room_for_connections(wanted: int) -> Room:
    """`wanted`, or what the system lets this process open. Raises the process's own limit as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + REFUSALS + OTHER_FILES
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft not in (resource.RLIM_INFINITY, most) and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return Room(wanted, REFUSALS)
    refusals = min(REFUSALS, soft // 16)
    room = min(wanted, max(1, soft - OTHER_FILES - refusals))
    if room < wanted:
        log.warning("max_connections is %d instead of %d: this process may open %d files", room, wanted, soft)
    return Room(room, refusals)


class Gate:
    """One per listening process. A busy connection that takes no byte for `stall_s` is cut."""

    def __init__(self, counters: Counters, *, room: Room, stall_s: float) -> None:
        self.counters = counters
        self._room = room
        self._stall_s = stall_s
        self._fresh: dict[Connection, float] = {}  # come, or begun to ask, at that time; in its order
        self._idle: dict[Connection, None] = {}  # answered; longest idle first
        self._busy: dict[Connection, Backlog] = {}
        self._told_s: dict[str, float] = {}
        self._refusals: set[_Refusal] = set()

    @property
    def open(self) -> int:
        return len(self._fresh) + len(self._idle) + len(self._busy)

    def admit(self) -> bool:
        """Whether one more may come; a silent connection leaves for it."""
        most = self._room.connections
        if self.open < most:
            return True
        silent = self._longest_silent(time.monotonic())
        if silent is None:
            self.note("refused", f"all {most} connections are busy: new ones are refused")
            return False
        self.closed(silent)
        self.note("evicted", f"{most} connections are open: the longest idle are closed for new ones")
        silent.force_close()
        return True

    def _longest_silent(self, now_s: float) -> Connection | None:
        """Whoever turns out to ask is fresh from then on, so the search is long once only."""
        while self._fresh:
            connection, since_s = next(iter(self._fresh.items()))
            if now_s - since_s < GRACE_S:
                break
            if connection.asking or not connection.unread_bytes():
                return connection
            self.ask(connection)
        while self._idle:
            connection = next(iter(self._idle))
            if not connection.unread_bytes():
                return connection
            self.ask(connection)
        return None

    def refusal(self) -> _Refusal:
        """What stands in for a connection that `admit` turned away."""
        return _Refusal(self._refusals, linger=len(self._refusals) < self._room.refusals)

    def opened(self, connection: Connection) -> None:
        """At once when `admit` has let it come: a burst is let in before the first of it is connected to its socket."""
        self._fresh[connection] = time.monotonic()
        self._count()

    def holds(self, connection: Connection) -> bool:
        return connection in self._fresh or connection in self._idle or connection in self._busy

    def closed(self, connection: Connection) -> None:
        self._leave(connection)
        self._busy.pop(connection, None)
        self._count()

    def ask(self, connection: Connection) -> None:
        """A request's first bytes have come. Later ones change nothing: a head that trickles gains no time."""
        connection.asking = True
        if self._leave(connection):
            self._fresh[connection] = time.monotonic()

    def begin(self, connection: Connection) -> None:
        """A request's head has come."""
        if self._leave(connection) or connection in self._busy:
            self._busy[connection] = Backlog()
            self._count()

    def end(self, connection: Connection) -> None:
        """Its answer has been handed over. What waits to be written keeps the connection busy until `sweep` looks."""
        backlog = self._busy.get(connection)
        if backlog is not None:
            connection.asking = False
            backlog.answered = True
            if not connection.unwritten_bytes():
                self._rest(connection)

    def _rest(self, connection: Connection) -> None:
        del self._busy[connection]
        self._idle[connection] = None
        self._count()

    def _leave(self, connection: Connection) -> bool:
        """Whether it was open, and not busy."""
        fresh = self._fresh.pop(connection, None) is not None
        return self._idle.pop(connection, self) is None or fresh

    def _count(self) -> None:
        self.counters.connections, self.counters.busy = self.open, len(self._busy)

    def note(self, kind: str, line: str) -> None:
        """Count it, and say so once a minute."""
        self.counters.events[kind] += 1
        now_s = time.monotonic()
        if now_s - self._told_s.get(kind, -TOLD_EVERY_S) >= TOLD_EVERY_S:
            self._told_s[kind] = now_s
            log.warning("%s", line)

    async def sweep(self) -> None:
        """Until cancelled: cut those that take nothing."""
        while True:
            await asyncio.sleep(min(SWEEP_EVERY_S, self._stall_s / 2))
            self.cut_stalled(time.monotonic())

    def cut_stalled(self, now_s: float) -> None:
        for connection, backlog in list(self._busy.items()):
            waiting = connection.unwritten_bytes()
            still_s = backlog.still_s(waiting, now_s)
            if still_s >= self._stall_s and connection.transport is not None:
                self.note("stalled", f"a client has taken no byte for {still_s:.0f} s: its connection is cut")
                connection.transport.abort()
            elif backlog.answered and not waiting:
                self._rest(connection)


class Backlog:
    """Bytes that wait for a client, and since when none of them has left. The system's own buffer is full then, so a
    client that reads slowly but steadily is seen to do so. `answered`: nothing will be added."""

    __slots__ = ("_bytes", "_since_s", "answered")

    def __init__(self) -> None:
        self.answered = False
        self._bytes = 0
        self._since_s = 0.0

    def still_s(self, n_bytes: int, now_s: float) -> float:
        if not n_bytes or not self._bytes or n_bytes < self._bytes:
            self._since_s = now_s
        self._bytes = n_bytes
        return now_s - self._since_s


class Connection(RequestHandler):
    """aiohttp's protocol of a connection, known to a gate. `asking`: bytes of a request came, and its answer has not
    been handed over."""

    __slots__ = ("asking", "gate")

    def __init__(self, manager: web.Server, gate: Gate, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self.gate = gate
        self.asking = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self.gate.holds(self):  # it had to go before it was there
            self.force_close()

    def data_received(self, data: bytes) -> None:
        if not self.asking:
            self.gate.ask(self)
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.gate.closed(self)
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Behind the handler: what it returned is written."""
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self.gate.end(self)

    def unwritten_bytes(self) -> int:
        """That this process holds for the client."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def unread_bytes(self) -> int:
        """That have come, and that this process has not read yet."""
        if self.transport is None or self.transport.is_closing():
            return 0
        number = self.transport.get_extra_info("socket").fileno()
        (count,) = struct.unpack("i", fcntl.ioctl(number, termios.FIONREAD, bytes(4)))
        return cast(int, count)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What never reached a handler: bytes that are no request, or a client that went before it was told to go on
        with its body (Expect: 100-continue)."""
        if isinstance(exc, ConnectionError):
            return web.Response(status=status)  # nobody reads it
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        self.gate.counters.events["malformed"] += 1
        log.debug("a connection sent what is no HTTP request: %s", type(exc).__name__)
        response = error_response(InvalidRequest("this is not a valid HTTP request"))
        response.headers["Server"] = "aengine"
        response.force_close()
        return response


class _Refusal(asyncio.Protocol):
    """Stands in for a connection for which there is no room. Clients take no answer to what they have not sent, and a
    socket that is closed with bytes unread resets what the client has not read: so it answers the first bytes and then
    reads, and drops, until the client has closed or REFUSE_S are over. Not `linger`: it closes at once."""

    def __init__(self, refusals: set[_Refusal], *, linger: bool) -> None:
        self._refusals = refusals
        self._linger = linger
        self._answered = False
        self._transport: asyncio.Transport | None = None
        if linger:
            refusals.add(self)
            asyncio.get_running_loop().call_later(REFUSE_S, self._end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # by its methods: uvloop's has no such base
        if not self._linger:
            self._transport.write(_REFUSAL)
            self._transport.close()

    def _end(self) -> None:
        self._refusals.discard(self)
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._answered and self._transport is not None:
            self._answered = True
            self._transport.write(_REFUSAL)
            self._transport.write_eof()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = None
        self._refusals.discard(self)


class GatedServer(web.Server):
    """`inner` with connections that `gate` knows. Called by the listening socket for each new one."""

    def __init__(self, inner: web.Server, gate: Gate, **kwargs: Any) -> None:
        super().__init__(
            inner.request_handler,
            request_factory=inner.request_factory,
            handler_cancellation=inner.handler_cancellation,
        )
        self._gate = gate
        self._settings = kwargs

    def __call__(self) -> Any:
        if not self._gate.admit():
            return self._gate.refusal()
        connection = Connection(self, self._gate, loop=asyncio.get_running_loop(), **self._settings)
        self._gate.opened(connection)
        return connection


class GatedRunner(web.AppRunner):
    """An AppRunner whose connections pass `gate`. `idle_s`: how long one may be open without a request's head."""

    def __init__(self, app: web.Application, gate: Gate, *, idle_s: float, **kwargs: Any) -> None:
        super().__init__(app, handler_cancellation=True, access_log=None, **kwargs)
        self._gate = gate
        self._idle_s = idle_s

    async def _make_server(self) -> web.Server:
        inner = await super()._make_server()
        return GatedServer(inner, self._gate, keepalive_timeout=self._idle_s, access_log=None)
