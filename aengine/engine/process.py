"""What an engine asks of the system for its own process.

Owns: giving memory back that the allocator holds; how often the garbage collector looks; how long a thread waits for
the interpreter; which threads come last.
Does not know: engines.
Invariants: memory is given back where the C library has a call for it; the collector never stops looking.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading

COLLECT_EVERY = (20_000, 10, 3)
TURN_S = 0.0005
SPARE_NICE = 10  # a tenth of a core that others want; at 19 a fault of its own could hold up whoever maps memory


def give_back_free_memory() -> None:
    """Loading leaves tens of MiB of freed blocks with the allocator, which would count as resident for ever."""
    if os.name != "posix":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def collect_seldom() -> None:
    """A thousand streams are 100,000 objects that live on, and next to no garbage has cycles. With Python's own figures
    (700, 10, 10) their arrival is 164 collections, the older generations taking 12 ms on average and up to 130; with
    these it is 5. What cycles hold stays below some 600,000 objects."""
    gc.set_threshold(*COLLECT_EVERY)


def take_spare_time() -> None:
    """The thread that calls this yields to others of its process, where the system has priorities of threads."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(SPARE_NICE, os.getpriority(os.PRIO_PROCESS, thread)))


def take_short_turns() -> float:
    """A thread that computes gives the interpreter to one that waits for it after TURN_S, where Python has 5 ms. Masks
    and results pass between threads several times a step, and where rows are many the loop's thread always computes.
    Returns the interval until now."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(min(before_s, TURN_S))
    return before_s
