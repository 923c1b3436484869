"""The serving process: socket, engine start, signals, drain.

Owns: the listening socket, the task that starts the engine, what signals do.
Does not know: routes, requests.
Invariants: the socket listens before the engine loads; the engine is closed on every way out; a failed start raises.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from aiohttp import web

from aengine.config import ServerConfig
from aengine.errors import AengineError, ConfigError
from aengine.server.app import create_app
from aengine.server.connections import Gate, GatedRunner, room_for_connections
from aengine.server.context import CONTEXT, ServerContext
from aengine.server.counters import Counters
from aengine.server.facade import Engine
from aengine.server.trace import Traced, write_trace
from aengine.types import Grammar, SamplingParams

log = logging.getLogger("aengine.server")

LAST_WRITES_S = 1.0  # for handlers to write their ends once the engine is closed
QUIET_S, LOOK_EVERY_S = 1.0, 0.25  # no request is open for so long, as far as looks tell
BACKLOG = 1024  # connections; the default of 128 refuses bursts that the waiting room could take
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def run_server(
    engine: Engine,
    config: ServerConfig,
    *,
    on_listening: Callable[[str], None] | None = None,
    sockets: Sequence[socket.socket] = (),
    stopping: asyncio.Event | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM, then drains. `on_listening` gets the base URL before the engine loads.

    The first signal refuses new requests with 503 and lets running ones end for `shutdown_timeout_s`; a second signal
    ends the process at once. SIGUSR1 writes a trace of the last seconds to a file. `sockets`: bound already, in place
    of host and port. Setting `stopping` acts as the first signal.

    Raises ConfigError when the address cannot be had, and what `engine.start` raised.
    """
    app = create_app(engine, config)
    room = room_for_connections(config.max_connections)
    gate = Gate(app[CONTEXT].counters, room=room, stall_s=config.stall_timeout_s)
    runner = GatedRunner(app, gate, idle_s=config.idle_timeout_s, shutdown_timeout=LAST_WRITES_S)
    await runner.setup()
    sweep = asyncio.create_task(gate.sweep(), name="server.sweep")
    told = stopping is not None  # who sets it says so
    stopping = stopping or asyncio.Event()
    drain_s = 0.0
    try:
        url = await _listen(runner, config, sockets)
        with stop_signals(stopping), traces_on_signal(engine):
            try:
                if on_listening is not None:
                    on_listening(url)
                await _start_and_serve(engine, app[CONTEXT].counters, stopping)
                drain_s = config.shutdown_timeout_s if engine.phase == "ready" else 0.0
            finally:
                if drain_s and not told:
                    log.info("draining: running requests may take %.0f s more", drain_s)
                await _shut_down(engine, app[CONTEXT], runner, drain_s)
    finally:
        sweep.cancel()
        await asyncio.gather(sweep, return_exceptions=True)
        await runner.cleanup()


async def _listen(runner: web.AppRunner, config: ServerConfig, sockets: Sequence[socket.socket]) -> str:
    sites: list[web.BaseSite] = [web.SockSite(runner, bound, backlog=BACKLOG) for bound in sockets]
    try:
        for site in sites or [web.TCPSite(runner, config.host, config.port, backlog=BACKLOG)]:
            await site.start()
    except (OSError, ValueError) as error:
        raise cannot_listen(config, error) from error
    return url_of(*runner.addresses[0][:2])


def cannot_listen(config: ServerConfig, error: OSError | ValueError) -> ConfigError:
    """`error`: of resolving the host (a ValueError when it cannot be a name), or of binding to its address."""
    number = error.errno if isinstance(error, OSError) else None
    param = "host"
    if isinstance(error, socket.gaierror | ValueError):
        why = "no address is known by that name"
    elif number == errno.EADDRNOTAVAIL:
        why = "this machine has no such address; 0.0.0.0 is all that it has"
    elif number == errno.EADDRINUSE:
        param = "port"
        why = "another program listens there; end it, or choose another port with --port (0: any free one)"
    elif number == errno.EACCES:
        param = "port"
        why = "this user may not; ports below 1024 mostly need privileges"
    else:
        why = os.strerror(number) if number else str(error)
    return ConfigError(f"cannot listen on {config.host}:{config.port}: {why}", param=param)


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _start_and_serve(engine: Engine, counters: Counters, stopping: asyncio.Event) -> None:
    """Loads the engine beside the running server, then waits for a signal. Raises what the start raised."""
    tasks = [
        start := asyncio.create_task(engine.start(), name="engine.start"),
        stop := asyncio.create_task(stopping.wait(), name="server.stop"),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
            tasks.append(asyncio.create_task(_read_vocabulary(engine, counters), name="server.vocabulary"))
            await stop
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def _read_vocabulary(engine: Engine, counters: Counters) -> None:
    """Get the first grammar's dearest part done while nobody waits: it keeps the interpreter for 0.3 s and more, and
    the first request may come at once. Where the server is never quiet, the first structured request does it."""
    quiet_s = 0.0
    while quiet_s < QUIET_S:
        await asyncio.sleep(LOOK_EVERY_S)
        quiet_s = 0.0 if counters.busy else quiet_s + LOOK_EVERY_S
    try:
        await engine.prepare(SamplingParams(grammar=Grammar("json_object")))
    except AengineError as error:
        log.warning("no structured output: %s", error)


async def _shut_down(engine: Engine, context: ServerContext, runner: web.AppRunner, drain_s: float) -> None:
    context.draining = True
    await engine.close(drain_s=drain_s)
    await runner.cleanup()


@contextmanager
def stop_signals(stopping: asyncio.Event, before_end: Callable[[], object] = lambda: None) -> Iterator[None]:
    """First signal: stop. Second: leave at once, whatever threads are doing, but behind `before_end`."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        log.info("signal %d: stopping; a second one ends at once", number)
        stopping.set()
        for each in _SIGNALS:  # a plain handler: it must work when the loop is stuck
            loop.remove_signal_handler(each)
            signal.signal(each, lambda number, _: _end_at_once(number, before_end))

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


@contextmanager
def traces_on_signal(engine: Traced) -> Iterator[None]:
    """SIGUSR1 writes a trace; another one while that goes on waits its turn."""
    loop = asyncio.get_running_loop()
    writing: set[asyncio.Task[Path | None]] = set()

    def on_signal() -> None:
        task = loop.create_task(write_trace(engine), name="server.trace")
        writing.add(task)
        task.add_done_callback(writing.discard)

    loop.add_signal_handler(signal.SIGUSR1, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
        for task in writing:
            task.cancel()


def _end_at_once(number: int, before_end: Callable[[], object]) -> None:
    log.warning("second signal: ending at once")
    before_end()
    logging.shutdown()
    os._exit(128 + number)
