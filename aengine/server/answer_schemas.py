"""What answers look like, for the document and for tests that hold the answers to it.

Owns: the fields of each answer's JSON.
Does not know: how answers are made; no handler builds these structs, since most bytes of a stream are encoded once.
Invariants: nothing comes that is not named here; a field that may be absent is Unset, one that may be null says so.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

T = TypeVar("T")
Maybe: TypeAlias = T | UnsetType
"""Absent unless it was asked for, or there is any."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all of them."""


class PromptDetails(Answer, frozen=True):
    cached_tokens: int


class CompletionDetails(Answer, frozen=True):
    reasoning_tokens: int


class Usage(Answer, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: Maybe[CompletionDetails] = UNSET


class TokenChance(Answer, frozen=True):
    """`bytes`: those of the token's text, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(Answer, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    rank: int
    top_logprobs: list[TokenChance]


class ChatLogprobs(Answer, frozen=True):
    content: list[ChosenToken]
    refusal: None


class RankedToken(Answer, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedToken] | None]


class CalledFunction(Answer, frozen=True):
    name: str
    arguments: str


class Call(Answer, frozen=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer, frozen=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: Maybe[str] = UNSET
    reasoning_content: Maybe[str] = UNSET
    tool_calls: Maybe[list[Call]] = UNSET


class ChatChoice(Answer, frozen=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    token_ids: Maybe[list[int]] = UNSET


class ChatAnswer(Answer, frozen=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: Maybe[PromptLogprobs] = UNSET
    prompt_token_ids: Maybe[list[int]] = UNSET


class TextLogprobs(Answer, frozen=True):
    """All lists are parallel; the first token of a prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    ranks: Maybe[list[int | None]] = UNSET
    top_counts: Maybe[list[int | None]] = UNSET


class TextChoice(Answer, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    prompt_logprobs: Maybe[PromptLogprobs] = UNSET
    token_ids: Maybe[list[int]] = UNSET
    prompt_token_ids: Maybe[list[int]] = UNSET


class CompletionAnswer(Answer, frozen=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class OutputPart(Answer, frozen=True):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: Maybe[list[Any]] = UNSET
    logprobs: Maybe[list[ChosenToken]] = UNSET


class OutputItem(Answer, frozen=True):
    """A message, reasoning or a function call, with the fields of its kind."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["completed", "incomplete"]
    role: Maybe[Literal["assistant"]] = UNSET
    content: Maybe[list[OutputPart]] = UNSET
    summary: Maybe[list[Any]] = UNSET
    call_id: Maybe[str] = UNSET
    name: Maybe[str] = UNSET
    arguments: Maybe[str] = UNSET


class Incomplete(Answer, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(Answer, frozen=True):
    effort: str | None
    summary: None


class ResponseTextFormat(Answer, frozen=True):
    format: dict[str, Any]


class ResponseUsage(Answer, frozen=True):
    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class ResponseAnswer(Answer, frozen=True):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: ResponseReasoning
    store: Literal[False]
    temperature: float
    text: ResponseTextFormat
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    metadata: dict[str, Any]


class MessageBlock(Answer, frozen=True):
    """Text, thinking or a use of a tool, with the fields of its kind."""

    type: Literal["text", "thinking", "tool_use"]
    text: Maybe[str] = UNSET
    thinking: Maybe[str] = UNSET
    signature: Maybe[str] = UNSET
    id: Maybe[str] = UNSET
    name: Maybe[str] = UNSET
    input: Maybe[dict[str, Any]] = UNSET


class MessageUsage(Answer, frozen=True):
    """`input_tokens` are those that the cache did not hold."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Answer, frozen=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class InputCount(Answer, frozen=True):
    input_tokens: int


class ModelCard(Answer, frozen=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    input_modalities: list[Literal["text", "image"]]


class ModelList(Answer, frozen=True):
    object: Literal["list"]
    data: list[ModelCard]


class Rendered(Answer, frozen=True):
    model: str
    prompt: str
    token_ids: list[int]
    count: int


class Tokenized(Answer, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer, frozen=True):
    prompt: str


class TokenizerInfo(Answer, frozen=True):
    eos_token: str | None
    eos_token_ids: list[int]
    vocab_size: int
    model_max_length: int
    chat_template: str | None
    has_chat_template: bool


class Done(Answer, frozen=True):
    status: Literal["ok"]


class Health(Answer, frozen=True):
    status: Literal["ok"]
    phase: Literal["ready"]


class Version(Answer, frozen=True):
    version: str


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Chrome's trace format, for its viewers."""

    traceEvents: list[dict[str, Any]]
