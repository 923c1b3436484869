"""`aengine serve`: the HTTP server around one engine.

Owns: putting config, engine and server together; what is shown while they start.
Does not know: routes, requests, steps.
Invariants: the process ends with 0 only when it was asked to stop and drained.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from aengine import __version__
from aengine.cli.options import Parser, add_settings, config_of, print_config
from aengine.config import AengineConfig

if TYPE_CHECKING:
    from aengine.cli.startup import Startup

Serve = Callable[[AengineConfig, "Startup"], Coroutine[Any, Any, None]]


def parser() -> Parser:
    made = Parser(
        "serve",
        "Serve a model: OpenAI-compatible API under /v1, a chat page at /, metrics at /metrics.",
        epilog="Every setting is also a variable (AENGINE_PORT=9000) and a key of the --config file (port: 9000).",
    )
    add_settings(made, server=True)
    return made


def run(args: argparse.Namespace, serve: Serve | None = None) -> int:
    config = config_of(args)
    if args.print_config:
        return print_config(config)
    gc.disable()  # nothing of what is imported is garbage; the engine turns it on again when it has loaded
    try:
        from aengine.cli.startup import Startup
        from aengine.server.process import configure_logging, run_on_fast_loop

        configure_logging(config.server.log_level)
        startup = Startup(config.engine.model.model, __version__)
        run_on_fast_loop((serve or serve_engine)(config, startup))
    finally:
        gc.enable()
    return 0


async def serve_engine(config: AengineConfig, startup: Startup) -> None:
    """Listen, load, serve until told to stop. Raises what starting the engine or listening raised."""
    from aengine.frontends.parent import wanted

    frontends, line = wanted(config.server)
    startup.note(line)
    await (serve_here(config, startup) if not frontends else serve_by_frontends(config, startup, frontends))


async def serve_here(config: AengineConfig, startup: Startup) -> None:
    from aengine import AsyncEngine
    from aengine.server import run_server

    class TellingEngine(AsyncEngine):
        """Shows the start-up table as soon as the engine can answer."""

        async def start(self) -> None:
            await super().start()
            startup.ready(self.report)

    engine = TellingEngine(config.engine, on_phase=startup.phase, on_progress=startup.progress, own_process=True)
    await run_server(engine, config.server, on_listening=startup.listening)


async def serve_by_frontends(config: AengineConfig, startup: Startup, frontends: int) -> None:
    from aengine import AsyncEngine
    from aengine.frontends.hub import Hub
    from aengine.frontends.parent import Parent

    hub = Hub(frontends)
    engine = AsyncEngine(
        config.engine, on_phase=startup.phase, on_progress=startup.progress, own_process=True, outlet=hub
    )
    parent = Parent(config, engine, hub, frontends)
    await parent.run(startup.listening, lambda: startup.ready(engine.report))
