"""The stream of one request's output, from the output task to whoever asked.

Owns: `RequestStream`: pending deltas, merged when the reader lags, and the tap that spares the reader a wake-up.
Does not know: schedulers, HTTP.
Invariants: what is pending of a choice is read as one delta, and costs memory bounded by its text; nothing is
dropped or reordered within a choice; the last delta of a choice, and only it, has a finish_reason. The tap is asked
only while the reader waits and nothing is pending, and never for a last delta: it gets what the reader would get next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import chain

from aengine.errors import AengineError
from aengine.types import OutputDelta, TokenLogprob

PENDING_MAX = 256  # deltas of a choice, before they are merged: merging each at once costs its whole text again


class RequestStream:
    """Async iterator of OutputDelta. Iterate once, or `aclose` it; leaving it unread keeps the request running."""

    __slots__ = (
        "_abort",
        "_error",
        "_first_ended",
        "_live",
        "_on_drained",
        "_on_finished",
        "_pending",
        "_take",
        "_unfinished",
        "_waiter",
        "cached_tokens",
        "completion_tokens",
        "prompt_ids",
        "prompt_logprobs",
        "request_id",
    )

    def __init__(self, request_id: str, prompt_ids: list[int], n: int, abort: Callable[[], object]) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self._pending: dict[int, list[OutputDelta]] = {}  # by choice
        self._unfinished = n
        self._first_ended = False
        self._error: AengineError | None = None
        self._abort = abort
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[OutputDelta], bool] | None = None
        self._live: Callable[[OutputDelta], bool] | None = None  # `_take`, while the reader waits and nothing woke it
        self._on_finished: list[Callable[[], object]] = []
        self._on_drained: dict[int, Callable[[], object]] = {}

    def on_finished(self, call: Callable[[], object]) -> None:
        """Call once when the last choice ends or the stream fails."""
        self._on_finished.append(call)

    def on_drained(self, index: int, call: Callable[[], object]) -> None:
        """Call once when the reader has all of choice `index`, which has ended, or has left."""
        if index in self._pending:
            self._on_drained[index] = call
        else:
            call()

    @property
    def finished(self) -> bool:
        """All choices ended (their last deltas may still be unread)."""
        return self._unfinished == 0

    # ---- written by the output task

    def push(self, delta: OutputDelta) -> None:
        self.completion_tokens += len(delta.token_ids)
        if self._live is not None and delta.finish_reason is None:
            try:
                if self._live(delta):
                    return
            except Exception:  # the reader will meet the same delta, and the fault, in its own task
                self._take = None
        pending = self._pending.get(delta.index)
        if pending is None:
            self._pending[delta.index] = [delta]
        else:
            pending.append(delta)
            if len(pending) == PENDING_MAX:
                pending[:] = [_merged(pending)]
        if delta.finish_reason is not None:
            self._unfinished -= 1
            self._first_ended |= delta.index == 0
        self._notify()
        self._end()

    def fail(self, error: AengineError) -> None:
        """End the stream: the reader gets what is pending, then the error."""
        self._error = error
        self._first_ended = True
        self._unfinished = 0
        self._notify()
        self._end()

    def _end(self) -> None:
        if self._unfinished == 0:
            calls, self._on_finished = self._on_finished, []
            for call in calls:
                call()

    def _notify(self) -> None:
        self._live = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def add_prompt_logprobs(self, scores: list[TokenLogprob]) -> None:
        """Scores of the next prompt tokens; nothing is read before they are complete."""
        assert self.prompt_logprobs is not None
        self.prompt_logprobs.extend(scores)
        if not self._held():
            self._notify()

    def _held(self) -> bool:
        """Whether prompt log-probabilities are still to come: another choice may be ahead of the one that has them."""
        scores = self.prompt_logprobs
        return scores is not None and len(scores) < len(self.prompt_ids) and not self._first_ended

    # ---- read by the requester

    def abort(self) -> None:
        """Ask for an early end; choices finish with ABORT within depth + 1 steps."""
        if not self.finished:
            self._abort()

    async def aclose(self) -> None:
        self.abort()
        while self._on_drained:
            self._on_drained.popitem()[1]()

    def tap(self, take: Callable[[OutputDelta], bool]) -> None:
        """Offer deltas to `take` at once, on the event loop, while the reader waits in `__anext__`. True: it is dealt
        with, and the reader goes on waiting; False: the reader gets it. Last deltas always go to the reader."""
        self._take = take

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> OutputDelta:
        if self._waiter is not None:
            raise RuntimeError(f"request {self.request_id} has a reader already")
        while not self._pending or self._held():
            if self._error is not None:
                raise self._error
            if self._unfinished == 0:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            self._live = None if self._held() else self._take
            try:
                await self._waiter
            finally:
                self._waiter = self._live = None
        delta = _merged(self._pending.pop(next(iter(self._pending))))
        if delta.finish_reason is not None and self._on_drained:
            self._on_drained.pop(delta.index)()
        return delta


def _merged(deltas: list[OutputDelta]) -> OutputDelta:
    """Deltas of one choice, in their order, as one."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    scored = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return OutputDelta(
        last.index,
        "".join([delta.text for delta in deltas]),
        tuple(chain.from_iterable([delta.token_ids for delta in deltas])),
        tuple(chain.from_iterable(scored)) if scored else None,
        last.finish_reason,
        last.stop_reason,
        last.error,
    )
