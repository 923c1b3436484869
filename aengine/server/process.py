"""What a serving process sets up before it serves.

Owns: the log's format, the choice of the event loop.
Does not know: engines, sockets.
Invariants: neither changes once the loop runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any


def configure_logging(level: str, who: str = "") -> None:
    """aengine's own messages at `level`; other packages' only from warning up. To stderr. `who`: what each message
    begins with, where several processes write one log."""
    form = f"%(asctime)s %(levelname)-7s {who}%(message)s"
    logging.basicConfig(format=form, datefmt="%H:%M:%S", level=logging.WARNING)
    logging.getLogger("aengine").setLevel(level.upper())


def run_on_fast_loop(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` on uvloop where it is installed, else on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)
