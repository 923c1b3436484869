"""A server elsewhere, as `aengine chat` uses it.

Owns: the requests, errors of the server and of the line as typed errors.
Does not know: conversations, terminals.
Invariants: one request at a time; an answer that nobody reads on closes its connection, which aborts it. Whatever comes
from the other side, or does not come, is an answer or a typed error of one line.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import ssl
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from aengine.cli.session import Answer, Messages
from aengine.cli.settings import near
from aengine.cli.streams import Gathered, Malformed, chunks, said
from aengine.errors import AengineError, ContextLengthExceeded, InvalidRequest
from aengine.types import SamplingParams

CONNECT_S = 10.0
LISTING_S = 30.0
TIMEOUT_S = 600.0  # between two pieces; a long prompt on a small machine takes minutes
MAX_BYTES = 4 * 2**20  # of a body that is no stream
NAMED = 12  # models in a message: some servers have hundreds
SENT = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
)
DEFAULTS = SamplingParams(max_tokens=None)


class Unreachable(AengineError):
    """No server answered, or not as one does, or the connection broke."""


@dataclass(frozen=True, slots=True)
class Address:
    """Of a server; `path` comes before /v1."""

    secure: bool
    host: str
    port: int | None
    path: str

    @classmethod
    def read(cls, url: str) -> Address:
        """`url`: with or without /v1, http:// where no scheme is named. Raises InvalidRequest."""
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port
            host = (parts.hostname or "").encode("idna").decode()
        except ValueError as error:
            raise InvalidRequest(f"{url!r} is not the address of a server: {error}", param="url") from None
        if parts.username is not None or parts.password is not None:
            raise InvalidRequest("the URL names a user; a server's key is given as --api-key", param="url")
        if (
            parts.scheme not in ("http", "https")
            or not re.fullmatch(r"[!-~]+", host)
            or re.search(r"[\0- \x7f]", url)
            or parts.query
            or parts.fragment
        ):
            message = f"{url!r} is not the address of a server, such as http://127.0.0.1:8000"
            raise InvalidRequest(message, param="url")
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(parts.scheme == "https", host, port, quote(path, safe="/%:@!$&'()*+,;=~"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"http{'s' if self.secure else ''}://{host}{port}{self.path}"

    def connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=CONNECT_S)


class Remote:
    """`url`: with or without /v1. `model`: as the server names it; None: the first it serves."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        self._at = Address.read(url)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._keyed = bool(key)
        served = self.models()
        self.model = served[0]
        if model is not None:
            self._choose(model, served)

    @property
    def where(self) -> str:
        return str(self._at)

    def models(self) -> tuple[str, ...]:
        """At least one. Raises Unreachable."""
        with self._request("GET", "/v1/models", None, LISTING_S) as response:
            listed = _json(response.read(MAX_BYTES))
        cards = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            kind = response.headers.get_content_type()
            raise Unreachable(f"{self._at}/v1/models is no list of models ({kind}): is it a server of this kind?")
        if not cards:
            raise Unreachable(f"{self._at} serves no model")
        return tuple(str(card["id"]) for card in cards)

    def use(self, name: str) -> None:
        self._choose(name, self.models())

    def _choose(self, name: str, served: tuple[str, ...]) -> None:
        if name not in served:
            more = f" and {len(served) - NAMED} others" if len(served) > NAMED else ""
            there = f"there are {', '.join(served[:NAMED])}{more}{near(name, served) if more else ''}"
            raise InvalidRequest(f"{name!r} is not served; {there}", param="model")
        self.model = name

    def answers(self, messages: Messages, sampling: SamplingParams) -> Generator[Answer, None, None]:
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True}
        body["temperature"] = sampling.temperature  # servers differ in what they take without it
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        body |= {name: value for name in SENT if (value := getattr(sampling, name)) != getattr(DEFAULTS, name)}
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        gathered = Gathered()
        with self._request("POST", "/v1/chat/completions", body, TIMEOUT_S) as response:
            if (kind := response.headers.get_content_type()) != "text/event-stream":
                told = said(_json(response.read(MAX_BYTES)))
                raise Unreachable(f"{self._at} answered with {kind}, not with a stream{f': {told}' if told else ''}")
            for chunk in chunks(response):
                yield gathered.add(chunk)
            if not gathered.complete:
                raise Unreachable(f"{self._at}: the connection ended before the answer was complete")

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: object, timeout_s: float) -> Iterator[http.client.HTTPResponse]:
        connection = self._at.connection()
        waits_s = CONNECT_S
        try:
            connection.connect()
            waits_s = timeout_s
            connection.sock.settimeout(timeout_s)
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._at.path + path, data, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._problem(response, path)
            yield response
        except Malformed as error:
            raise Unreachable(f"{self._at} {error}") from None
        except ConnectionRefusedError:
            raise Unreachable(f"no server listens on {self._at}; aengine serve starts one") from None
        except TimeoutError:
            raise Unreachable(f"{self._at}: nothing came for {waits_s:.0f} s") from None
        except ssl.SSLError as error:
            raise Unreachable(f"{self._at}: {error.reason or error}; is it http://?") from None
        except (OSError, http.client.HTTPException) as error:
            told = getattr(error, "strerror", None) or " ".join(str(error).split())[:200] or type(error).__name__
            raise Unreachable(f"{self._at}: {told}") from None
        finally:
            connection.close()

    def _problem(self, response: http.client.HTTPResponse, path: str) -> AengineError:
        told = _json(response.read(MAX_BYTES))
        error = told.get("error") if isinstance(told, dict) else None
        code = error.get("code") if isinstance(error, dict) else None
        message = f"{self._at}{path} answered {response.status}: {said(told) or response.reason}"
        if after := response.headers.get("Retry-After"):
            message += f" (try again in {after} s)"
        if response.status == 401 and not self._keyed:
            message += " (--api-key or AENGINE_API_KEY gives one)"
        return ContextLengthExceeded(message) if code == ContextLengthExceeded.code else InvalidRequest(message)


def _json(data: bytes) -> object:
    """None for what is no JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
