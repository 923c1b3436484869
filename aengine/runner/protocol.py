"""What the engine knows of a device.

Owns: the Runner and DeviceStream protocols.
Does not know: scheduling, requests, text.
Invariants: `launch` never blocks on the device; work of one stream runs in launch order; a step's handle is awaited
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aengine.types import StepHandle, StepPlan


class Event(Protocol):
    """A point in a stream's work. Raises from `wait` what the work before it raised."""

    def wait(self) -> None:
        """Block the calling thread (GIL released) until the stream reached this point."""
        ...

    def done(self) -> bool: ...


class DeviceStream(Protocol):
    def launch(self, fn: Callable[[], None]) -> None:
        """Enqueue work; waits for none of it, at most for an idle stream to begin."""
        ...

    def record(self) -> Event: ...

    def close(self) -> None: ...


class Runner(Protocol):
    """Executes step plans in the order they are launched. One per engine."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Stage the plan's values and enqueue the step; returns at once."""
        ...

    async def close(self) -> None:
        """Wait for launched work, then free the device's resources."""
        ...
