"""Deltas of a request, gathered into the RequestOutput that a program sees.

Owns: `Gathered`.
Does not know: where deltas come from.
Invariants: outputs are cumulative and ordered by index; a failed choice raises its error once everything else is told.
"""

from __future__ import annotations

import time

import msgspec

from aengine.engine.stream import RequestStream
from aengine.errors import row_error
from aengine.types import CompletionOutput, FinishReason, OutputDelta, RequestOutput


class Gathered:
    def __init__(self, stream: RequestStream, prompt: str | None, n: int, *, logprobs: bool) -> None:
        self._stream = stream
        self._began_s = time.monotonic()
        self._ttft_s: float | None = None
        self._prompt = prompt
        self._outputs = [CompletionOutput(i, "", [], [] if logprobs else None) for i in range(n)]

    def add(self, delta: OutputDelta) -> RequestOutput:
        if delta.finish_reason is FinishReason.ERROR:
            raise row_error(delta.error)
        if self._ttft_s is None and delta.token_ids:
            self._ttft_s = time.monotonic() - self._began_s
        out = self._outputs[delta.index]
        out.text += delta.text
        out.token_ids.extend(delta.token_ids)
        if out.logprobs is not None and delta.logprobs:
            out.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            out.finish_reason, out.stop_reason = delta.finish_reason, delta.stop_reason
        finished = all(output.finish_reason is not None for output in self._outputs)
        return RequestOutput(
            request_id=self._stream.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._stream.prompt_ids,
            outputs=[_copy(output) for output in self._outputs],
            finished=finished,
            prompt_logprobs=self._stream.prompt_logprobs,
            num_cached_tokens=self._stream.cached_tokens,
            ttft_s=self._ttft_s,
            e2e_s=time.monotonic() - self._began_s if finished else None,
        )


def _copy(output: CompletionOutput) -> CompletionOutput:
    """What a program keeps must not grow under its hands."""
    logprobs = None if output.logprobs is None else list(output.logprobs)
    return msgspec.structs.replace(output, token_ids=list(output.token_ids), logprobs=logprobs)
