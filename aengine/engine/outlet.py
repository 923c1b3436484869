"""Where outputs go instead of the engine's own output task.

Owns: the protocol.
Does not know: who implements it (front-ends in other processes).
Invariants: as for the output task: outputs are taken in order, and waiting in `run` holds the core loop up.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from aengine.types import StepOutputs


class Outlet(Protocol):
    @property
    def open_choices(self) -> int: ...
    async def run(self, queue: asyncio.Queue[StepOutputs]) -> None: ...  # until cancelled
    async def all_done(self) -> None: ...  # until no choice is open
    def fail_all(self, message: str) -> None: ...  # the engine is dead
