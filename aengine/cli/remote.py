"""A server elsewhere, as `aengine chat` uses it.

Owns: the requests, reading an event stream, errors of the server and of the line as typed errors.
Does not know: conversations, terminals.
Invariants: one request at a time; an answer that nobody reads on closes its connection, which aborts it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Generator, Iterator
from typing import Any
from urllib.parse import urlsplit

from aengine.cli.session import Answer, Messages
from aengine.errors import AengineError, ContextLengthExceeded, InvalidRequest
from aengine.types import SamplingParams

TIMEOUT_S = 600.0  # between two pieces; a long prompt on a small machine takes minutes
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
    """No server answered, or the connection broke."""


class Remote:
    """`url`: with or without /v1. `model`: as the server names it; None: the first it serves."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"{url!r} is not the address of a server, such as http://127.0.0.1:8000", param="url")
        self._parts = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.model = self.models()[0]
        if model is not None:
            self.use(model)

    def models(self) -> tuple[str, ...]:
        with self._request("GET", "/v1/models", None) as response:
            return tuple(str(card["id"]) for card in json.load(response)["data"])

    def use(self, name: str) -> None:
        served = self.models()
        if name not in served:
            raise InvalidRequest(f"{name!r} is not served; there are {', '.join(served)}", param="model")
        self.model = name

    def answers(self, messages: Messages, sampling: SamplingParams) -> Generator[Answer, None, None]:
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True}
        body["temperature"] = sampling.temperature  # servers differ in what they take without it
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        body |= {name: value for name in SENT if (value := getattr(sampling, name)) != getattr(DEFAULTS, name)}
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        began_s = time.perf_counter()
        text = reasoning = ""
        ttft_s: float | None = None
        usage: dict[str, Any] = {}
        with self._request("POST", "/v1/chat/completions", body) as response:
            for chunk in _chunks(response):
                usage = chunk.get("usage") or usage
                delta = chunk["choices"][0].get("delta") or {} if chunk.get("choices") else {}
                thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                if ttft_s is None and (thought or delta.get("content")):
                    ttft_s = time.perf_counter() - began_s
                text += delta.get("content") or ""
                reasoning += thought
                yield _answer(text, reasoning, usage, ttft_s)

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT_S)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, data, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _problem(response)
            yield response
        except ConnectionRefusedError:
            where = f"{self._parts.scheme}://{self._parts.netloc}"
            raise Unreachable(f"no server listens on {where}; aengine serve starts one") from None
        except (OSError, http.client.HTTPException) as error:
            where = f"{self._parts.scheme}://{self._parts.netloc}"
            raise Unreachable(f"{where}: {error or type(error).__name__}") from None
        finally:
            connection.close()


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        chunk: dict[str, Any] = json.loads(data)
        if "error" in chunk:
            raise InvalidRequest(str(chunk["error"]["message"]))
        yield chunk
    raise Unreachable("the connection ended before the answer was complete")


def _answer(text: str, reasoning: str, usage: dict[str, Any], ttft_s: float | None) -> Answer:
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        text=text,
        tokens=int(usage.get("completion_tokens") or 0),
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
        ttft_s=ttft_s,
        reasoning=reasoning,
    )


def _problem(response: http.client.HTTPResponse) -> AengineError:
    try:
        error = json.load(response)["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = f"the server answered {response.status} {response.reason}", None
    if after := response.headers.get("Retry-After"):
        message += f" (try again in {after} s)"
    return ContextLengthExceeded(message) if code == ContextLengthExceeded.code else InvalidRequest(message)
