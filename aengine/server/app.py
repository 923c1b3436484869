"""The aiohttp application.

Owns: the application around the routes.
Does not know: sockets, signals (run.py), how a route answers.
Invariants: building an application starts nothing; it works on an engine in any phase.
"""

from __future__ import annotations

from aiohttp import web

from aengine.config import ServerConfig
from aengine.server.context import CONTEXT, ServerContext
from aengine.server.edge import add_headers, edge
from aengine.server.facade import Engine
from aengine.server.openapi import PATH, openapi_handler
from aengine.server.page import add_page
from aengine.server.routes import ROUTES, router_path


def create_app(engine: Engine, config: ServerConfig) -> web.Application:
    """The application around `engine`. Serve it with handler_cancellation=True, or disconnects go unnoticed."""
    app = web.Application(middlewares=[edge], client_max_size=config.max_body_bytes)
    app[CONTEXT] = ServerContext(engine, config)
    app.on_response_prepare.append(add_headers)
    add_page(app.router)
    app.router.add_get(PATH, openapi_handler(ROUTES, key=config.api_key is not None))
    for route in ROUTES:
        app.router.add_route(route.method, router_path(route.path), route.handler)
        if route.method == "GET":
            app.router.add_route("HEAD", router_path(route.path), route.handler)
    return app
