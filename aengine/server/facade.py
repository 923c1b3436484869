"""The engine as the server sees it.

Owns: the protocols of everything the server calls; they are the whole of what it may know of the engine.
Does not know: how any of it is done, and no class that does it.
Invariants: only synchronous calls that return at once, and coroutines; values that cross are those of aengine.types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from aengine.server.parsers.regions import RegionStream
from aengine.types import HttpFigures, MediaInput, OutputDelta, SamplingParams, TokenLogprob

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]


class ModelFacts(Protocol):
    """The loaded model. Readable once `Engine.phase` is "ready"."""

    @property
    def names(self) -> tuple[str, ...]: ...  # served names, the main one first
    @property
    def max_model_len(self) -> int: ...  # tokens
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...
    @property
    def has_chat_template(self) -> bool: ...
    @property
    def takes_images(self) -> bool: ...
    @property
    def chat_stops(self) -> tuple[str, ...]: ...  # end an answer where the model has no template of its own
    @property
    def created(self) -> int: ...  # unix seconds


class HealthView(Protocol):
    @property
    def ok(self) -> bool: ...
    @property
    def phase(self) -> str: ...
    @property
    def reason(self) -> str | None: ...


class Text(Protocol):
    """Tokenizer and chat template. Coroutines work in threads; rendering raises InvalidRequest(param="messages")."""

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    async def encode_batch(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]: ...
    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...
    async def render_chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> str: ...
    async def encode_chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> list[int]: ...
    @property
    def chat_template(self) -> str | None: ...  # Jinja source; None: a plain fallback
    @property
    def has_response_template(self) -> bool: ...  # the checkpoint says itself how its answers are made up
    def response_stream(self, prompt: str, tools: Tools | None) -> RegionStream | None: ...
    def token_text(self, id: int) -> str: ...
    def token_bytes(self, id: int) -> bytes: ...


class Stream(Protocol):
    """The output of one submitted prompt: an async iterator of OutputDelta, the choices interleaved.

    `completion_tokens` is the running total over the choices; `prompt_logprobs` is complete before the first delta.
    `tap` is an offer that a stream need not use: while the reader waits for a delta, `take` may get it instead, and
    says whether it took it. Deltas with a finish_reason go to the reader.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_ids(self) -> list[int]: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprob | None] | None: ...

    def tap(self, take: Callable[[OutputDelta], bool]) -> None: ...  # deltas go to `take` while the reader waits
    def __aiter__(self) -> Stream: ...
    async def __anext__(self) -> OutputDelta: ...
    def abort(self) -> None: ...
    async def aclose(self) -> None: ...


class Engine(Protocol):
    """The façade. `submit` raises InvalidRequest, ContextLengthExceeded, QueueFull, NotReady or EngineDead; so does the
    stream, before its first delta, where the engine is in another process."""

    @property
    def phase(self) -> str: ...  # "loading model" ..., "ready", "draining", "closed", "dead"
    @property
    def model(self) -> ModelFacts: ...
    @property
    def text(self) -> Text: ...

    async def start(self) -> None: ...
    async def close(self, *, drain_s: float = 0.0) -> None: ...
    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        images: Sequence[MediaInput] = (),
    ) -> Stream: ...
    async def read_images(self, sources: Sequence[str]) -> Sequence[MediaInput]: ...  # data: URLs; InvalidRequest
    async def prepare(self, sampling: SamplingParams) -> None: ...  # its grammar, before `submit`; InvalidRequest
    def abort(self, request_id: str) -> bool: ...
    def health(self) -> HealthView: ...
    async def reset_prefix_cache(self) -> None: ...
    async def trace(self, seconds: float) -> bytes: ...  # Chrome's trace event JSON of the last seconds
    def bind_http(self, told: Callable[[], HttpFigures]) -> None: ...  # this process's own, for `metrics_text`
    async def metrics_text(self) -> bytes: ...  # Prometheus text, summed over all processes that serve


JsonObject = Mapping[str, Any]
