"""A server's engine as a Python object: `generate` and `chat` as `AsyncEngine` has them.

Owns: the HTTP session; requests, their retries before the first byte, their end; typed errors from the wire.
Does not know: schedulers, models.
Invariants: leaving a `generate` loop early closes its connection, which aborts the request on the server; nothing is
sent twice once a byte of an answer came.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import aiohttp
import msgspec

from aengine.client.answers import Gathered, WireAnswer, WireModels, WireText, WireTokens
from aengine.client.events import EventReader, EventTooLarge
from aengine.client.wire import Body, Prompt, messages_of, prompt_of, sampling_body, with_images
from aengine.errors import AengineError, InvalidRequest, NotReady, ServerUnreachable, error_from_wire
from aengine.types import RequestOutput, SamplingParams

T = TypeVar("T")
READY_POLL_S = 0.2
DONE = b"[DONE]"

_decode_answer = msgspec.json.Decoder(WireAnswer).decode


@dataclass(slots=True)
class _Open:
    """A request under way: first waiting for its response, then reading it."""

    waiting: asyncio.Task[aiohttp.ClientResponse] | None = None
    response: aiohttp.ClientResponse | None = None
    aborted: bool = False

    def abort(self) -> None:
        self.aborted = True
        if self.waiting is not None:
            self.waiting.cancel()
        if self.response is not None:
            self.response.close()


class AsyncClient:
    """One model of one server. A program written for `AsyncEngine` runs against a server by changing one line.

    >>> async with AsyncClient("http://127.0.0.1:8000") as engine:
    ...     async for out in engine.generate("Hello", SamplingParams(max_tokens=8)):
    ...         print(out.outputs[0].text)

    `model` None: the first that the server lists. `ready_s`: how long `start` waits for a server that is still loading.
    `retries`: how often a request that the server refused for being busy (429, 503) is sent again, after the time it
    asked for. `timeout_s` bounds the silence within an answer, not its length.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        model: str | None = None,
        api_key: str | None = None,
        ready_s: float = 60.0,
        retries: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._ready_s = ready_s
        self._retries = retries
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._open: dict[str, _Open] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- life

    async def start(self) -> None:
        """Wait until the server serves. Raises ServerUnreachable or NotReady after `ready_s` seconds."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=self._timeout_s)
            connector = aiohttp.TCPConnector(limit=0)  # how much runs at once is the caller's business
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        deadline_s = time.monotonic() + self._ready_s
        while True:
            try:
                models = await self.models()
                break
            except (ServerUnreachable, NotReady):
                if time.monotonic() >= deadline_s:
                    raise
            await asyncio.sleep(READY_POLL_S)
        if self.model is None:
            if not models:
                raise NotReady(f"{self.base_url} lists no model")
            self.model = models[0]

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Abort what is open after `drain_s` seconds, and close all connections. May be called twice."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ---- the engine's interface

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """As `AsyncEngine.generate`: a text, token ids or chat messages; yields the growing RequestOutput.

        Images go in messages. Raises what the server's answer says as the error class of that name, and
        ServerUnreachable when there is no answer. With `prompt_logprobs` the output comes in one piece.
        """
        sampling = sampling or SamplingParams()
        messages = messages_of(prompt)
        if messages is not None:
            body = self._chat_body(messages, sampling)
            path, text = "v1/chat/completions", None
        else:
            sent = prompt_of(prompt)
            body = {"prompt": sent, **sampling_body(sampling), "logprobs": sampling.logprobs}
            if sampling.max_tokens is None:
                body["max_tokens"] = await self._room(sent)
            path, text = "v1/completions", sent if isinstance(sent, str) else None
        body.update(priority=priority, cache_salt=cache_salt)
        outputs = self._outputs(path, body, sampling, text, request_id)
        async with contextlib.aclosing(cast(Any, outputs)):
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """As `AsyncEngine.chat`. The text is the model's own, tool calls and reasoning included, as in process."""
        sampling = sampling or SamplingParams()
        body = self._chat_body(with_images(messages), sampling)
        body.update(priority=priority, cache_salt=cache_salt)
        named = {"tools": tools, "chat_template": chat_template, "chat_template_kwargs": chat_template_kwargs}
        body.update((name, value) for name, value in named.items() if value is not None)
        outputs = self._outputs("v1/chat/completions", body, sampling, None, request_id)
        async with contextlib.aclosing(cast(Any, outputs)):
            async for output in outputs:
                yield output

    def abort(self, request_id: str) -> bool:
        """End a request early: its connection is closed, it finishes with ABORT. False when no such request is open."""
        request = self._open.get(request_id)
        if request is None or request.aborted:
            return False
        request.abort()
        return True

    # ---- what else a server tells

    async def models(self) -> list[str]:
        """Names that the server answers to."""
        return [card.id for card in (await self._json("GET", "v1/models", WireModels)).data]

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": add_special_tokens}
        return (await self._json("POST", "tokenize", WireTokens, body)).tokens

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        body = {"model": self.model, "tokens": list(ids)}
        return (await self._json("POST", "detokenize", WireText, body)).prompt

    async def _room(self, prompt: str | list[int]) -> int:
        """How many tokens the context still holds behind a prompt."""
        text = prompt if isinstance(prompt, str) else ""
        answer = await self._json("POST", "tokenize", WireTokens, {"model": self.model, "prompt": text})
        return max(1, answer.max_model_len - (answer.count if isinstance(prompt, str) else len(prompt)))

    # ---- requests

    def _chat_body(self, messages: list[dict[str, Any]], sampling: SamplingParams) -> Body:
        body: Body = {"messages": messages, **sampling_body(sampling), "parse_answer": False}
        if sampling.logprobs is not None:
            body.update(logprobs=True, top_logprobs=sampling.logprobs)
        return body

    async def _outputs(
        self, path: str, body: Body, sampling: SamplingParams, text: str | None, request_id: str | None
    ) -> AsyncIterator[RequestOutput]:
        name = f"req-{uuid.uuid4().hex}" if request_id is None else request_id
        if name in self._open:
            raise InvalidRequest(f"request id {name[:100]!r} is in use", param="request_id")
        body.update(model=self.model, return_token_ids=True, return_tokens_as_token_ids=True)
        gathered = Gathered(name, text, sampling)
        request = self._open[name] = _Open()
        self._idle.clear()
        try:
            if sampling.prompt_logprobs is not None:
                gathered.add(await self._whole(path, body, request))
            else:
                body.update(stream=True, stream_options={"include_usage": True})
                async for answer in self._chunks(path, body, request):
                    if gathered.add(answer) and not gathered.finished:
                        yield gathered.output()
            if not gathered.finished:
                raise ServerUnreachable(f"{self.base_url} ended the answer of {name[:100]!r} before its end")
            yield gathered.output()  # after the counts, which come last
        except (ServerUnreachable, _Aborted):
            if not request.aborted:
                raise
            gathered.abort()
            yield gathered.output()
        finally:
            del self._open[name]
            if not self._open:
                self._idle.set()

    async def _chunks(self, path: str, body: Body, request: _Open) -> AsyncIterator[WireAnswer]:
        reader = EventReader()
        async with self._answer("POST", path, body, request) as response:
            try:
                async for data in response.content.iter_any():
                    for event in reader.feed(data):
                        if event == DONE:
                            return
                        answer = _decode_answer(event)
                        if answer.error is not None:
                            raise error_from_wire(500, answer.error)
                        yield answer
            except (aiohttp.ClientError, TimeoutError, EventTooLarge, msgspec.DecodeError) as error:
                raise ServerUnreachable(f"{self.base_url} broke off the answer: {error}") from error

    async def _whole(self, path: str, body: Body, request: _Open) -> WireAnswer:
        async with self._answer("POST", path, body, request) as response:
            return await self._read(response, WireAnswer)

    async def _json(self, method: str, path: str, form: type[T], body: Body | None = None) -> T:
        async with self._answer(method, path, body, _Open(), retries=0) as response:
            return await self._read(response, form)

    async def _read(self, response: aiohttp.ClientResponse, form: type[T]) -> T:
        try:
            return msgspec.json.decode(await response.read(), type=form)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerUnreachable(f"{self.base_url} broke off the answer: {error}") from error
        except msgspec.DecodeError as error:
            message = f"{response.url} answered with {response.content_type} that is not as expected: {error}"
            raise ServerUnreachable(message) from error

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Body | None, request: _Open, *, retries: int | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response with status 200. Raises the error that another status names."""
        left = self._retries if retries is None else retries
        while True:
            async with await self._respond(method, path, body, request) as response:
                request.response = response
                if response.status == 200:
                    yield response
                    return
                failed = await _failure(response)
            if left <= 0 or failed.retry_after_s is None:
                raise failed
            left -= 1
            await asyncio.sleep(failed.retry_after_s)

    async def _respond(self, method: str, path: str, body: Body | None, request: _Open) -> aiohttp.ClientResponse:
        if self._session is None:
            raise NotReady("this client is not started, or closed")
        if request.aborted:
            raise _Aborted
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        sending = self._session.request(method, f"{self.base_url}/{path}", data=data, headers=headers)
        request.waiting = asyncio.ensure_future(_started(sending))
        try:
            return await request.waiting
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerUnreachable(f"{self.base_url} does not answer: {error or type(error).__name__}") from error
        except asyncio.CancelledError:
            if not request.aborted:  # the caller was cancelled, not the request
                request.waiting.cancel()
                raise
            raise _Aborted from None
        finally:
            request.waiting = None


class _Aborted(Exception):
    """The request was aborted before its response came."""


async def _started(sending: Awaitable[aiohttp.ClientResponse]) -> aiohttp.ClientResponse:
    return await sending


async def _failure(response: aiohttp.ClientResponse) -> AengineError:
    raw = await response.content.read(65_536)
    try:
        said = msgspec.json.decode(raw)["error"]
        told: Mapping[str, Any] = said if isinstance(said, dict) else {"message": str(said)}
    except (msgspec.DecodeError, KeyError, TypeError):
        told = {"message": f"{response.url} answers {response.status}: {raw[:200].decode(errors='replace')}"}
    wait = response.headers.get("Retry-After", "")
    return error_from_wire(response.status, told, int(wait) if wait.isdecimal() else None)
