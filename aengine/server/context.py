"""What the handlers of one application share.

Owns: the engine and the settings, the counters, the budget of bodies, the readiness gate, the served names, the log of
ignored fields.
Does not know: HTTP messages.
Invariants: no handler touches the engine before `ready()` let it through; the log of ignored names is bounded.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from aiohttp import web

from aengine.config import ServerConfig
from aengine.errors import EngineDead, ModelNotFound, NotReady
from aengine.server.counters import Counters
from aengine.server.envelope import shorten
from aengine.server.facade import Engine
from aengine.server.uploads import Uploads

log = logging.getLogger("aengine.server")

LOADING_RETRY_S = 5  # openai-python retries twice by default: 10 s cover the loading of a small model
DRAINING_RETRY_S = 10
MAX_IGNORED_NAMES = 256


class ServerContext:
    """One per application. `draining` is set by the runner when the process was told to stop."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.draining = False
        self.counters = Counters()
        engine.bind_http(self.counters.figures)
        self.uploads = Uploads(
            self.counters,
            max_bytes=config.max_body_bytes,
            all_bytes=config.max_upload_bytes,
            timeout_s=config.body_timeout_s,
        )
        self._ignored: set[str] = set()

    def ready(self) -> Engine:
        """The engine; raises NotReady with the phase while it loads or drains, EngineDead when it is dead."""
        phase = self.engine.phase
        if self.draining or phase in ("draining", "closed"):
            raise NotReady("the server is shutting down (phase: draining)", retry_after_s=DRAINING_RETRY_S)
        if phase == "dead":
            raise EngineDead(self.engine.health().reason or "the engine died of an internal fault")
        if phase != "ready":
            raise NotReady(f"the server is not ready yet (phase: {phase})", retry_after_s=LOADING_RETRY_S)
        return self.engine

    @property
    def phase(self) -> str:
        return "draining" if self.draining else self.engine.phase

    def served_name(self, asked: str | None) -> str:
        """The model name to answer with: the asked one when it is served, the main one when none was asked for."""
        names = self.engine.model.names
        if not asked:
            return names[0]
        if asked in names:
            return asked
        served = ", ".join(repr(name) for name in names)
        raise ModelNotFound(f"the model {shorten(asked, 100)!r} does not exist; served here: {served}", param="model")

    def note_ignored(self, names: Iterable[str]) -> None:
        """Logs each ignored field once. A stranger can invent names, so only the first 256 are remembered."""
        for name in names:
            if name not in self._ignored and len(self._ignored) < MAX_IGNORED_NAMES:
                self._ignored.add(name)
                log.info("request field %r is not known here and was ignored (logged once)", shorten(name, 64))

    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: the same for the same version and model."""
        digest = hashlib.sha256(f"{server_version()}\0{self.engine.model.names[0]}".encode()).hexdigest()
        return f"fp_{digest[:10]}"


CONTEXT = web.AppKey("CONTEXT", ServerContext)
REQUEST_ID = web.RequestKey("REQUEST_ID", str)
IGNORED: web.RequestKey[tuple[str, ...]] = web.RequestKey("IGNORED", tuple)


@cache
def server_version() -> str:
    """Read once: finding and parsing the package's metadata takes 3 ms."""
    try:
        return version("aengine")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0.0.0"
