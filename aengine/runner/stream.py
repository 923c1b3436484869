"""A worker thread as a device stream, and the one thread that waits for devices.

Owns: `ThreadStream` (launch order, where an error of the work surfaces), `Waiter` (from a blocking event to a callback
on the event loop).
Does not know: what the work is, torch, step plans.
Invariants: work runs in launch order on one thread. An error surfaces in the first event recorded after the work that
raised it, and only there; later work still runs. Nothing polls. Both queues hold at most what the engine keeps in
flight, depth + 1 steps, so they need no bound of their own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue

from aengine.runner.protocol import Event

HAND_OVER_S = 0.001  # an idle thread takes work after 0.1 ms; one that does not within this is not waited for
# (that, and what the interpreter's lock then takes: a turn for each thread that computes in Python)


class _ThreadEvent:
    """A point in a ThreadStream's work. It is reached once, so a lock, held until then, does for a threading.Event."""

    __slots__ = ("_ahead", "_error", "_reached")

    def __init__(self) -> None:
        self._ahead = threading.Lock()
        self._ahead.acquire()
        self._reached = False
        self._error: BaseException | None = None

    def reach(self, error: BaseException | None) -> None:
        self._error = error
        self._reached = True
        self._ahead.release()

    def wait(self) -> None:
        with self._ahead:
            if self._error is not None:
                raise self._error

    def done(self) -> bool:
        return self._reached


class ThreadStream:
    """A `DeviceStream` whose device is a thread.

    `initialise` runs first on that thread (for instance to set its number of compute threads); what it raises, the
    constructor raises. `hand_over`: who launches work on an idle thread lets it begin first, for work that soon lets go
    of the interpreter. Else the interpreter, which both need, stays with the giver for a turn while the device waits.
    """

    def __init__(
        self,
        *,
        initialise: Callable[[], None] | None = None,
        hand_over: bool = False,
        name: str = "aengine-stream",
    ) -> None:
        self._hand_over = hand_over
        self._queue: SimpleQueue[Callable[[], None] | _ThreadEvent | None] = SimpleQueue()
        self._launched = self._done = 0  # the first is written by who launches, the second by the thread
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        if initialise is not None:
            self.launch(initialise)
            self._await_start()

    def _await_start(self) -> None:
        try:
            self.record().wait()
        except BaseException:
            self.close()
            raise

    def launch(self, fn: Callable[[], None]) -> None:
        self._check_open()
        idle = self._launched == self._done
        self._launched += 1
        if not (idle and self._hand_over):
            self._queue.put(fn)
            return
        taken = threading.Lock()
        taken.acquire()

        def begin() -> None:
            taken.release()
            fn()

        self._queue.put(begin)
        taken.acquire(timeout=HAND_OVER_S)

    def record(self) -> Event:
        self._check_open()
        event = _ThreadEvent()
        self._queue.put(event)
        return event

    def close(self) -> None:
        """Run what was launched, then end the thread. May be called twice."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self._thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"stream {self._thread.name} is closed")

    def _work(self) -> None:
        error: BaseException | None = None
        while (item := self._queue.get()) is not None:
            if isinstance(item, _ThreadEvent):
                item.reach(error)
                error = None
                continue
            try:
                item()
            except BaseException as raised:  # whatever it is, it belongs to its step, not to this thread
                error = error or raised
            self._done += 1
            del item  # a step's tensors must not live on until the next step comes


class Waiter:
    """One thread that blocks on the oldest event and then calls back on the loop. Events come in stream order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, name: str = "aengine-waiter") -> None:
        self._loop = loop
        self._queue: SimpleQueue[tuple[Event, Callable[[BaseException | None], None]] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def notify(self, event: Event, callback: Callable[[BaseException | None], None]) -> None:
        """Call `callback(error or None)` on the loop once `event` is reached."""
        if self._closed:
            raise RuntimeError(f"waiter {self._thread.name} is closed")
        self._queue.put((event, callback))

    def close(self) -> None:
        """Wait for the events that were handed in, then end the thread. May be called twice."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            event, callback = item
            error = _outcome(event)
            try:
                self._loop.call_soon_threadsafe(callback, error)
            except RuntimeError:  # the loop is closed: nobody is left to be told
                continue


def _outcome(event: Event) -> BaseException | None:
    try:
        event.wait()
    except BaseException as error:
        return error
    return None
