"""Frozen values that cross the borders between rooms.

Owns: the shapes of requests, step plans, step results and outputs.
Does not know: torch, asyncio, text processing, any room's state.
Invariants: values are never mutated after construction; arrays are read-only by agreement of both sides. Everything is
plain data, so any border can become a process border.
"""

from aengine.types.arrays import Bools, Float32s, Int32s, Int64s
from aengine.types.figures import HttpFigures
from aengine.types.outputs import (
    NO_HANDLES,
    NO_TOKENS,
    Admitted,
    CompletionOutput,
    Finish,
    OutputDelta,
    RequestOutput,
    StepOutputs,
    TokenLogprob,
)
from aengine.types.requests import NO_END, MediaInput, Request, RequestMedia, Submission
from aengine.types.sampling import BAD_WORD_CHARS_MAX, BAD_WORDS_MAX, FinishReason, Grammar, SamplingParams, TokenRules
from aengine.types.steps import (
    NO_CHOICES,
    NO_ROWS,
    Choices,
    Logprobs,
    MediaPlacement,
    PageMove,
    SlotSetup,
    StepHandle,
    StepPlan,
    StepResult,
    TableDelta,
)

__all__ = [
    "BAD_WORDS_MAX",
    "BAD_WORD_CHARS_MAX",
    "NO_CHOICES",
    "NO_END",
    "NO_HANDLES",
    "NO_ROWS",
    "NO_TOKENS",
    "Admitted",
    "Bools",
    "Choices",
    "CompletionOutput",
    "Finish",
    "FinishReason",
    "Float32s",
    "Grammar",
    "HttpFigures",
    "Int32s",
    "Int64s",
    "Logprobs",
    "MediaInput",
    "MediaPlacement",
    "OutputDelta",
    "PageMove",
    "Request",
    "RequestMedia",
    "RequestOutput",
    "SamplingParams",
    "SlotSetup",
    "StepHandle",
    "StepOutputs",
    "StepPlan",
    "StepResult",
    "Submission",
    "TableDelta",
    "TokenLogprob",
    "TokenRules",
]
