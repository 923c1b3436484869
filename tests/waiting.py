"""Waiting for what must happen, however slow the machine is.

A test waits for an event, never for a length of time: its deadline only ends a test that would wait for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE_S = 60.0


async def until(condition: Callable[[], object], seconds: float = DEADLINE_S) -> None:
    """Until `condition` holds; the loop turns meanwhile."""
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, f"it did not happen within {seconds:.0f} s"
        await asyncio.sleep(0.002)


async def turns(times: int = 100) -> None:
    """So many turns of the loop: whatever is ready, and what that makes ready, gets done; no time need pass."""
    for _ in range(times):
        await asyncio.sleep(0)


def wait_until(condition: Callable[[], object], seconds: float = DEADLINE_S) -> None:
    """`until`, where there is no loop."""
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, f"it did not happen within {seconds:.0f} s"
        time.sleep(0.005)
