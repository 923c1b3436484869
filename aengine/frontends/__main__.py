"""A front-end process.

Owns: its entry point: the pipe and the sockets it was given, its server.
Does not know: command lines of users; its configuration comes through the pipe.
Invariants: it ends when the engine process says so or is gone, and never outlives it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys

from aengine.errors import AengineError
from aengine.frontends.remote import RemoteEngine
from aengine.frontends.wire import Pipe, ToFrontend, Welcome
from aengine.server import run_server
from aengine.server.process import configure_logging, run_on_fast_loop

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Where the system offers it (Linux): killed when the engine process is gone, also when that was killed."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it went in between
            os._exit(1)


async def serve(pipe_fd: int, listening: list[int]) -> None:
    pipe = await Pipe.over(socket.socket(fileno=pipe_fd), ToFrontend)
    welcome = await pipe.receive()
    if welcome is None:
        return
    assert isinstance(welcome, Welcome)
    config = welcome.config
    configure_logging(config.server.log_level, f"front-end {welcome.index}: ")
    stopping = asyncio.Event()
    engine = RemoteEngine(config.engine, pipe, stopping)
    engine.listen()
    if welcome.restarted:  # until it can serve, connections wait in the sockets' queues
        await engine.start()
    sockets = [socket.socket(fileno=fd) for fd in listening]
    await run_server(engine, config.server, sockets=sockets, stopping=stopping)


def main() -> None:
    end_with_parent()
    pipe_fd, *listening = map(int, sys.argv[1:])
    try:
        run_on_fast_loop(serve(pipe_fd, listening))
    except AengineError as error:
        sys.exit(f"front-end: {error.message}")


main()
