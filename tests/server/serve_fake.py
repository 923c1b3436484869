"""A serving process around a fake engine, for tests of signals. Arguments: FakeEngine and ServerConfig fields, JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from server_fakes import FakeEngine

from aengine.config import ServerConfig
from aengine.errors import AengineError, ModelLoadError
from aengine.server import run_server


def main():
    engine_fields, server_fields = (json.loads(arg) for arg in sys.argv[1:3])
    if "load_error" in engine_fields:
        engine_fields["load_error"] = ModelLoadError(engine_fields["load_error"])
    engine = FakeEngine(phase="created", **engine_fields)
    config = ServerConfig(**{"port": 0, **server_fields})
    try:
        asyncio.run(run_server(engine, config, on_listening=lambda url: print(url, flush=True)))
    except AengineError as error:
        sys.exit(f"error: {error}")
    print("closed" if engine.phase == "closed" else "left open", flush=True)


main()
