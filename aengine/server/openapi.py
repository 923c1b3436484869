"""`/openapi.json`: the API's own description.

Owns: the OpenAPI 3.1 document, made of the routes and the schemas of their bodies.
Does not know: what any field means; the structs' types and docstrings say that.
Invariants: made once; every route of the table is in it with every status it may answer, every error as an envelope.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from aiohttp import web

from aengine.server.anthropic_schema import CountBody, MessagesBody
from aengine.server.context import server_version
from aengine.server.edge import MESSAGES_PATH, OPEN_PATHS
from aengine.server.envelope import encode_json
from aengine.server.responses_schema import ResponsesBody
from aengine.server.routes import Route
from aengine.server.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

PATH = "/openapi.json"
_REF = "#/components/schemas/{name}"
_HEADERS = {
    "x-request-id": {
        "description": "The request's own, else a new one",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    },
    "x-aengine-ignored": {"description": "Fields that were accepted and ignored", "schema": {"type": "string"}},
}
_RETRY = {"Retry-After": {"description": "Seconds", "required": True, "schema": {"type": "integer", "minimum": 1}}}
_OWN_HEADERS = {  # by status
    "401": {"WWW-Authenticate": {"description": "Bearer", "required": True, "schema": {"const": "Bearer"}}},
    "405": {"Allow": {"description": "Methods", "required": True, "schema": {"type": "string"}}},
    "429": _RETRY,
    "503": _RETRY | {"x-aengine-phase": {"description": "The phase", "required": True, "schema": {"type": "string"}}},
}
# One event: what Open API before 3.2 can say of a stream. `data` of the last one may be `[DONE]`.
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string", "contentMediaType": "application/json"}},
    "required": ["data"],
}
_HELLO = [{"role": "user", "content": "Say hello."}]
_EXAMPLES: dict[type[msgspec.Struct], dict[str, Any]] = {  # one body of each kind
    ChatBody: {"messages": _HELLO, "max_tokens": 16, "temperature": 0},
    CompletionBody: {"prompt": "Once upon a time", "max_tokens": 16},
    ResponsesBody: {"input": "Say hello.", "max_output_tokens": 16},
    MessagesBody: {"messages": _HELLO, "max_tokens": 16},
    CountBody: {"messages": _HELLO},
    TokenizeBody: {"prompt": "Once upon a time"},
    DetokenizeBody: {"tokens": [1, 2, 3]},
}
_WORDS = {
    "200": "Done",
    "400": "A field is wrong, or asks for something that cannot be honoured",
    "401": "Missing or wrong key",
    "403": "A page of another origin made a browser send this",
    "404": "Not found; for models, the served names are told",
    "405": "Not this method",
    "408": "The body did not come in time",
    "413": "The body is too large",
    "429": "The waiting room, or the room for bodies that are being read, is full",
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


def openapi_handler(routes: Sequence[Route], *, key: bool) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The document is made when it is first asked for: it takes 30 ms and more of a start."""
    body = cache(lambda: encode_json(document(routes, key=key)))

    async def openapi(request: web.Request) -> web.StreamResponse:
        return web.Response(body=await asyncio.to_thread(body), content_type="application/json")

    return openapi


def document(routes: Sequence[Route], *, key: bool) -> dict[str, Any]:
    """`key`: whether the server asks for one."""
    kinds = {kind for route in routes for kind in (route.body, route.answer, route.query) if isinstance(kind, type)}
    structs = sorted(kinds, key=lambda kind: kind.__name__)
    refs, schemas = msgspec.json.schema_components([*structs, ErrorEnvelope, TypedErrorEnvelope], ref_template=_REF)
    described = dict(zip(structs, refs, strict=False))
    paths: dict[str, Any] = {}
    for route in routes:
        query = schemas.pop(route.query.__name__) if route.query is not None else {}
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, described, query)
    answers = _statuses(PATH, ("401", "405"))
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
        "security": [{"bearer": []}, {"x-api-key": []}] if key else [{}],
    }


def _operation(route: Route, described: Mapping[type[msgspec.Struct], Any], query: Mapping[str, Any]) -> dict[str, Any]:
    """`described`: the schemas of bodies and answers; `query`: that of what stands behind the path's question mark."""
    name = re.sub(r"\W+", "_", route.path).strip("_")
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}_{name}",
        "responses": _responses(route, described),
    }
    parameters = [
        {"name": name, "in": "query", "schema": schema} for name, schema in query.get("properties", {}).items()
    ]
    if "{id}" in route.path:
        parameters.append({"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}})
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        schema = {"application/json": {"schema": described[route.body], "example": _EXAMPLES[route.body]}}
        operation["requestBody"] = {"required": True, "content": schema}
    if route.path in OPEN_PATHS:
        operation["security"] = []
    return operation


def _responses(route: Route, described: Mapping[type[msgspec.Struct], Any]) -> dict[str, Any]:
    statuses = ["405"] if route.path in OPEN_PATHS else ["401", "405"]
    if route.method == "POST":
        statuses.append("403")
    if route.body is not None:
        statuses += ["400", "404", "408", "413", "429"]
    if route.query is not None:
        statuses.append("400")
    if route.loads:
        statuses += ["500", "503"]
    if route.answer is None:
        statuses.append("404" if "{id}" in route.path else "501")
    elif "{id}" in route.path:
        statuses.append("404")
    responses = _statuses(route.path, statuses)
    if route.answer is not None:
        content: dict[str, Any]
        if isinstance(route.answer, str):
            content = {route.answer: {"schema": {"type": "string"}}}
        else:
            content = {"application/json": {"schema": described[route.answer]}}
        if route.streams:
            content["text/event-stream"] = {"schema": _EVENT}
        responses["200"] = _response("200", content)
    return dict(sorted(responses.items()))


def _statuses(path: str, statuses: Sequence[str]) -> dict[str, Any]:
    envelope = TypedErrorEnvelope if path.startswith(MESSAGES_PATH) else ErrorEnvelope
    content = {"application/json": {"schema": {"$ref": _REF.format(name=envelope.__name__)}}}
    return {status: _response(status, content) for status in statuses}


def _response(status: str, content: dict[str, Any]) -> dict[str, Any]:
    headers = _HEADERS | _OWN_HEADERS.get(status, {})
    return {"description": _WORDS[status], "headers": headers, "content": content}
