"""Request bodies of the generating endpoints.

Owns: field names and types, as msgspec structs.
Does not know: ranges and meanings (sampling.py), the engine.
Invariants: every optional field may also be null, which means its default; unknown fields pass the decoder.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

# An 8 MiB body can hold 300,000 empty messages, which hold up the event loop; these lengths bound the work behind
# decoding. Decoding itself is one call whose time grows with the body.
MAX_MESSAGES = 16_384
MAX_PARTS = 16_384
MAX_TOOLS = 1_024
MAX_LOGIT_BIAS = 16_384

ToolList = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen, what restricts them, and the request's place in the queue and the cache: common to all
    generating endpoints, so that none of them can overlook a restriction."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: str | list[str] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: Annotated[dict[str, float], msgspec.Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class GenerationBody(SamplingFields, frozen=True, kw_only=True):
    """What chat and plain completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None


class ImageUrl(msgspec.Struct, frozen=True, kw_only=True):
    url: str


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message's content. Parts other than text and images are decoded only as far as their type."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | Annotated[list[ContentPart], msgspec.Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


MessageList = Annotated[list[Message], msgspec.Meta(max_length=MAX_MESSAGES)]


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """`/v1/chat/completions` and its render. `parse_answer` false: tool calls and thoughts stay in the text."""

    messages: MessageList
    tools: ToolList | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    parse_answer: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """`/v1/completions`. A list prompt is checked for one kind of entry in prompts.py."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/tokenize`: `prompt` or `messages`, not both."""

    model: str | None = None
    prompt: str | None = None
    messages: MessageList | None = None
    tools: ToolList | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None
