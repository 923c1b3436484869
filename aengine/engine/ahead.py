"""What an engine needs of the system before the interpreter can get to it.

Owns: torch's libraries, mapped while the modules of a command are still being imported.
Does not know: torch's modules, engines, configurations.
Invariants: returns at once; the work is a thread's that does not hold the interpreter, and nobody waits for it. What
cannot be had ahead is had later, by the import that needs it: nothing here fails.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

# In torch's own order. The second is nine tenths of its libraries' bytes, and 0.3 s of mapping, relocating and
# registering operators; of the third, which knows the interpreter, nothing is gained.
_LIBRARIES = (("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL), ("libtorch_cpu.so", os.RTLD_NOW))


def load_ahead() -> None:
    """Call it where a process begins that will load an engine."""
    if sys.platform != "linux" or "torch" in sys.modules:
        return
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return
    libraries = [(Path(spec.origin).parent / "lib" / name, flags) for name, flags in _LIBRARIES]
    threading.Thread(target=_map, args=(libraries,), name="aengine-ahead").start()


def _map(libraries: list[tuple[Path, int]]) -> None:
    """Up to the first that cannot be loaded. `ctypes.CDLL` would hold the interpreter meanwhile; a foreign call of the
    loader does not."""
    load = ctypes.CDLL(None).dlopen
    load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
    for path, flags in libraries:
        if not load(os.fsencode(path), flags):
            return
