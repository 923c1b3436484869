"""What comes out: of a step, for the output task; of a request, for its reader.

Owns: StepOutputs, OutputDelta, RequestOutput and their parts.
Does not know: who reads them.
Invariants: a finish is said once, with or behind the last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from aengine.types.arrays import Int32s, Int64s
from aengine.types.sampling import FinishReason
from aengine.types.steps import Logprobs


class Finish(msgspec.Struct, frozen=True):
    """The end of a request; exactly one per request, after its last token.

    `stop_id`: the stop token that ended it, else None. `error`: the message when reason is ERROR.
    """

    handle: int
    reason: FinishReason
    stop_id: int | None = None
    error: str | None = None


class Admitted(msgspec.Struct, frozen=True):
    """A request got a slot for the first time; `cached_tokens` of its prompt came from the prefix cache."""

    handle: int
    cached_tokens: int


NO_HANDLES: Int64s = np.zeros(0, np.int64)


NO_TOKENS: Int32s = np.zeros(0, np.int32)


class StepOutputs(msgspec.Struct, frozen=True):
    """All that one commit tells the output task. handles[i] got tokens[i]; a handle may appear several times.

    `logprobs` is keyed by that index i and has one position. `prompt_logprobs` pairs come in prompt order.
    A finished handle's tokens stand in the same or an earlier StepOutputs.
    """

    step: int
    handles: Int64s = NO_HANDLES
    tokens: Int32s = NO_TOKENS
    logprobs: Mapping[int, Logprobs] = {}
    prompt_logprobs: Sequence[tuple[int, Logprobs]] = ()
    admitted: Sequence[Admitted] = ()
    finished: Sequence[Finish] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(len(self.handles) or self.finished or self.admitted or self.prompt_logprobs)


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token with its log-probability, rank (1 = most likely) and the best alternatives (id, logprob)."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class OutputDelta(msgspec.Struct, frozen=True, gc=False):
    """New output of one choice of a request: text and tokens since the previous delta.

    `text` holds only whole UTF-8 characters and never anything after a stop hit. `finish_reason` is set on the last
    delta of a choice, and only there. `stop_reason`: the stop string or stop token id that was hit.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


class CompletionOutput(msgspec.Struct):
    """One choice of a request so far (or whole, once `finish_reason` is set)."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class RequestOutput(msgspec.Struct):
    """What AsyncEngine.generate yields: everything known of a request. `outputs` are cumulative, by index.

    `prompt_logprobs[i]` belongs to prompt token i; the first is None. Times are seconds since submission.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    ttft_s: float | None = None
    e2e_s: float | None = None
