"""An engine inside a command.

Owns: the façade's part that commands use, a thread with an event loop that an engine lives in, the cut of an answer
into thoughts and text.
Does not know: flags, terminals.
Invariants: an engine that was started is closed; an answer that nobody reads on is aborted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from aengine.config import EngineConfig
from aengine.errors import InvalidRequest
from aengine.types import FinishReason, RequestOutput, SamplingParams

T = TypeVar("T")
Messages = list[dict[str, Any]]


class Report(Protocol):
    """What start-up took: phases in seconds, a memory ledger in bytes, the table of pages, notes for the reader."""

    @property
    def phases(self) -> tuple[tuple[str, float], ...]: ...
    @property
    def ledger(self) -> tuple[tuple[str, int], ...]: ...
    @property
    def pages(self) -> tuple[str, ...]: ...
    @property
    def lines(self) -> tuple[str, ...]: ...


class Text(Protocol):
    """Facts about a model's texts."""

    @property
    def chat_template(self) -> str | None: ...
    def token_bytes(self, id: int, /) -> bytes: ...


class Engine(Protocol):
    async def start(self) -> None: ...
    async def close(self, *, drain_s: float = 0.0) -> None: ...
    def generate(self, prompt: Any, sampling: SamplingParams, /) -> AsyncIterator[RequestOutput]: ...
    def chat(self, messages: Messages, sampling: SamplingParams, /) -> AsyncIterator[RequestOutput]: ...
    @property
    def report(self) -> Report: ...
    @property
    def text(self) -> Text: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer so far, from whatever gives answers. `ttft_s`: None until the first token; `cut_off`: it ended because
    no more tokens were allowed or fit."""

    text: str
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float | None = None
    reasoning: str = ""
    cut_off: bool = False


class Chatter(Protocol):
    """What a conversation is held with. Closing the generator early aborts the answer."""

    @property
    def model(self) -> str: ...
    def models(self) -> tuple[str, ...]: ...
    def use(self, name: str, /) -> None: ...
    def answers(self, messages: Messages, sampling: SamplingParams, /) -> Generator[Answer, None, None]: ...


Factory = Callable[[EngineConfig], Engine]
Split = Callable[[str, bool], tuple[str, str]]


def real_engine(config: EngineConfig) -> Engine:
    from aengine import AsyncEngine

    engine: Engine = AsyncEngine(config)
    return engine


class EngineThread:
    """An engine on an event loop in a thread of its own, so that the main thread can wait for a person.

    A context manager: entering starts the engine (and raises what starting raised), leaving closes it.
    """

    def __init__(self, config: EngineConfig, factory: Factory) -> None:
        self._config = config
        self._factory = factory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="aengine-engine", daemon=True)
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "used before it was entered"
        return self._engine

    def __enter__(self) -> EngineThread:
        self._thread.start()
        try:
            self._call(self._open())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call(self.engine.close())
        finally:
            self._stop()

    def chat(self, messages: Messages, sampling: SamplingParams) -> Generator[RequestOutput, None, None]:
        """The growing answer; each output is the same object further on, so read a field once.

        Closing the generator early (Ctrl-C, break) aborts the request.
        """
        # Bounded by the answer: one entry per delta, and the engine ends a request at its token limit.
        deltas: queue.SimpleQueue[RequestOutput | None] = queue.SimpleQueue()
        pump = self._submit(self._pump(messages, sampling, deltas))
        try:
            while (output := deltas.get()) is not None:
                yield output
            pump.result()
        finally:
            pump.cancel()
            concurrent.futures.wait([pump])

    @property
    def model(self) -> str:
        return self._config.model.model

    def models(self) -> tuple[str, ...]:
        return (self.model,)

    def use(self, name: str) -> None:
        if name != self.model:
            raise InvalidRequest(f"this process holds {self.model}; start `aengine chat {name}` for another model")

    def answers(self, messages: Messages, sampling: SamplingParams) -> Generator[Answer, None, None]:
        with contextlib.closing(self.chat(messages, sampling)) as outputs:
            split: Split | None = None
            for output in outputs:
                choice, prompt_ids = output.outputs[0], output.prompt_token_ids
                split = split or splitter(self.engine.text, prompt_ids)
                text, reasoning = split(choice.text, choice.finish_reason is not None)
                yield Answer(
                    text=text,
                    tokens=len(choice.token_ids),
                    prompt_tokens=len(prompt_ids),
                    cached_tokens=output.num_cached_tokens,
                    ttft_s=output.ttft_s,
                    reasoning=reasoning,
                    cut_off=choice.finish_reason == FinishReason.LENGTH,
                )

    async def _open(self) -> None:
        self._engine = self._factory(self._config)
        await self._engine.start()

    async def _pump(
        self, messages: Messages, sampling: SamplingParams, deltas: queue.SimpleQueue[RequestOutput | None]
    ) -> None:
        try:
            async for output in self.engine.chat(messages, sampling):
                deltas.put(output)
        finally:
            deltas.put(None)

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._call(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def splitter(facts: Text, prompt_ids: Sequence[int]) -> Split:
    """-> what cuts a growing answer, and whether it is whole, into text and thoughts."""
    if "think" not in (facts.chat_template or "").lower():  # the parsers come with the server, whose import takes 0.2 s
        return lambda text, whole: (text, "")
    from aengine.server.parsers import Cutter, find_marks, prompt_opens
    from aengine.server.pieces import Reasoning
    from aengine.server.pieces import Text as Said

    marks = find_marks("auto", facts.chat_template)
    cutter = Cutter(think=marks, opened=prompt_opens(marks, prompt_ids, facts))
    seen, said, thought = 0, "", ""

    def split(text: str, whole: bool) -> tuple[str, str]:
        nonlocal seen, said, thought
        for piece in (*cutter.feed(text[seen:]), *(cutter.finish() if whole else ())):
            if isinstance(piece, Reasoning):
                thought += piece.text
            elif isinstance(piece, Said):
                said += piece.text
        seen = len(text)
        return said, thought

    return split
