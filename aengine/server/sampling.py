"""Request fields to SamplingParams.

Owns: defaults, the limits that only HTTP has, token id ranges, how two length limits combine.
Does not know: prompts, how sampling is done.
Invariants: a value out of range is an InvalidRequest whose `param` is the field that the client sent.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from aengine.errors import InvalidRequest
from aengine.server.envelope import shorten
from aengine.server.schemas import MAX_STOP_STRINGS, PRIORITIES, ChatBody, CompletionBody, GenerationBody
from aengine.server.structured import constraint
from aengine.types import SamplingParams

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)


def chat_sampling(body: ChatBody, vocab_size: int) -> SamplingParams:
    """Without a limit of its own a chat answer may go on to the end of the context.

    `max_completion_tokens` is the newer name of `max_tokens`; when both are sent and differ the smaller one holds,
    because each of them is an upper limit.
    """
    limits = [
        _at_least_one(name, value)
        for name in ("max_completion_tokens", "max_tokens")
        if (value := getattr(body, name)) is not None
    ]
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.modalities is not None and body.modalities != ["text"]:
        raise InvalidRequest("modalities: this server answers in text only", param="modalities")
    try:
        return _sampling(body, vocab_size, max_tokens=min(limits, default=None), logprobs=logprobs)
    except InvalidRequest as error:
        raise renamed(error, "logprobs", "top_logprobs") from None


def completion_sampling(body: CompletionBody, vocab_size: int) -> SamplingParams:
    """`max_tokens: 0` is allowed where a prompt is scored (echo); one token is made then and not shown."""
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if not scores_only(body):
        _at_least_one("max_tokens", max_tokens)
    values: dict[str, Any] = {"max_tokens": max(max_tokens, 1), "logprobs": body.logprobs}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        values["prompt_logprobs"] = body.logprobs
    candidates = _candidates(body)
    if candidates is not None:
        values.update(n=candidates, logprobs=body.logprobs or 0)  # the ranking needs log-probabilities
    try:
        return _sampling(body, vocab_size, **values)
    except InvalidRequest as error:
        raise candidates_as_sent(error, body) from None


def candidates_as_sent(error: InvalidRequest, body: CompletionBody) -> InvalidRequest:
    """How many answers are made is `n` to the engine; the client sent best_of."""
    return error if body.best_of in (None, body.n) else renamed(error, "n", "best_of")


def scores_only(body: CompletionBody) -> bool:
    return body.max_tokens == 0 and bool(body.echo)


def renamed(error: InvalidRequest, ours: str, sent: str) -> InvalidRequest:
    """The same error about the field that the client sent."""
    if error.param == ours:
        error.param = sent
        error.message = error.message.replace(ours, sent, 1)
    return error


def _candidates(body: CompletionBody) -> int | None:
    """How many answers are made to choose from, or None where all of them are returned."""
    n, best_of = 1 if body.n is None else body.n, body.best_of
    if best_of is None or best_of == n:
        return None
    _at_least_one("n", n)
    if best_of < n:
        raise InvalidRequest(f"best_of ({best_of}) is less than n ({n})", param="best_of")
    if body.stream:
        raise InvalidRequest(f"best_of ({best_of}) greater than n ({n}) cannot be streamed", param="best_of")
    return best_of


def _sampling(body: GenerationBody, vocab_size: int, **values: Any) -> SamplingParams:
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if body.priority is not None and not -PRIORITIES <= body.priority < PRIORITIES:
        raise InvalidRequest(
            f"priority is {shorten(str(body.priority), 24)}, not in [-{PRIORITIES}, {PRIORITIES})", param="priority"
        )
    for name in _SAME_NAME:
        if name not in values and (value := getattr(body, name)) is not None:
            values[name] = value
    values["stop"] = _strings("stop", body.stop, MAX_STOP_STRINGS)
    values["bad_words"] = _strings("bad_words", body.bad_words, None)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if (ids := getattr(body, name)) is not None:
            check_token_ids(name, ids, vocab_size)
            values[name] = tuple(ids)
    if body.logit_bias is not None:
        values["logit_bias"] = _logit_bias(body.logit_bias, vocab_size)
    if (asked := constraint(body)) is not None:
        values["grammar"] = asked[1]
    return SamplingParams(**values)


def _strings(name: str, value: str | list[str] | None, limit: int | None) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value or ())
    if limit is not None and len(strings) > limit:
        raise InvalidRequest(f"{name} has {len(strings)} strings; at most {limit} are accepted", param=name)
    return strings


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    out = {}
    for key, value in bias.items():
        try:
            token = int(key)
        except ValueError:
            text = shorten(key, 40)
            raise InvalidRequest(f"logit_bias: the key {text!r} is not a token id", param="logit_bias") from None
        out[token] = value
    check_token_ids("logit_bias", out, vocab_size)
    return out


def check_token_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Raises InvalidRequest for the first id outside the vocabulary."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):  # seven times faster than looking at each
        return
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        shown = shorten(str(wrong), 24)
        raise InvalidRequest(f"{name}: token id {shown} is not in [0, {vocab_size - 1}]", param=name)


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise InvalidRequest(f"{name} is {value}; at least 1 is needed", param=name)
    return value
