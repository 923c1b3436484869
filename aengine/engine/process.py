"""What an engine asks of the system for its own process.

Owns: giving memory back that the allocator holds; short turns for the event loop's thread.
Does not know: engines.
Invariants: does nothing where the system has no such call.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

SHORT_TURN_NS = 100_000  # the least the kernel takes
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_OTHER = 0
_RESET_ON_FORK = 1  # threads that the calling one starts have turns of the usual length


def give_back_free_memory() -> None:
    """Loading leaves tens of MiB of freed blocks with the allocator, which would count as resident for ever."""
    if os.name != "posix":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def take_short_turns() -> bool:
    """Let the calling thread run soon after it wakes, beside threads that compute without a pause: it asks Linux (6.12
    and newer) for turns of 0.1 ms instead of 3, so that its next turn is due earlier than theirs. Its share of the
    processor stays the same. False: the system does not know of it."""
    number = _SCHED_SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None or os.sched_getscheduler(0) != _SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = struct.pack("IIQiIQQQ", 48, _SCHED_OTHER, _RESET_ON_FORK, nice, 0, SHORT_TURN_NS, 0, 0)  # struct sched_attr
    return bool(ctypes.CDLL(None).syscall(number, 0, wanted, 0) == 0)
