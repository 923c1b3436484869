"""What every request passes: identity, keys, origins, and errors as envelopes.

Owns: x-request-id, the API key check, CORS, the mapping of exceptions to the error envelope.
Does not know: endpoints beyond their paths.
Invariants: every answer carries x-request-id; every error is an envelope; keys are compared in constant time.
"""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from aengine.config import ServerConfig
from aengine.errors import (
    AengineError,
    AuthenticationFailed,
    BodyTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    OriginRefused,
)
from aengine.server.connections import Connection
from aengine.server.context import CONTEXT, IGNORED, REQUEST_ID, ServerContext
from aengine.server.envelope import error_object, error_response, shorten, typed_error_object
from aengine.server.page import PREFIX

log = logging.getLogger("aengine.server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = frozenset(("/", "/trace", "/health"))
MESSAGES_PATH = "/v1/messages"
MAX_IGNORED_SHOWN = 32
_LOCAL_ORIGIN = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_CHANGING = frozenset(("POST", "PUT", "PATCH", "DELETE"))
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_EXPOSED = "x-request-id, x-aengine-ignored, x-aengine-phase, retry-after"


@web.middleware
async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one middleware."""
    connection = request.protocol
    if isinstance(connection, Connection):  # not a test's own server
        connection.gate.begin(connection)
    context = request.app[CONTEXT]
    request[REQUEST_ID] = _request_id(request)
    if request.method == "OPTIONS":
        return _preflight(request, context)
    try:
        if request.path not in OPEN_PATHS and not request.path.startswith(PREFIX):
            check_key(request, context.config.api_key)
            check_origin(request, context.config)
        return await handler(request)
    except AengineError as error:
        return _failed(request, error)
    except web.HTTPException as error:
        return _http_error(request, error)
    except Exception:
        id = request[REQUEST_ID]
        log.exception("%s %r (%s) failed on an internal fault", request.method, shorten(request.path, 200), id)
        return _failed(request, AengineError(f"internal error; the server's log has more under {id}"))


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Runs before any answer's headers leave, streamed ones too."""
    response.headers["Server"] = "aengine"  # aiohttp would name itself and Python with their versions
    if request.app[CONTEXT].draining:  # the client's next request goes to whoever takes this one's place
        response.force_close()
        response.headers["Connection"] = "close"
    id = request.get(REQUEST_ID)
    if id is not None:
        response.headers["x-request-id"] = id
        if request.path.startswith(MESSAGES_PATH):
            response.headers["request-id"] = id  # the name that Messages clients look for
    ignored: tuple[str, ...] = request.get(IGNORED, ())
    if ignored:
        response.headers["x-aengine-ignored"] = ignored_header(ignored)
    origin = request.headers.get("Origin")
    if origin is not None:
        response.headers.add("Vary", "Origin")
        if origin_allowed(origin, request.app[CONTEXT].config.cors_origins):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED


def ignored_header(names: tuple[str, ...]) -> str:
    """The names, at most 32 of them; those that do not fit a header are shown as `?`."""
    shown = [name if _FIELD_NAME.fullmatch(name) else "?" for name in names[:MAX_IGNORED_SHOWN]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")


def check_key(request: web.Request, key: str | None) -> None:
    """Raises AuthenticationFailed; the message never repeats what was sent."""
    if key is None:
        return
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    for sent in (bearer, request.headers.get("x-api-key", "").strip()):  # the second is what Messages clients send
        if hmac.compare_digest(sent.encode("utf-8", "surrogateescape"), key.encode()):
            return
    raise AuthenticationFailed("missing or wrong API key; send 'Authorization: Bearer <key>' or 'x-api-key: <key>'")


def check_origin(request: web.Request, config: ServerConfig) -> None:
    """Without a key, any page that a user of this machine opens could make the browser send requests here, though not
    read the answers. Raises OriginRefused."""
    origin = request.headers.get("Origin")
    if config.api_key is not None or origin is None or request.method not in _CHANGING:
        return
    own = origin.partition("://")[2] == request.headers.get("Host")
    if not own and not origin_allowed(origin, config.cors_origins):
        raise OriginRefused(f"pages of {shorten(origin, 100)!r} may not call this server; see cors_origins")


def origin_allowed(origin: str, configured: tuple[str, ...]) -> bool:
    return _LOCAL_ORIGIN.fullmatch(origin) is not None or origin in configured or "*" in configured


def _request_id(request: web.Request) -> str:
    sent = request.headers.get("x-request-id", "")
    return sent if _REQUEST_ID.fullmatch(sent) else f"req-{uuid.uuid4().hex}"


def _preflight(request: web.Request, context: ServerContext) -> web.Response:
    """Answers OPTIONS without a key: browsers send none. Refusal is the absence of the allowing headers."""
    response = web.Response(status=204)
    origin = request.headers.get("Origin")
    if origin is not None and origin_allowed(origin, context.config.cors_origins):
        asked = request.headers.get("Access-Control-Request-Headers", "authorization, content-type")
        response.headers["Access-Control-Allow-Methods"] = "GET, HEAD, POST, OPTIONS"
        response.headers["Access-Control-Allow-Headers"] = asked[:1_000]
        response.headers["Access-Control-Max-Age"] = "600"
    return response


def _failed(request: web.Request, error: AengineError) -> web.Response:
    response = error_response(error, typed_error_object if request.path.startswith(MESSAGES_PATH) else error_object)
    if error.status == 503:
        response.headers["x-aengine-phase"] = request.app[CONTEXT].phase
    return response


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    """aiohttp's own errors: unknown paths, wrong methods, oversized bodies."""
    where = f"{request.method} {shorten(request.path, 200)}"
    if error.status == 404:
        return _failed(request, NotFound(f"there is no {where}"))
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        response = _failed(request, MethodNotAllowed(f"{where} is not possible; allowed: {allowed}"))
        response.headers["Allow"] = allowed
        return response
    if error.status == 413:
        limit = request.app[CONTEXT].config.max_body_bytes
        return _failed(request, BodyTooLarge(f"the body has more than the {limit} bytes that are accepted"))
    if 400 <= error.status < 500:
        return _failed(request, InvalidRequest(f"{where}: {error.reason}"))
    return _failed(request, AengineError(f"{where}: {error.reason}"))
