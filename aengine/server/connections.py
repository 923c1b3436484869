"""Connections: how many there may be, and which have to go.

Owns: `Gate` (who is idle, who is busy, who takes nothing), the protocol of one connection, the runner that uses both.
Does not know: requests beyond their beginning and end, bodies.
Invariants: a connection that answers a request is never closed for lack of room; one that is silent is, the longest
silent first, so strangers who connect and say nothing cannot keep anybody out. Bytes that are no HTTP get one small
answer and one line at most in the log (level debug), and nothing of them is repeated.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from aengine.errors import InvalidRequest
from aengine.server.counters import Counters
from aengine.server.envelope import encode_json, error_response

log = logging.getLogger("aengine.server")

SPARE_FILES = 64  # descriptors for everything that is no connection
REFUSALS = SPARE_FILES // 2  # connections at once that are refused with patience
REFUSE_S = 1.0
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


def room_for_connections(wanted: int) -> int:
    """`wanted`, or what the system lets this process open. Raises the process's own limit as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_FILES
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft not in (resource.RLIM_INFINITY, most) and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    room = max(1, soft - SPARE_FILES)
    log.warning("max_connections is %d instead of %d: this process may open %d files", room, wanted, soft)
    return room


class Gate:
    """One per listening process. `most` connections; a busy one that takes no byte for `stall_s` is cut."""

    def __init__(self, counters: Counters, *, most: int, stall_s: float) -> None:
        self.counters = counters
        self._most = most
        self._stall_s = stall_s
        self._idle: dict[Connection, None] = {}  # longest idle first
        self._busy: dict[Connection, Backlog] = {}
        self._told_s: dict[str, float] = {}
        self._refusals: set[_Refusal] = set()

    @property
    def open(self) -> int:
        return len(self._idle) + len(self._busy)

    def admit(self) -> bool:
        """Whether one more may come; an idle connection leaves for it."""
        if self.open < self._most:
            return True
        oldest = next(iter(self._idle), None)
        if oldest is None:
            self.note("refused", f"all {self._most} connections are busy: new ones are refused")
            return False
        self.closed(oldest)
        self.note("evicted", f"{self._most} connections are open: the longest idle are closed for new ones")
        oldest.force_close()
        return True

    def refusal(self) -> _Refusal:
        """What stands in for a connection that `admit` turned away."""
        return _Refusal(self._refusals, linger=len(self._refusals) < REFUSALS)

    def opened(self, connection: Connection) -> None:
        self._idle[connection] = None
        self._count()

    def closed(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._busy.pop(connection, None)
        self._count()

    def begin(self, connection: Connection) -> None:
        """A request's head has come."""
        if self._idle.pop(connection, self) is None:
            self._busy[connection] = Backlog()
            self._count()

    def end(self, connection: Connection) -> None:
        """Its answer has been handed over."""
        if self._busy.pop(connection, None) is not None:
            self._idle[connection] = None
            self._count()

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
            transport = connection.transport
            if transport is not None:
                still_s = backlog.still_s(transport.get_write_buffer_size(), now_s)
                if still_s >= self._stall_s:
                    self.note("stalled", f"a client has taken no byte for {still_s:.0f} s: its connection is cut")
                    transport.abort()


class Backlog:
    """Bytes that wait for a client, and since when none of them has left. The system's own buffer is full then, so a
    client that reads slowly but steadily is seen to do so."""

    __slots__ = ("_bytes", "_since_s")

    def __init__(self) -> None:
        self._bytes = 0
        self._since_s = 0.0

    def still_s(self, n_bytes: int, now_s: float) -> float:
        if not n_bytes or not self._bytes or n_bytes < self._bytes:
            self._since_s = now_s
        self._bytes = n_bytes
        return now_s - self._since_s


class Connection(RequestHandler):
    """aiohttp's protocol of a connection, known to a gate."""

    __slots__ = ("gate",)

    def __init__(self, manager: web.Server, gate: Gate, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self.gate = gate

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.gate.opened(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.gate.closed(self)
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What never reached a handler: bytes that are no request."""
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
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # by its methods: uvloop's has no such base
        if not self._linger:
            transport.write(_REFUSAL)
            transport.close()
            return
        self._transport = transport
        self._refusals.add(self)
        self._timer = asyncio.get_running_loop().call_later(REFUSE_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        if not self._answered and self._transport is not None:
            self._answered = True
            self._transport.write(_REFUSAL)
            self._transport.write_eof()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._refusals.discard(self)
        if self._timer is not None:
            self._timer.cancel()


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
        return Connection(self, self._gate, loop=asyncio.get_running_loop(), **self._settings)


class GatedRunner(web.AppRunner):
    """An AppRunner whose connections pass `gate`. `idle_s`: how long one may be open without a request's head."""

    def __init__(self, app: web.Application, gate: Gate, *, idle_s: float, **kwargs: Any) -> None:
        super().__init__(app, handler_cancellation=True, access_log=None, **kwargs)
        self._gate = gate
        self._idle_s = idle_s

    async def _make_server(self) -> web.Server:
        inner = await super()._make_server()
        return GatedServer(inner, self._gate, keepalive_timeout=self._idle_s, access_log=None)
