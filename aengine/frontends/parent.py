"""The engine process with its front-end processes around it.

Owns: the listening sockets, the children, their restarts, start, drain and end of the whole.
Does not know: requests, what a front-end does.
Invariants: the sockets live as long as this process, so that a connection made while a front-end is restarted waits for
the new one. No child outlives this process: it kills them where it ends at once, the system does where it is killed,
and a front-end whose pipe ends leaves. The engine is closed on every other way out.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace

from aengine.config import AengineConfig, ServerConfig
from aengine.engine.async_engine import AsyncEngine
from aengine.errors import ModelLoadError
from aengine.frontends.hub import Hub, Lost
from aengine.frontends.wire import Pipe, ToEngine, Welcome
from aengine.server.run import BACKLOG, LAST_WRITES_S, cannot_listen, stop_signals, traces_on_signal, url_of

log = logging.getLogger("aengine.frontends")

FEW_CORES = 8
MOST = 4
LEAVE_S = LAST_WRITES_S + 2.0  # for a front-end to end once it closed its pipe
TRIES = 3  # to start a front-end that has never been up
BACKOFF_S = (0.0, 0.5, 2.0, 5.0)
LOOK_EVERY_S = 1.0
LIVED_S = 10.0  # a front-end that lived so long is restarted at once


def wanted(config: ServerConfig) -> tuple[int, str]:
    """(front-ends, a line that says so)."""
    cores = len(os.sched_getaffinity(0))
    count, why = config.frontends, ""
    if count is None:
        count, why = (0 if cores < FEW_CORES else min(MOST, cores // 4)), f" (auto: {cores} cores)"
    return count, f"HTTP and text: {f'{count} front-end processes' if count else 'in the engine process'}{why}"


def share(config: AengineConfig, count: int) -> AengineConfig:
    """The configuration of one of `count` front-ends. What all bodies hold keeps the limit of the whole server. The
    system draws a front-end for each connection, so one has three deviations more than its even share about once in a
    thousand cases: so much more it takes, which makes the sum 5 % larger at 16,384 connections and four front-ends."""
    server = config.server
    even = server.max_connections / count
    connections = min(server.max_connections, math.ceil(even + 3 * math.sqrt(even * (1 - 1 / count))))
    upload_bytes = max(server.max_upload_bytes // count, server.max_body_bytes)  # else none takes the largest body
    limits = replace(server, max_connections=connections, max_upload_bytes=upload_bytes)
    return replace(config, server=limits)


class Parent:
    def __init__(self, config: AengineConfig, engine: AsyncEngine, hub: Hub, count: int) -> None:
        self._config = config
        self._engine = engine
        self._hub = hub
        self._count = count
        self._stopping = asyncio.Event()
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        hub.engine = engine

    async def run(self, on_listening: Callable[[str], None], on_ready: Callable[[], None]) -> None:
        """Serves until SIGINT or SIGTERM, then drains; a second signal ends at once. Raises ConfigError when the
        address cannot be had, and what `engine.start` raised."""
        with ExitStack() as closing, stop_signals(self._stopping, self._kill), traces_on_signal(self._engine):
            sockets = [listening_sockets(self._config.server, closing)]
            port = sockets[0][0].getsockname()[1]
            sockets += [listening_sockets(self._config.server, closing, port) for _ in range(1, self._count)]
            on_listening(url_of(*sockets[0][0].getsockname()[:2]))
            keepers = [asyncio.create_task(self._keep(index, own)) for index, own in enumerate(sockets)]
            watching = [asyncio.create_task(work) for work in (self._hub.watch(), self._continue_stopped())]
            try:
                await self._start_and_serve(keepers, on_ready)
            finally:
                await self._end(keepers, [one for own in sockets for one in own])
                for watch in watching:
                    watch.cancel()
                await asyncio.gather(*watching, return_exceptions=True)

    async def _start_and_serve(self, keepers: list[asyncio.Task[None]], on_ready: Callable[[], None]) -> None:
        start = asyncio.create_task(self._start(on_ready))
        stop = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((start, stop, *keepers), return_when=asyncio.FIRST_COMPLETED)
            while not stop.done():
                for task in (start, *keepers):  # a keeper ends only by raising
                    if task.done():
                        task.result()
                await asyncio.wait((stop, *keepers), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            start.cancel()
            await asyncio.gather(stop, start, return_exceptions=True)

    async def _start(self, on_ready: Callable[[], None]) -> None:
        await self._engine.start()
        await self._hub.all_up.wait()
        on_ready()

    async def _end(self, keepers: list[asyncio.Task[None]], listening: list[socket.socket]) -> None:
        self._stopping.set()
        for one in listening:  # else connections wait at the socket of a front-end that has drained and gone
            one.close()
        ready = self._engine.phase == "ready"
        drain_s = self._config.server.shutdown_timeout_s if ready and self._hub.all_up.is_set() else 0.0
        if drain_s:
            log.info("draining: running requests may take %.0f s more", drain_s)
        self._hub.stop_all()
        await asyncio.wait(keepers, timeout=drain_s + LEAVE_S)
        for child in self._children.values():
            child.kill()
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        for child in self._children.values():
            child.wait()
        await self._engine.close()

    def _kill(self) -> None:
        """All front-ends, at once, from a signal handler: they do not outlive this process even for a moment."""
        running = [child.pid for child in self._children.values() if child.returncode is None]
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in running:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    # ---- children

    async def _keep(self, index: int, listening: list[socket.socket]) -> None:
        """One front-end, and the next in its place, until the end. Raises when it cannot be started at all."""
        failures = 0
        while not self._stopping.is_set():
            began_s = time.monotonic()
            try:
                lost = await self._child(index, listening)
                code = await self._reaped(index)
            except OSError as error:
                if index in self._children:
                    raise
                lost, code = Lost(0), str(error)  # no process, or no socket to it, can be had now
            if self._stopping.is_set():
                return
            failures = 0 if time.monotonic() - began_s > LIVED_S else failures + 1
            if failures >= TRIES and not self._hub.all_up.is_set():
                raise ModelLoadError(f"front-end {index} ended with {code} {failures} times before it was up")
            log.error("front-end %d ended with %s: %s; it is restarted", index, code, lost)
            if self._hub.all_up.is_set():
                self._engine.metrics.frontend_lost(lost.sequences)
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S)) - 1] if failures else 0.0)

    async def _child(self, index: int, listening: list[socket.socket]) -> Lost:
        """Run it to its end."""
        ours, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno(), *(one.fileno() for one in listening)]
            self._children[index] = subprocess.Popen(  # noqa: ASYNC220 - it returns once the child was made
                [sys.executable, "-m", "aengine.frontends", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent, which drains them
            )
        pipe = await Pipe.over(ours, ToEngine)
        try:
            pipe.send(Welcome(share(self._config, self._count), index, self._hub.all_up.is_set()))
            return await self._hub.serve(index, pipe)
        finally:
            pipe.cut()

    async def _continue_stopped(self) -> None:
        """Until cancelled: a front-end that a signal has stopped goes on. Its clients would wait, for nobody else takes
        what comes to its socket, and to end it would cost them their requests."""
        while True:
            for index, child in self._children.items():
                if os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG):  # noqa: ASYNC222 - WNOHANG
                    log.error("front-end %d was stopped by a signal; it is told to go on", index)
                    os.kill(child.pid, signal.SIGCONT)
                    if self._engine.phase == "ready":
                        self._engine.metrics.fault("frontend_stopped")
            await asyncio.sleep(LOOK_EVERY_S)

    async def _reaped(self, index: int) -> str:
        """How it ended. One without a pipe is of no use: it gets a moment, or the drain's last writes, to leave."""
        child = self._children[index]
        deadline_s = time.monotonic() + LEAVE_S
        while child.poll() is None:
            if time.monotonic() > deadline_s:
                child.kill()
            await asyncio.sleep(0.01)
        del self._children[index]
        code = child.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def listening_sockets(config: ServerConfig, closing: ExitStack, port: int | None = None) -> list[socket.socket]:
    """One for each address of the host, shared by SO_REUSEPORT. `port`: the one that the first front-end got; None:
    nobody else may have it."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        made: list[socket.socket] = []
        for family, kind, protocol, _, address in dict.fromkeys(found):
            number = port or (made[0].getsockname()[1] if made else config.port)
            if port is None and number:
                _check_free(family, kind, protocol, (address[0], number, *address[2:]))
            made.append(closing.enter_context(socket.socket(family, kind, protocol)))
            if family == socket.AF_INET6:
                made[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            made[-1].bind((address[0], number, *address[2:]))
            made[-1].listen(BACKLOG)
            made[-1].setblocking(False)
        return made
    except (OSError, ValueError) as error:
        raise cannot_listen(config, error) from error


def _check_free(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> None:
    """Another server with SO_REUSEPORT would share the port, and its connections, without a word."""
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(AttributeError):
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind(address)
