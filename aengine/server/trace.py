"""The timeline of the last seconds: `GET /debug/trace`, and SIGUSR1.

Owns: the window a caller may ask for, the file that a signal writes.
Does not know: what is in a trace.
Invariants: a file appears whole or not at all, for its owner's eyes; a signal never harms the server.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from aiohttp import web

from aengine.errors import AengineError, InvalidRequest
from aengine.server.context import CONTEXT
from aengine.server.envelope import shorten
from aengine.server.schemas import told

log = logging.getLogger("aengine.server")

MOST_S = 30.0


class TraceQuery(msgspec.Struct, frozen=True):
    """What `/debug/trace` takes, for the document."""

    seconds: Annotated[float, told(exclusiveMinimum=0, maximum=MOST_S)] | msgspec.UnsetType = msgspec.UNSET


class Traced(Protocol):
    async def trace(self, seconds: float) -> bytes: ...


async def trace(request: web.Request) -> web.StreamResponse:
    seconds = _seconds(request.query.get("seconds"))
    body = await request.app[CONTEXT].ready().trace(seconds)
    return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})


def _seconds(text: str | None) -> float:
    if text is None:
        return MOST_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds <= MOST_S:
        raise InvalidRequest(f"seconds is {shorten(text, 40)!r}, not in (0, {MOST_S:g}]", param="seconds")
    return seconds


async def write_trace(engine: Traced, folder: Path | None = None) -> Path | None:
    """The last 30 s as a file in `folder` (default: that of temporary files); the log says where, or why not."""
    try:
        body = await engine.trace(MOST_S)
        return await asyncio.to_thread(_write, body, folder or Path(tempfile.gettempdir()))
    except (AengineError, OSError) as error:
        log.warning("no trace was written: %s", error)
        return None


def _write(body: bytes, folder: Path) -> Path:
    path = folder / f"aengine-trace-{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    handle, name = tempfile.mkstemp(dir=folder, prefix="aengine-trace-", suffix=".part")
    with os.fdopen(handle, "wb") as file:
        file.write(body)
    Path(name).replace(path)
    log.info("wrote %s (%d bytes): open it in https://ui.perfetto.dev or chrome://tracing", path, len(body))
    return path
