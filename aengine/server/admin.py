"""Endpoints about the server itself: models, health, metrics, version, cache reset.

Owns: their answers.
Does not know: requests.
Invariants: /health and /version answer in every phase; the others say 503 and the phase until the model is loaded.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from aengine.errors import NotReady, NotSupported
from aengine.server.context import CONTEXT, LOADING_RETRY_S, server_version
from aengine.server.envelope import json_response
from aengine.server.facade import ModelFacts

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def models(request: web.Request) -> web.StreamResponse:
    model = request.app[CONTEXT].ready().model
    return json_response({"object": "list", "data": [_card(model, name) for name in model.names]})


async def model(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    facts = context.ready().model
    return json_response(_card(facts, context.served_name(request.match_info["id"])))


def _card(model: ModelFacts, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "aengine",
        "root": model.names[0],
        "parent": None,
        "max_model_len": model.max_model_len,
        "input_modalities": ["text", "image"] if model.takes_images else ["text"],
    }


async def health(request: web.Request) -> web.StreamResponse:
    """200 only while the engine makes progress; else 503 with the phase."""
    context = request.app[CONTEXT]
    view = context.engine.health()
    if view.ok and not context.draining and view.phase == "ready":
        return json_response({"status": "ok", "phase": view.phase})
    known = view.phase not in ("ready", "dead")  # while it loads or drains the phase says all
    why = "" if known or not view.reason else f": {view.reason}"
    raise NotReady(f"not ready (phase: {context.phase}){why}", retry_after_s=LOADING_RETRY_S)


async def metrics(request: web.Request) -> web.StreamResponse:
    body = await request.app[CONTEXT].engine.metrics_text()
    return web.Response(body=body, headers={"Content-Type": METRICS_TYPE})


async def version(request: web.Request) -> web.StreamResponse:
    return json_response({"version": server_version()})


async def reset_prefix_cache(request: web.Request) -> web.StreamResponse:
    await request.app[CONTEXT].ready().reset_prefix_cache()
    return json_response({"status": "ok"})


async def adapters(request: web.Request) -> web.StreamResponse:
    raise NotSupported("this server has no adapters; it serves its model as it is")
