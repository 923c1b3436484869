"""The output task: sampled token ids become text deltas on request streams.

Owns: one `Choice` per running sequence: its detokeniser, stop strings, counters and stream.
Does not know: pages, plans, HTTP.
Invariants: tokens of a handle are handled in order; a stop-string hit ends the choice here and asks for an abort, and
whatever the sequence still produces is ignored; a fault in one choice ends that choice only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from aengine.engine.stops import StopStrings
from aengine.engine.stream import RequestStream
from aengine.errors import EngineDead
from aengine.metrics import Metrics
from aengine.types import (
    Finish,
    FinishReason,
    Logprobs,
    OutputDelta,
    SamplingParams,
    StepOutputs,
    TokenLogprob,
)

if TYPE_CHECKING:
    from aengine.models.detokenize import TextStream

log = logging.getLogger(__name__)


class Choice:
    """One sequence on its way out. `index` is its place among the n choices of its request."""

    __slots__ = (
        "arrived_s",
        "detokenizer",
        "first_s",
        "handle",
        "index",
        "last_s",
        "prompt_tokens",
        "sampling",
        "stops",
        "stream",
        "tokens",
    )

    def __init__(
        self, handle: int, index: int, stream: RequestStream, sampling: SamplingParams, detokenizer: TextStream | None
    ) -> None:
        self.handle = handle
        self.index = index
        self.stream = stream
        self.sampling = sampling
        self.detokenizer = detokenizer
        self.stops = StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)
        self.prompt_tokens = len(stream.prompt_ids)
        self.tokens = 0
        self.arrived_s = time.monotonic()
        self.first_s = 0.0
        self.last_s = 0.0

    def text(self, token: int, *, hidden: bool) -> tuple[str, str | None]:
        """(text to send, stop string hit) for a new token; a `hidden` token adds no text (a stop token)."""
        self.tokens += 1
        if self.detokenizer is None or hidden:
            return "", None
        text = self.detokenizer.step(token) or ""
        if self.tokens < self.sampling.min_tokens:
            return self.stops.skip(text), None
        return self.stops.push(text)

    def rest(self) -> str:
        """Text held back for a stop string or an unfinished character, once the sequence has ended."""
        if self.detokenizer is None:
            return ""
        tail = self.detokenizer.flush()
        text, hit = self.stops.push(tail) if tail else ("", None)
        return text if hit else text + self.stops.flush()


class OutputTask:
    def __init__(self, queue: asyncio.Queue[StepOutputs], abort: Callable[[int], None], metrics: Metrics) -> None:
        self._queue = queue
        self._abort = abort
        self._metrics = metrics
        self._choices: dict[int, Choice] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def register(self, choice: Choice) -> None:
        """Before the sequence is submitted."""
        self._choices[choice.handle] = choice
        self._empty.clear()

    async def all_done(self) -> None:
        """Until no choice is open."""
        await self._empty.wait()

    def _drop(self, handle: int) -> Choice | None:
        choice = self._choices.pop(handle, None)
        if not self._choices:
            self._empty.set()
        return choice

    @property
    def open_choices(self) -> int:
        return len(self._choices)

    async def run(self) -> None:
        while True:
            self.handle(await self._queue.get())

    def fail_all(self, message: str) -> None:
        """The engine is dead: every open stream ends with an error."""
        for choice in list(self._choices.values()):
            choice.stream.fail(EngineDead(message))
            self._account(choice, FinishReason.ERROR)
        self._choices.clear()
        self._empty.set()

    # ---- one step's outputs

    def handle(self, outputs: StepOutputs) -> None:
        now_s = time.monotonic()
        for admitted in outputs.admitted:
            choice = self._choices.get(admitted.handle)
            if choice is not None:
                choice.stream.cached_tokens = max(choice.stream.cached_tokens, admitted.cached_tokens)
                self._metrics.request_admitted(now_s - choice.arrived_s, choice.prompt_tokens, admitted.cached_tokens)
        for handle, logprobs in outputs.prompt_logprobs:
            self._prompt_logprobs(handle, logprobs)
        finishes = {finish.handle: finish for finish in outputs.finished}
        for i, (handle, token) in enumerate(zip(outputs.handles.tolist(), outputs.tokens.tolist(), strict=True)):
            choice = self._choices.get(handle)
            if choice is not None:
                self._token(choice, token, outputs.logprobs.get(i), finishes.get(handle), now_s)
        for finish in outputs.finished:
            self._finish(finish)

    def _token(
        self, choice: Choice, token: int, logprobs: Logprobs | None, finish: Finish | None, now_s: float
    ) -> None:
        self._observe(choice, now_s)
        hidden = finish is not None and finish.stop_id == token and not choice.sampling.include_stop_str_in_output
        try:
            text, hit = choice.text(token, hidden=hidden)
        except Exception as error:
            self._fail(choice, error)
            return
        told = (token_logprobs(logprobs, 0),) if logprobs is not None else None
        if hit is None:
            choice.stream.push(OutputDelta(choice.index, text, (token,), told))
            return
        choice.stream.push(OutputDelta(choice.index, text, (token,), told, FinishReason.STOP, hit))
        self._drop(choice.handle)
        self._account(choice, FinishReason.STOP)
        if finish is None:
            self._abort(choice.handle)

    def _observe(self, choice: Choice, now_s: float) -> None:
        if choice.tokens == 0:
            choice.first_s = now_s
            self._metrics.observe_first_token(now_s - choice.arrived_s)
        else:
            self._metrics.observe_itl(now_s - choice.last_s)
        choice.last_s = now_s

    def _finish(self, finish: Finish) -> None:
        choice = self._choices.get(finish.handle)
        if choice is None:
            return
        try:
            rest = choice.rest()
        except Exception as error:
            self._fail(choice, error)
            return
        self._drop(choice.handle)
        delta = OutputDelta(choice.index, rest, (), None, finish.reason, finish.stop_id, finish.error)
        choice.stream.push(delta)
        self._account(choice, finish.reason)

    def _fail(self, choice: Choice, error: Exception) -> None:
        """A tokenizer fault ends this choice; the engine goes on."""
        log.error("request %s: detokenising failed: %r", choice.stream.request_id, error)
        self._metrics.fault("detokenizer")
        message = f"detokenising failed: {error}"
        self._drop(choice.handle)
        choice.stream.push(OutputDelta(choice.index, "", (), None, FinishReason.ERROR, None, message))
        self._account(choice, FinishReason.ERROR)
        self._abort(choice.handle)

    def _account(self, choice: Choice, reason: FinishReason) -> None:
        e2e_s = time.monotonic() - choice.arrived_s
        self._metrics.request_finished(reason.value, choice.prompt_tokens, choice.tokens, e2e_s)

    def _prompt_logprobs(self, handle: int, logprobs: Logprobs) -> None:
        choice = self._choices.get(handle)
        if choice is None:
            return
        choice.stream.add_prompt_logprobs([token_logprobs(logprobs, i) for i in range(len(logprobs.ranks))])


def token_logprobs(logprobs: Logprobs, position: int) -> TokenLogprob:
    """One position of a Logprobs as plain Python values."""
    ids = logprobs.ids[position].tolist()
    values = logprobs.values[position].tolist()
    top = tuple(zip(ids[1:], values[1:], strict=True))
    return TokenLogprob(ids[0], values[0], int(logprobs.ranks[position]), top)
