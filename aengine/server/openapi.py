"""`/openapi.json`: the API's own description.

Owns: the OpenAPI 3.1 document, made of the routes and the schemas of their bodies.
Does not know: what any field means; the structs' types and docstrings say that.
Invariants: made once; every route of the table is in it with every status it may answer, every error as an envelope.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from aengine.server.context import server_version
from aengine.server.edge import MESSAGES_PATH, OPEN_PATHS
from aengine.server.envelope import encode_json
from aengine.server.routes import Route

PATH = "/openapi.json"
_REF = "#/components/schemas/{name}"
_HEADERS = {
    "x-request-id": {"description": "The request's own, else a new one", "schema": {"type": "string"}},
    "x-aengine-ignored": {"description": "Fields that were accepted and ignored", "schema": {"type": "string"}},
}
_RETRY = {"Retry-After": {"description": "Seconds", "schema": {"type": "string", "pattern": "^[0-9]+$"}}}
_WORDS = {
    "200": "Done",
    "400": "A field is wrong, or asks for something that cannot be honoured",
    "401": "Missing or wrong key",
    "404": "Not found; for models, the served names are told",
    "413": "The body is too large",
    "429": "The waiting room is full",
    "500": "The request failed in the engine",
    "501": "Not available",
    "503": "Loading or draining; the phase is told",
}


class ErrorObject(msgspec.Struct, frozen=True):
    """What is wrong. `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """The body of every error."""

    error: ErrorObject


class TypedErrorEnvelope(msgspec.Struct, frozen=True, tag="error"):
    """The same with a type outside, for clients of the Messages API."""

    error: ErrorObject


def openapi_handler(routes: Sequence[Route]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    body = encode_json(document(routes))

    async def openapi(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    return openapi


def document(routes: Sequence[Route]) -> dict[str, Any]:
    bodies = list(dict.fromkeys(route.body for route in routes if route.body is not None))
    refs, schemas = msgspec.json.schema_components([*bodies, ErrorEnvelope, TypedErrorEnvelope], ref_template=_REF)
    body_refs = dict(zip(bodies, refs, strict=False))
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, body_refs)
    answers = _statuses(PATH, ("401",))
    answers["200"] = _response("200", {"application/json": {"schema": {"type": "object"}}})
    paths[PATH] = {"get": {"summary": "This document", "operationId": "get_openapi", "responses": answers}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "aengine", "version": server_version(), "description": "Text generation over HTTP."},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def _operation(route: Route, body_refs: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", route.path).strip("_")
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}_{name}",
        "responses": _responses(route),
    }
    if "{id}" in route.path:
        operation["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if route.body is not None:
        schema = {"application/json": {"schema": body_refs[route.body]}}
        operation["requestBody"] = {"required": True, "content": schema}
    return operation


def _responses(route: Route) -> dict[str, Any]:
    statuses = [] if route.path in OPEN_PATHS else ["401"]
    if route.body is not None:
        statuses += ["400", "413", "404"]
    if route.streams:
        statuses += ["429"]
    if route.loads:
        statuses += ["500", "503"]
    if route.answer is None:
        statuses.append("404" if "{id}" in route.path else "501")
    elif "{id}" in route.path:
        statuses.append("404")
    responses = _statuses(route.path, statuses)
    if route.answer is not None:
        schema = {"type": "string"} if route.answer == "text/plain" else {"type": "object"}
        content: dict[str, Any] = {route.answer: {"schema": schema}}
        if route.streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        responses["200"] = _response("200", content)
    return dict(sorted(responses.items()))


def _statuses(path: str, statuses: Sequence[str]) -> dict[str, Any]:
    envelope = TypedErrorEnvelope if path.startswith(MESSAGES_PATH) else ErrorEnvelope
    content = {"application/json": {"schema": {"$ref": _REF.format(name=envelope.__name__)}}}
    return {status: _response(status, content) for status in statuses}


def _response(status: str, content: dict[str, Any]) -> dict[str, Any]:
    headers = _HEADERS | _RETRY if status in ("429", "503") else _HEADERS
    return {"description": _WORDS[status], "headers": headers, "content": content}
