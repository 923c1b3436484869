"""What signals do while nothing is open or under way.

Owns: `ends_at_once`.
Does not know: commands; event loops, which have handlers of their own.
Invariants: nothing is raised, least of all in the middle of an import; the handlers before come back.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def ends_at_once(told: str, numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)) -> Iterator[None]:
    """A signal ends the process with one line: `told`, with the signal's name for {}."""

    def end(number: int, _frame: object) -> None:
        print(told.format(signal.Signals(number).name), file=sys.stderr, flush=True)
        os._exit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
