"""Work of a start that needs no interpreter, begun before the rest of the start.

Owns: the thread that maps torch's largest library while Python modules are imported.
Does not know: what the library is used for, engines.
Invariants: nothing depends on it: whoever imports torch later finds the library there, or waits until it is, or loads
it as ever. Nothing of Python runs in the library's own initialisation (0.3 s of processor time on one core, while the
other imports the server).
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from contextlib import suppress
from pathlib import Path

_LIBRARY = "libtorch_cpu.so"


def begin_to_load_torch() -> threading.Thread | None:
    """The thread, which ends by itself; None where torch has no such library."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    library = Path(found.origin).parent / "lib" / _LIBRARY
    if not library.exists():
        return None
    thread = threading.Thread(target=_load, args=(library,), name="aengine-torch")
    thread.start()
    return thread


def _load(library: Path) -> None:
    with suppress(OSError):  # importing torch will tell why
        ctypes.CDLL(str(library))
