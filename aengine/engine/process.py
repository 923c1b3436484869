"""What an engine asks of the system for its own process.

Owns: giving memory back that the allocator holds.
Does not know: engines.
Invariants: does nothing where the C library has no such call.
"""

from __future__ import annotations

import ctypes
import os


def give_back_free_memory() -> None:
    """Loading leaves tens of MiB of freed blocks with the allocator, which would count as resident for ever."""
    if os.name != "posix":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
