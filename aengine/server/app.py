"""The aiohttp application.

Owns: the routes.
Does not know: sockets, signals (run.py), how a route answers.
Invariants: building an application starts nothing; it works on an engine in any phase.
"""

from __future__ import annotations

from aiohttp import web

from aengine.config import ServerConfig
from aengine.server import admin, tokens
from aengine.server.chat import chat_completions
from aengine.server.completions import completions, embeddings
from aengine.server.context import CONTEXT, ServerContext
from aengine.server.edge import add_headers, edge
from aengine.server.facade import Engine
from aengine.server.page import add_page
from aengine.server.trace import trace


def create_app(engine: Engine, config: ServerConfig) -> web.Application:
    """The application around `engine`. Serve it with handler_cancellation=True, or disconnects go unnoticed."""
    app = web.Application(middlewares=[edge], client_max_size=config.max_body_bytes)
    app[CONTEXT] = ServerContext(engine, config)
    app.on_response_prepare.append(add_headers)
    add_page(app.router)
    app.router.add_get("/health", admin.health)
    app.router.add_get("/metrics", admin.metrics)
    app.router.add_get("/debug/trace", trace)
    app.router.add_get("/version", admin.version)
    app.router.add_get("/v1/models", admin.models)
    app.router.add_get("/v1/models/{id:.+}", admin.model)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/chat/completions/render", tokens.render)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/embeddings", embeddings)
    app.router.add_post("/tokenize", tokens.tokenize)
    app.router.add_post("/detokenize", tokens.detokenize)
    app.router.add_get("/tokenizer_info", tokens.tokenizer_info)
    app.router.add_post("/reset_prefix_cache", admin.reset_prefix_cache)
    return app
