"""What signals do where the interpreter's way would not do.

Owns: `ends_at_once`, while nothing is open or under way; `uninterrupted`, while something is finished.
Does not know: commands; event loops, which have handlers of their own.
Invariants: nothing is raised, least of all in the middle of an import; the handlers before come back. Only the main
thread may ask for either.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Handler = Callable[[int, object], None] | signal.Handlers


@contextmanager
def ends_at_once(told: str, numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)) -> Iterator[None]:
    """A signal ends the process with one line: `told`, with the signal's name for {}."""

    def end(number: int, _frame: object) -> None:
        print(told.replace("{}", signal.Signals(number).name), file=sys.stderr, flush=True)
        os._exit(128 + number)

    with _handled(end, numbers):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C does nothing."""
    with _handled(signal.SIG_IGN, (signal.SIGINT,)):
        yield


@contextmanager
def _handled(handler: Handler, numbers: Sequence[signal.Signals]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
