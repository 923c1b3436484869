"""One HTTP request's work in the engine.

Owns: the streams of its prompts, their merging, the numbering of choices, the token counts.
Does not know: endpoints, JSON, SSE.
Invariants: either all prompts are submitted or none stays; leaving `async with job` aborts what is unfinished; a failed
choice ends the whole job with a typed error.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import msgspec

from aengine.errors import AengineError, NotReady, StepFailed, row_error
from aengine.server.facade import Engine, Stream
from aengine.server.parsers.thinking import ThoughtCount
from aengine.types import FinishReason, MediaInput, OutputDelta, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class JobHead:
    """What every chunk and answer of a job repeats. `created` is in unix seconds."""

    id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def new(cls, prefix: str, model: str, fingerprint: str) -> Self:
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model, fingerprint)


class Job:
    """Streams of k prompts with n choices each. Choice j of prompt i has index i * n + j."""

    def __init__(self, head: JobHead, streams: Sequence[Stream], n: int) -> None:
        self.head = head
        self.streams = streams
        self.n = n
        self.open_choices = n * len(streams)
        self.thoughts: Sequence[ThoughtCount] | None = None  # one per choice of a model that thinks
        self._pumps: list[asyncio.Task[None]] = []

    @property
    def choices(self) -> int:
        return self.n * len(self.streams)

    @property
    def done(self) -> bool:
        return self.open_choices == 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.done:  # at once, before any await: pages are wanted by others
            for stream in self.streams:
                stream.abort()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for stream in self.streams:
            await stream.aclose()

    def count_thoughts(self, delta: OutputDelta) -> None:
        """Once for each delta."""
        if self.thoughts is not None:
            self.thoughts[delta.index].add(delta.token_ids)

    def tap(self, take: Callable[[OutputDelta], bool]) -> None:
        """See `Stream.tap`. Several prompts are merged by tasks anyway, so they have none."""
        if len(self.streams) == 1:
            self.streams[0].tap(take)

    async def deltas(self) -> AsyncGenerator[OutputDelta, None]:
        """Deltas of all choices until each has finished. Raises the typed error of the first choice that fails."""
        source = self.streams[0] if len(self.streams) == 1 else None
        async with aclosing(self._only(source) if source is not None else self._merged()) as deltas:
            async for delta in deltas:
                self.count_thoughts(delta)
                if delta.finish_reason is not None:
                    _check_finish(delta)
                    self.open_choices -= 1
                yield delta
                if self.done:
                    return
        raise StepFailed(f"the engine ended the request with {self.open_choices} of {self.choices} choices open")

    async def _only(self, stream: Stream) -> AsyncGenerator[OutputDelta, None]:
        async for delta in stream:
            yield delta

    async def _merged(self) -> AsyncGenerator[OutputDelta, None]:
        # Two places a prompt: a slow reader stops the pumps, and the streams coalesce behind them.
        queue: asyncio.Queue[OutputDelta | Exception] = asyncio.Queue(2 * len(self.streams))
        self._pumps = [asyncio.create_task(self._pump(i, queue)) for i in range(len(self.streams))]
        while True:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            yield item

    async def _pump(self, i: int, queue: asyncio.Queue[OutputDelta | Exception]) -> None:
        left, base = self.n, i * self.n
        try:
            async for delta in self.streams[i]:
                left -= delta.finish_reason is not None
                await queue.put(msgspec.structs.replace(delta, index=base + delta.index))
        except Exception as error:  # whatever it is, the reader must not wait for ever
            await queue.put(error)
        else:
            if left:
                await queue.put(StepFailed(f"the engine ended prompt {i} with {left} of {self.n} choices open"))

    @property
    def prompt_tokens(self) -> int:
        return sum(len(stream.prompt_ids) for stream in self.streams)

    @property
    def cached_tokens(self) -> int:
        return sum(stream.cached_tokens for stream in self.streams)

    @property
    def completion_tokens(self) -> int:
        return sum(stream.completion_tokens for stream in self.streams)

    @property
    def reasoning_tokens(self) -> int | None:
        """Up to now; None: the model does not think."""
        return None if self.thoughts is None else sum(count.tokens for count in self.thoughts)

    def usage(self, completion_tokens: int | None = None) -> dict[str, Any]:
        """OpenAI's usage object; `completion_tokens` where tokens were made that the client does not get."""
        prompt = self.prompt_tokens
        completion = self.completion_tokens if completion_tokens is None else completion_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if (thoughts := self.reasoning_tokens) is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": thoughts}
        return usage


@dataclass(slots=True)
class Choice:
    """One choice, collected. `text` comes in pieces."""

    index: int
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None

    def add(self, delta: OutputDelta) -> None:
        self.pieces.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = str(delta.finish_reason), delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)


async def collect(job: Job) -> list[Choice]:
    """All choices in order of index, whole. Raises as `Job.deltas` does."""
    choices = [Choice(i) for i in range(job.choices)]
    async with aclosing(job.deltas()) as deltas:
        async for delta in deltas:
            choices[delta.index].add(delta)
    return choices


async def submit(
    engine: Engine,
    head: JobHead,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    *,
    priority: int | None,
    cache_salt: str | None,
    images: Sequence[MediaInput] = (),
) -> Job:
    """Submits all prompts or none; raises what `Engine.prepare` and `submit` raise. `images`: of the only prompt."""
    await engine.prepare(sampling)
    streams: list[Stream] = []
    try:
        for i, ids in enumerate(prompts):
            name = head.id if len(prompts) == 1 else f"{head.id}-{i}"
            streams.append(
                engine.submit(
                    ids, sampling, request_id=name, priority=priority or 0, cache_salt=cache_salt or "", images=images
                )
            )
    except AengineError:
        for stream in streams:
            stream.abort()
        for stream in streams:
            await stream.aclose()
        raise
    return Job(head, streams, sampling.n)


def _check_finish(delta: OutputDelta) -> None:
    if delta.finish_reason is FinishReason.ERROR:
        raise row_error(delta.error)
    if delta.finish_reason is FinishReason.ABORT:
        raise NotReady(delta.error or "the server stopped this request before its end")
