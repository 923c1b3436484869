"""Answers as bytes: JSON bodies and the one error envelope.

Owns: {"error": {message, type, param, code}}, its typed twin, and the headers that go with a status.
Does not know: which request failed, or why.
Invariants: every error has exactly these four keys and its body stays under about 2 KB however large its cause was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from aengine.errors import AengineError

MAX_MESSAGE_CHARS = 1_000  # a 4 KB body once made another server answer 20 MB
MAX_PARAM_CHARS = 200
DEFAULT_RETRY_AFTER_S = 1

encode_json = msgspec.json.encode


def shorten(text: str, limit: int) -> str:
    """`text`, or its beginning and how long it was."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def error_object(error: AengineError) -> dict[str, Any]:
    param = None if error.param is None else shorten(error.param, MAX_PARAM_CHARS)
    message = shorten(error.message, MAX_MESSAGE_CHARS)
    return {"error": {"message": message, "type": error.type, "param": param, "code": error.code}}


def typed_error_object(error: AengineError) -> dict[str, Any]:
    """The same for clients of the Messages API, which look for a type outside as well."""
    return {"type": "error", **error_object(error)}


def error_response(error: AengineError, shape: Callable[[AengineError], dict[str, Any]] = error_object) -> web.Response:
    response = json_response(shape(error), status=error.status)
    if error.status in (429, 503):
        response.headers["Retry-After"] = str(error.retry_after_s or DEFAULT_RETRY_AFTER_S)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def json_response(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=encode_json(value), status=status, content_type="application/json")
