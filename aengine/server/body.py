"""Request bodies: bytes to validated structs.

Owns: JSON decoding, the translation of its errors, the names of ignored fields.
Does not know: what any field means.
Invariants: every fault of a body's text is a small InvalidRequest; `param` names the field
wherever it is known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web

from aengine.errors import InvalidRequest
from aengine.server.constraints import refuse_constraints
from aengine.server.context import CONTEXT, IGNORED

MAX_VALUES = 2**18  # two prompts of 128 Ki token ids; decoding holds up the event loop for all of them
MAX_FIELDS = 1_000  # unknown ones are looked at one by one; 8 MiB could hold a million

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")
_NOT_A_NUMBER = re.compile(rb'"(\w{1,64})"\s*:\s*(-?(?:NaN|Infinity))')
_TOO_DEEP = "the JSON is nested too deeply"


@dataclass(frozen=True, slots=True)
class Body(Generic[T]):
    """A decoded body; `ignored` are its unknown top-level fields in order, `size_bytes` its length."""

    value: T
    ignored: tuple[str, ...]
    size_bytes: int


async def read_body(request: web.Request, type: type[T]) -> Body[T]:
    """Reads and validates a JSON body and remembers its unknown fields for the response header."""
    data = await request.app[CONTEXT].uploads.read(request)
    _check_values(data)
    fields = decode_json(data, dict[str, msgspec.Raw])
    if len(fields) > MAX_FIELDS:
        raise InvalidRequest(f"the body has {len(fields)} fields; at most {MAX_FIELDS} are accepted")
    refuse_constraints(fields)
    value = decode_json(data, type)
    if getattr(value, "chat_template", None) is not None and not request.app[CONTEXT].config.client_chat_templates:
        raise InvalidRequest(
            "chat_template in a request is a program for this server to run; it is refused unless the server was "
            "started with --client-chat-templates",
            param="chat_template",
        )
    known = _known_fields(type)
    ignored = tuple(name for name in fields if name not in known)
    if ignored:
        request[IGNORED] = ignored
        request.app[CONTEXT].note_ignored(ignored)
    return Body(value, ignored, len(data))


def _check_values(data: bytes) -> None:
    """Refuse what decodes into too many objects. All values but the first of an array or object stand behind a comma,
    and nesting is bounded, so commas bound them; those in texts count too: no context holds so many."""
    commas = data.count(b",")
    if commas > MAX_VALUES:
        raise InvalidRequest(f"the body has {commas} commas, hence many values; at most {MAX_VALUES} are accepted")


def decode_json(data: bytes, type: Any) -> Any:
    """`data` as `type`; raises InvalidRequest that names the field."""
    try:
        return _decoder(type).decode(data)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    except msgspec.DecodeError as error:
        raise _syntax_error(str(error), data) from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except RecursionError:
        raise InvalidRequest(_TOO_DEEP) from None


@lru_cache(maxsize=64)  # one per schema
def _decoder(type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(type)


@lru_cache(maxsize=64)
def _known_fields(type: Any) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(type))


def _field_error(text: str) -> InvalidRequest:
    path = _PATH.search(text)
    param = path.group(1) if path else ""
    reason = text[: path.start()] if path else text
    missing = _MISSING.search(reason)
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return InvalidRequest(f"{param} is missing", param=param)
    if not param:
        return InvalidRequest(f"the body is not as expected: {reason}")
    return InvalidRequest(f"{param}: {reason}", param=param)


def _syntax_error(text: str, data: bytes) -> InvalidRequest:
    number = _NOT_A_NUMBER.search(data)
    if number:
        name, value = (part.decode() for part in number.groups())
        return InvalidRequest(f"{name}: {value} is not a JSON number", param=name)
    if "UTF-8" in text:
        return InvalidRequest("the body is not valid UTF-8")
    return InvalidRequest(f"the body is not valid JSON: {text}")
