"""KV pages touched before they are needed.

Owns: how much of the arena is kept ready beyond what has been used, and the thread that sees to it.
Does not know: pages, requests, how memory is touched.
Invariants: the arena is touched from its beginning on, each part once; what is in it does not change. The thread has
ended when `run` has; the event loop waits for it nowhere.

A system gives memory when it is first written to, 2 MiB at a time where there are huge pages. That takes 0.2 ms, or, in
a virtual machine whose own host has to find the memory, 8 ms, with one thread of a step at work and the others waiting:
a tenth of a step of 64 rows. A thread that yields to all others does it ahead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from aengine.engine.ledger import Touch
from aengine.engine.process import take_spare_time

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2
READY_LEAST = 128 * 2**20
READY_MOST = 1024 * 2**20
PIECE = 4 * 2**20


class TouchAhead:
    """Of an arena of `size` bytes, the first `used()` of them used, READY_LEAST more are kept ready; while nothing runs
    (`busy()` is False) as many again as are used, READY_MOST at most."""

    def __init__(self, size: int, used: Callable[[], int], busy: Callable[[], bool], touch: Touch) -> None:
        self._size = size
        self._used = used
        self._busy = busy
        self._touch = touch
        self.touched = 0

    def goal(self) -> int:
        """Bytes from the first on that should be ready now."""
        used = self._used()
        ready = READY_LEAST if self._busy() else max(READY_LEAST, min(READY_MOST, used))
        return min(self._size, used + ready)

    async def run(self) -> None:
        """Until all is touched, or the system refuses: pages then come when they are written, as they would anyway."""
        with ThreadPoolExecutor(1, "aengine-touch", initializer=take_spare_time) as thread:
            while self.touched < self._size:
                if self.touched >= self.goal():
                    await asyncio.sleep(LOOK_EVERY_S)
                    continue
                stop = min(self.touched + PIECE, self._size)
                try:
                    await _finished(thread.submit(self._touch, self.touched, stop))
                except (OSError, RuntimeError) as error:
                    log.warning("KV pages are not touched ahead any more: %s", error)
                    return
                self.touched = stop


async def _finished(work: Future[None]) -> None:
    """Cancelled, it still waits for the work to end, which an executor's end else would, with the event loop held."""
    waited = asyncio.wrap_future(work)
    try:
        await asyncio.shield(waited)
    except asyncio.CancelledError:
        await asyncio.wait([waited])
        raise
