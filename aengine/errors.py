"""Typed errors of every room.

Owns: the exception classes, each with its HTTP status, OpenAI error type and code.
Does not know: HTTP framing, requests, devices.
Invariants: the message names the offending value and the limit it broke; `param` names the request field at fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar


class AengineError(Exception):
    """Base of all errors raised on purpose. `status` is the HTTP status a server answers with."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(AengineError):
    """A request field has a wrong type or value, or asks for something that cannot be honoured."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt (plus requested output) is longer than the model's context."""

    code = "context_length_exceeded"


class RequestTooLarge(InvalidRequest):
    """The request needs more KV pages than the whole pool has; it could never run."""

    code = "request_too_large"


class InvalidGrammar(InvalidRequest):
    """A schema, pattern or grammar that is wrong or cannot be enforced. `place`: where in a schema ("$.items")."""

    code = "invalid_grammar"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: int | None = None, place: str = ""
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.place = place


class GrammarTooComplex(InvalidRequest):
    """A grammar that would take too long or too much memory to enforce."""

    code = "grammar_too_complex"


class AuthenticationFailed(AengineError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class OriginRefused(AengineError):
    """A page of another origin made a browser send this."""

    status = 403
    type = "invalid_request_error"
    code = "origin_refused"


class ModelNotFound(AengineError):
    """The named model is not the one served (HTTP), or was found nowhere (loading)."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class NotFound(AengineError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(AengineError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class BodyTooLarge(AengineError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class BodyTimeout(AengineError):
    """The request's body did not come in time."""

    status = 408
    type = "invalid_request_error"
    code = "body_timeout"


class QueueFull(AengineError):
    """The waiting room is full; try again later."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class NotReady(AengineError):
    """The engine is loading or draining; the message names the phase."""

    status = 503
    type = "service_unavailable"
    code = "not_ready"


class NotSupported(AengineError):
    """A feature this build or model does not have."""

    status = 501
    type = "not_supported_error"
    code = "not_supported"


class StepFailed(AengineError):
    """A device step raised; its rows fail with this error, other requests go on."""

    type = "server_error"
    code = "step_failed"


class NoTokenAllowed(InvalidRequest):
    """The request's own constraints (grammar, allowed tokens, bad words, biases) left no token to sample."""

    code = "no_token_allowed"


ALL_RULED_OUT = "all tokens are masked: the logits after masks and penalties are minus infinity everywhere"

NOTHING_FOLLOWS = "no token of the vocabulary can follow: it cannot spell what the grammar asks for next"

TOO_COMPLEX = "the grammar is too complex"  # how a row's message begins; what was too much follows


def row_error(message: str | None) -> AengineError:
    """What a row that failed alone with `message` stands for: a fault of its request, or of the step."""
    if message in (ALL_RULED_OUT, NOTHING_FOLLOWS):
        return NoTokenAllowed(f"the request's constraints exclude every token ({message})")
    if message is not None and message.startswith(TOO_COMPLEX):
        return GrammarTooComplex(message)
    return StepFailed(message or "the request failed in the engine")


class EngineDead(AengineError):
    """The core loop ended on an internal fault. Every open request ends with this error."""

    type = "server_error"
    code = "engine_dead"


class ConfigError(AengineError):
    """A configuration value is wrong or two of them contradict each other."""


class ModelLoadError(AengineError):
    """A model's files are missing, malformed or of an unsupported kind."""


class ServerUnreachable(AengineError):
    """A client got no answer, or only a part of one."""

    status = 502
    type = "server_error"
    code = "server_unreachable"


def error_from_wire(status: int, error: Mapping[str, Any], retry_after_s: int | None = None) -> AengineError:
    """What an envelope's inside ({message, type, param, code}) stands for: by its code, else by its status."""
    message = str(error.get("message") or f"the server answered {status}")
    code, param = error.get("code"), error.get("param")
    kinds = list(_kinds(AengineError))
    named = [kind for kind in kinds if code is not None and kind.code == code]
    plain = [kind for kind in kinds if kind.status == status and kind.code is None]
    fallen = [kind for kind in kinds if kind.status == status]
    kind = next(iter(named or plain or fallen), InvalidRequest if 400 <= status < 500 else AengineError)
    return kind(message, param=None if param is None else str(param), retry_after_s=retry_after_s)


def _kinds(base: type[AengineError]) -> Iterator[type[AengineError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)
