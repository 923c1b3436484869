"""Loading an engine: all of its start that is slow.

Owns: the order of what is imported, found and built; the collector's rest meanwhile.
Does not know: the event loop, requests, what the parts are.
Invariants: blocking code, called in a worker thread (importing torch alone takes seconds, and a server listens
meanwhile); a model that does not exist is told before anything slow is imported.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import msgspec

from aengine.config import EngineConfig, home
from aengine.engine.process import give_back_free_memory

if TYPE_CHECKING:
    from aengine.engine.build import Parts
    from aengine.engine.ledger import PhaseHook, ProgressHook


def load(config: EngineConfig, phase_ended: PhaseHook, progressed: ProgressHook, *, own_process: bool) -> Parts:
    """Raises ModelNotFound, ModelLoadError or ConfigError. A packaged model exists; any other is looked for first.
    `progressed` may raise to end the loading; `own_process` as for `AsyncEngine`."""
    from aengine.models.packaged import PACKAGED
    from aengine.models.store import resolve

    if config.model.model not in PACKAGED:
        resolve(config.model.model, home=home(), progress=progressed)
    began_s = time.monotonic()
    collecting = gc.isenabled()
    gc.disable()  # nothing of what is imported and loaded is garbage; looking for it takes a tenth of the time
    try:
        from aengine.engine.build import build

        imports = ("imports", time.monotonic() - began_s)
        phase_ended(*imports)
        parts = build(config, phase_ended, progressed, own_process)
        if own_process:
            gc.freeze()  # all of it lives as long as the process: the first collection need not walk it (0.1 s)
    finally:
        if collecting or own_process:
            gc.enable()
    give_back_free_memory()
    parts.report = msgspec.structs.replace(parts.report, phases=(imports, *parts.report.phases))
    return parts
