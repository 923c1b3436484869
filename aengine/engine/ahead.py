"""Torch's libraries, mapped without the interpreter.

Owns: the thread that does it.
Does not know: torch's modules, engines.
Invariants: the interpreter is free meanwhile, but whoever asks the system's loader for anything waits, and with the
interpreter held: what is to run beside it has its extension modules imported before, and used once. Nothing here fails:
what cannot be mapped is left to the import of torch, which then says why.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# In torch's own order. The second is nine tenths of its bytes, and 0.3 s of relocating and of registering operators.
# What else torch loads knows the interpreter or takes a few milliseconds.
_LIBRARIES = (("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL), ("libtorch_cpu.so", os.RTLD_NOW))


@cache
def map_torch() -> threading.Thread:
    """-> the thread that maps them, started: one in a process. Where there is nothing to do it ends at once."""
    import mmap  # noqa: F401

    import llguidance  # noqa: F401
    import markupsafe  # noqa: F401
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    Tokenizer(BPE())  # the first one asks the loader for a source of random numbers
    thread = threading.Thread(target=_map, args=(_paths(),), name="aengine-libraries")
    thread.start()
    return thread


def _paths() -> list[tuple[Path, int]]:
    if sys.platform != "linux" or "torch" in sys.modules:
        return []
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    return [(Path(spec.origin).parent / "lib" / name, flags) for name, flags in _LIBRARIES]


def _map(libraries: list[tuple[Path, int]]) -> None:
    """Up to the first that cannot be had. `ctypes.CDLL` holds the interpreter while it loads; a foreign call of the
    system's own function does not."""
    if not libraries:
        return
    load = ctypes.CDLL(None).dlopen
    load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
    for path, flags in libraries:
        if not load(os.fsencode(path), flags):
            return
