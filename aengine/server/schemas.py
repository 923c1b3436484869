"""Request bodies of the generating endpoints.

Owns: field names and types, as msgspec structs.
Does not know: meanings (sampling.py), the engine.
Invariants: every optional field may also be null, which means its default; unknown fields pass the decoder. What is
`told` stands in `/openapi.json` and is checked elsewhere, with errors that have the numbers in them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from aengine.types import BAD_WORD_CHARS_MAX, BAD_WORDS_MAX

# An 8 MiB body can hold 300,000 empty messages, which hold up the event loop; these lengths bound the work behind
# decoding. Decoding itself is one call whose time grows with the body.
MAX_MESSAGES = 16_384
MAX_PARTS = 16_384
MAX_TOOLS = 1_024
MAX_LOGIT_BIAS = 16_384
MAX_STOP_STRINGS = 16
PRIORITIES = 2**31  # on either side of 0
ROLES = ("system", "developer", "user", "assistant", "tool")


def told(**keywords: Any) -> msgspec.Meta:
    """Keywords of JSON Schema that the document tells and the decoder does not check."""
    return msgspec.Meta(extra_json_schema=keywords)


ToolList = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)]
Tokens = Annotated[int, told(minimum=1, maximum=2**31 - 1)]
"""A number of tokens, at least one."""
TokenId = Annotated[int, told(minimum=0, maximum=2**31 - 1)]
Penalty = Annotated[float, told(minimum=-2, maximum=2)]
Logprobs = Annotated[int, told(minimum=0, maximum=1024)]
NonEmpty = Annotated[str, told(minLength=1)]
BadWord = Annotated[str, told(minLength=1, maxLength=BAD_WORD_CHARS_MAX)]
LogitBias = Annotated[
    dict[str, Annotated[float, told(minimum=-100, maximum=100)]],
    msgspec.Meta(max_length=MAX_LOGIT_BIAS, extra_json_schema={"propertyNames": {"pattern": "^[0-9]+$"}}),
]
ResponseFormat = Annotated[
    dict[str, Any],
    told(required=["type"], properties={"type": {"enum": ["text", "json_object", "json_schema"]}}),
]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen, what restricts them, and the request's place in the queue and the cache: common to all
    generating endpoints, so that none of them can overlook a restriction."""

    temperature: Annotated[float, told(minimum=0, maximum=100)] | None = None
    top_p: Annotated[float, told(exclusiveMinimum=0, maximum=1)] | None = None
    top_k: Annotated[int, told(minimum=-1, maximum=2**31 - 1)] | None = None
    min_p: Annotated[float, told(minimum=0, maximum=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, told(exclusiveMinimum=0, maximum=100)] | None = None
    seed: Annotated[int, told(minimum=-(2**63), maximum=2**64 - 1)] | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], told(maxItems=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: BadWord | Annotated[list[BadWord], told(maxItems=BAD_WORDS_MAX)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, told(minimum=0, maximum=2**31 - 1)] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[list[TokenId], told(minItems=1)] | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, told(minimum=-1, **{"not": {"const": 0}})] | None = None
    priority: Annotated[int, told(minimum=-PRIORITIES, maximum=PRIORITIES - 1)] | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: NonEmpty | None = None
    guided_choice: Annotated[list[NonEmpty], told(minItems=1)] | None = None
    guided_grammar: NonEmpty | None = None


class GenerationBody(SamplingFields, frozen=True, kw_only=True):
    """What chat and plain completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, told(minimum=1, maximum=1024)] | None = None
    max_tokens: Annotated[int, told(minimum=0, maximum=2**31 - 1)] | None = None
    prompt_logprobs: Logprobs | None = None
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
    role: Annotated[str, told(enum=ROLES)]
    content: str | Annotated[list[ContentPart], msgspec.Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


MessageList = Annotated[list[Message], msgspec.Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})]


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
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    modalities: Annotated[list[str], told(const=["text"])] | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """`/v1/completions`. A list prompt is checked for one kind of entry in prompts.py."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], told(minItems=1)]
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: Logprobs | None = None


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
    tokens: list[TokenId]
    model: str | None = None
