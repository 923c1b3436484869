"""The output task: sampled token ids become text deltas on request streams.

Owns: one `Choice` per running sequence: its detokeniser, stop strings, counters and stream.
Does not know: pages, plans, HTTP.
Invariants: tokens of a handle are handled in order; a stop-string hit ends the choice here and asks for an abort, and
whatever the sequence still produces is ignored; a fault in one choice ends that choice only. A large step is handled in
turns of TURN_ROWS rows, between which the event loop does what else is due: the next step is launched in time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from aengine.engine.spans import RequestSpans, RequestTimes
from aengine.engine.stops import StopStrings
from aengine.engine.stream import RequestStream
from aengine.errors import EngineDead
from aengine.metrics import Metrics
from aengine.timeline import Timeline
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

TURN_ROWS = 128  # about 1 ms with their writes


class Choice:
    """One sequence on its way out. `index` is its place among the n choices of its request."""

    __slots__ = (
        "admitted_s",
        "arrived_s",
        "detokenizer",
        "first_s",
        "handle",
        "index",
        "last_s",
        "plain",
        "prompt_tokens",
        "sampling",
        "stops",
        "stream",
        "texts",
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
        self.plain = detokenizer is not None and not sampling.stop  # text goes out as it comes
        self.texts: Mapping[int, str] = {}  # of the next token, as far as the detokeniser need not be asked
        self.tokens = 0
        self.arrived_s = time.monotonic()
        self.admitted_s = 0.0
        self.first_s = 0.0
        self.last_s = 0.0  # 0.0: no token has come

    def step(self, token: int) -> str:
        assert self.detokenizer is not None
        text = self.detokenizer.step(token)
        self.texts = self.detokenizer.table
        return text or ""

    def text(self, token: int, *, hidden: bool) -> tuple[str, str | None]:
        """(text to send, stop string hit) for a new token; a `hidden` token adds no text (a stop token)."""
        if self.detokenizer is None or hidden:
            return "", None
        text = self.step(token)
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
    def __init__(
        self,
        queue: asyncio.Queue[StepOutputs],
        abort: Callable[[int], None],
        metrics: Metrics,
        timeline: Timeline,
        spans: RequestSpans | None = None,
    ) -> None:
        self._queue = queue
        self._timeline = timeline
        self._spans = spans
        self._bursts = 0  # steps whose readers have not all had their turn
        self._abort = abort
        self._metrics = metrics
        self._choices: dict[int, Choice] = {}
        self._handles: list[int] = []  # of the step before, and their choices: most steps have the same
        self._row_choices: list[Choice | None] | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def register(self, choice: Choice) -> None:
        """Before the sequence is submitted."""
        self._choices[choice.handle] = choice
        self._row_choices = None
        self._empty.clear()

    async def all_done(self) -> None:
        """Until no choice is open."""
        await self._empty.wait()

    def _drop(self, handle: int) -> Choice | None:
        choice = self._choices.pop(handle, None)
        self._row_choices = None
        if choice is not None:
            choice.plain = False  # should this step have more of it
        if not self._choices:
            self._empty.set()
        return choice

    @property
    def open_choices(self) -> int:
        return len(self._choices)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            outputs = await self._queue.get()
            turns, more = self._turns(outputs), True
            while more:
                with self._timeline.detokenise as span:
                    span.value = len(outputs.handles)
                    more = next(turns, False)
                if more:
                    await asyncio.sleep(0)
            self._begin_burst()
            loop.call_soon(self._end_burst)

    def _begin_burst(self) -> None:
        """Readers that were woken just now run before whatever is called soon after this: until then the thread writes
        their tokens, and one span a step tells of it at no cost per reader."""
        if not self._bursts:
            self._timeline.write.__enter__()
        self._bursts += 1

    def _end_burst(self) -> None:
        self._bursts -= 1
        if not self._bursts:
            self._timeline.write.__exit__()

    def fail_all(self, message: str) -> None:
        """The engine is dead: every open stream ends with an error."""
        for choice in list(self._choices.values()):
            choice.stream.fail(EngineDead(message))
            self._account(choice, FinishReason.ERROR)
        self._choices.clear()
        self._row_choices = None
        self._empty.set()

    # ---- one step's outputs

    def handle(self, outputs: StepOutputs) -> None:
        """All of it at once."""
        for _ in self._turns(outputs):
            pass

    def _turns(self, outputs: StepOutputs) -> Iterator[bool]:
        """True while more is to come."""
        now_s = time.monotonic()
        for admitted in outputs.admitted:
            choice = self._choices.get(admitted.handle)
            if choice is not None:
                choice.admitted_s = now_s
                choice.stream.cached_tokens = max(choice.stream.cached_tokens, admitted.cached_tokens)
                self._metrics.request_admitted(now_s - choice.arrived_s, choice.prompt_tokens, admitted.cached_tokens)
        for handle, logprobs in outputs.prompt_logprobs:
            self._prompt_logprobs(handle, logprobs)
        finishes = {finish.handle: finish for finish in outputs.finished}
        handles, tokens = outputs.handles.tolist(), outputs.tokens.tolist()
        for first in range(0, len(handles), TURN_ROWS):
            if first:
                yield True
            turn = slice(first, first + TURN_ROWS)
            self._rows(self._of_rows(handles)[turn], tokens[turn], first, outputs.logprobs, finishes, now_s)
        for finish in outputs.finished:
            self._finish(finish)

    def _of_rows(self, handles: list[int]) -> list[Choice | None]:
        """The choices of a step's rows; None: it has ended."""
        if self._row_choices is None or handles != self._handles:
            self._handles, self._row_choices = handles, list(map(self._choices.get, handles))
        return self._row_choices

    def _rows(
        self,
        choices: Sequence[Choice | None],
        tokens: Sequence[int],
        first: int,
        logprobs: Mapping[int, Logprobs],
        finishes: Mapping[int, Finish],
        now_s: float,
    ) -> None:
        """Row i stands at first + i in its step. The usual token, of a plain choice, makes as few calls as it can."""
        since: dict[float, int] = {}  # when the tokens before came -> of how many rows: mostly one step, one entry
        usual = not (logprobs or finishes)
        for i, (choice, token) in enumerate(zip(choices, tokens, strict=True), first):
            if choice is None or not (choice.plain or choice.handle in self._choices):
                continue
            if before_s := choice.last_s:
                since[before_s] = since.get(before_s, 0) + 1
            else:
                choice.first_s = now_s
                self._metrics.observe_first_token(now_s - choice.arrived_s)
            choice.last_s = now_s
            choice.tokens += 1
            if choice.plain and (usual or not (i in logprobs or choice.handle in finishes)):
                text = choice.texts.get(token)
                if text is None and (text := self._stepped(choice, token)) is None:
                    continue
                choice.stream.push(OutputDelta(choice.index, text, (token,)))
            else:
                self._token(choice, token, logprobs.get(i), finishes.get(choice.handle))
        for before_s, rows in since.items():
            self._metrics.observe_itls(now_s - before_s, rows)

    def _stepped(self, choice: Choice, token: int) -> str | None:
        """The token's text; None: the detokeniser failed, and the choice has ended."""
        try:
            return choice.step(token)
        except Exception as error:
            self._fail(choice, error)
            return None

    def _token(self, choice: Choice, token: int, logprobs: Logprobs | None, finish: Finish | None) -> None:
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
        now_s = time.monotonic()
        self._metrics.request_finished(reason.value, choice.prompt_tokens, choice.tokens, now_s - choice.arrived_s)
        if self._spans is not None:
            stream = choice.stream
            times = RequestTimes(choice.arrived_s, choice.admitted_s, choice.first_s, choice.last_s, now_s)
            stream.on_drained(
                choice.index,
                partial(
                    self._spans.ended,
                    f"{stream.request_id}/{choice.index}",
                    times,
                    reason.value,
                    (choice.prompt_tokens, stream.cached_tokens, choice.tokens),
                ),
            )

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
