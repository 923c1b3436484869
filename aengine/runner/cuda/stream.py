"""The two streams of a CUDA device as one `DeviceStream`.

Owns: which stream steps compute on, the leaf stream that brings results to the host, where an error of a launch
surfaces.
Does not know: what a step is.
Invariants: work is enqueued by the caller of `launch`, on the caller's thread: enqueuing does not wait for the device.
Nothing on the device ever waits for the copy stream. An error raised while enqueuing surfaces in the next event only.
"""

from __future__ import annotations

from collections.abc import Callable

from aengine.runner.cuda.api import DeviceApi
from aengine.runner.cuda.api import Event as CudaEvent
from aengine.runner.protocol import Event


class _Point:
    """An event of the copy stream, and what went wrong while the work before it was enqueued."""

    def __init__(self, event: CudaEvent, error: BaseException | None) -> None:
        self._event, self._error = event, error

    def wait(self) -> None:
        self._event.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._event.done()


class CudaStream:
    """`compute` runs steps; `copy` is the leaf that waits for them and that only the host waits for."""

    def __init__(self, api: DeviceApi) -> None:
        self.api = api
        self.compute, self.copy = api.stream("compute"), api.stream("copy")
        self._error: BaseException | None = None
        self._closed = False

    def launch(self, fn: Callable[[], None]) -> None:
        self._check_open()
        try:
            with self.api.on(self.compute):
                fn()
        except Exception as error:  # belongs to the step whose event comes next
            self._error = self._error or error

    def record(self) -> Event:
        """Reached when all that was launched has run and its copies to the host have arrived."""
        self._check_open()
        error, self._error = self._error, None
        self.copy.wait(self.compute.record())
        return _Point(self.copy.record(), error)

    def close(self) -> None:
        """Wait for the device. May be called twice."""
        if not self._closed:
            self._closed = True
            self.compute.record().wait()
            self.copy.record().wait()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the device's stream is closed")
