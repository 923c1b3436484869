"""The stream of one request's output, from the output task to whoever asked.

Owns: `RequestStream`: pending deltas, merged when the reader lags.
Does not know: schedulers, HTTP.
Invariants: at most one pending delta per choice, so a slow reader costs memory bounded by its own output; nothing is
dropped or reordered within a choice; the last delta of a choice, and only it, has a finish_reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aengine.errors import AengineError
from aengine.types import FinishReason, OutputDelta, TokenLogprob


class RequestStream:
    """Async iterator of OutputDelta. Iterate once, or `aclose` it; leaving it unread keeps the request running."""

    def __init__(self, request_id: str, prompt_ids: list[int], n: int, abort: Callable[[], object]) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self._pending: dict[int, OutputDelta] = {}
        self._unfinished = n
        self._first_ended = False
        self._error: AengineError | None = None
        self._abort = abort
        self._waiter: asyncio.Future[None] | None = None
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
        before = self._pending.get(delta.index)
        self._pending[delta.index] = delta if before is None else _merge(before, delta)
        self.completion_tokens += len(delta.token_ids)
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
            try:
                await self._waiter
            finally:
                self._waiter = None
        delta = self._pending.pop(next(iter(self._pending)))
        if delta.finish_reason is not None and self._on_drained:
            self._on_drained.pop(delta.index)()
        return delta


def _merge(before: OutputDelta, after: OutputDelta) -> OutputDelta:
    logprobs = before.logprobs
    if after.logprobs is not None:
        logprobs = (before.logprobs or ()) + after.logprobs
    reason: FinishReason | None = after.finish_reason
    return OutputDelta(
        before.index,
        before.text + after.text,
        before.token_ids + after.token_ids,
        logprobs,
        reason,
        after.stop_reason,
        after.error,
    )
