"""From a prompt and SamplingParams to the Requests of its choices, or a typed refusal.

Owns: every check that needs the model's limits, and the seeds of the choices.
Does not know: queues, streams, HTTP.
Invariants: a Request that leaves here fits the context and the KV pool; nothing is silently cut.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec

from aengine.config import EngineConfig
from aengine.engine.facts import ModelInfo
from aengine.engine.images import place_images
from aengine.errors import ContextLengthExceeded, InvalidRequest, RequestTooLarge
from aengine.prefix_cache import PrefixCache
from aengine.types import Int32s, Request, RequestMedia, SamplingParams, Submission, TokenRules

if TYPE_CHECKING:
    from aengine.models.tokenizer import Tokenizer

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads choice numbers over the seeds
_MASK = (1 << 64) - 1
_RULES = ("allowed_token_ids", "bad_words", "logit_bias")


class Intake:
    def __init__(self, config: EngineConfig, model: ModelInfo, tokenizer: Tokenizer, cache: PrefixCache) -> None:
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._cache = cache

    def requests(self, submission: Submission, first_handle: int) -> list[Request]:
        """The sampling.n Requests; raises InvalidRequest, ContextLengthExceeded or RequestTooLarge."""
        _check_labels(submission)
        ids, sampling = submission.prompt_ids, submission.sampling
        self._check_vocabulary(ids)
        self._check_sampling(sampling)
        media = place_images(ids, submission.images, self._model.image_token)
        self._check_scored(media, sampling)
        total = self._total_tokens(len(ids), sampling, tuple(one.input.tokens for one in media))
        rules = self._rules(sampling)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed & _MASK
        quiet = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return [
            Request(
                handle=first_handle + i,
                id=submission.request_id,
                prompt_ids=ids,
                sampling=sampling if i == 0 else quiet,
                rules=rules,
                max_total_tokens=total,
                seed=(seed + i * _GOLDEN) & _MASK,
                priority=submission.priority,
                cache_salt=submission.cache_salt,
                adapter=submission.adapter,
                cause="fresh" if i == 0 else "fork",
                media=media,
            )
            for i in range(sampling.n)
        ]

    def _check_vocabulary(self, ids: Int32s) -> None:
        bad = ids[(ids < 0) | ((ids >= self._model.vocab_size) & (ids != self._model.image_token))]
        if len(bad):
            raise InvalidRequest(
                f"prompt holds token id {bad[0]}, not in [0, {self._model.vocab_size})", param="prompt"
            )

    def _check_sampling(self, sampling: SamplingParams) -> None:
        if sampling.n > self._config.max_n:
            raise InvalidRequest(f"n is {sampling.n}; at most {self._config.max_n} choices are allowed", param="n")
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(sampling, name)
            if wanted is not None and wanted > self._config.max_logprobs:
                raise InvalidRequest(f"{name} is {wanted}; at most {self._config.max_logprobs} are allowed", param=name)
        for name in _RULES if self._config.device.device == "sim" else ():
            if getattr(sampling, name):
                message = f"{name}: the simulated device draws every token alike and cannot honour it"
                raise InvalidRequest(message, param=name)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(sampling, name) or ():
                if not 0 <= token < self._model.vocab_size:
                    limit = self._model.vocab_size
                    raise InvalidRequest(f"{name} holds token id {token}, not in [0, {limit})", param=name)

    def _check_scored(self, media: tuple[RequestMedia, ...], sampling: SamplingParams) -> None:
        """The placeholder has no place in the output head, so it has no probability."""
        if media and sampling.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs cannot be given for a prompt with images", param="prompt_logprobs")

    def _total_tokens(self, prompt_tokens: int, sampling: SamplingParams, media: tuple[int, ...]) -> int:
        limit = self._model.max_model_len
        wanted = sampling.max_tokens
        if wanted is None:
            if sampling.min_tokens > limit - prompt_tokens:
                raise ContextLengthExceeded(
                    f"{prompt_tokens} prompt tokens and min_tokens {sampling.min_tokens} are too many; this model's "
                    f"maximum context length is {limit} tokens",
                    param="min_tokens",
                )
            return self._longest(prompt_tokens, limit, media) if media else limit
        if prompt_tokens + wanted > limit:
            raise ContextLengthExceeded(
                f"{prompt_tokens} prompt tokens and max_tokens {wanted} make {prompt_tokens + wanted}; this model's "
                f"maximum context length is {limit} tokens",
                param="max_tokens",
            )
        if not self._cache.fits(prompt_tokens + wanted, media):
            raise self._too_large(prompt_tokens + wanted, media)
        return prompt_tokens + wanted

    def _longest(self, prompt_tokens: int, limit: int, media: tuple[int, ...]) -> int:
        """The most tokens, up to `limit`, that the pool can hold beside these images."""
        if not self._cache.fits(prompt_tokens + 1, media):
            raise self._too_large(prompt_tokens + 1, media)
        low, high = prompt_tokens + 1, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._cache.fits(middle, media) else (low, middle - 1)
        return low

    def _too_large(self, tokens: int, media: tuple[int, ...]) -> RequestTooLarge:
        images = f" and {len(media)} images of {sum(media)} entries in all" if media else ""
        need, has = self._cache.needed_pages(tokens, media), self._cache.capacity
        return RequestTooLarge(
            f"{tokens} tokens{images} need {_counts(need)} KV pages; the pool could hold at most {_counts(has)} of "
            "each kind alone",
            param="max_tokens",
        )

    def _rules(self, sampling: SamplingParams) -> TokenRules:
        eos = () if sampling.ignore_eos else self._model.eos_ids
        stop_ids = tuple(dict.fromkeys((*eos, *sampling.stop_token_ids)))
        return TokenRules(stop_ids=stop_ids, bad_words=self._bad_words(sampling.bad_words))

    def _bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenized at a text's beginning and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if ids:
                    found[ids] = None
        return tuple(found)


def _counts(pages: tuple[int, ...]) -> str:
    return " + ".join(map(str, pages))


def _check_labels(submission: Submission) -> None:
    request_id, priority = submission.request_id, submission.priority
    if not isinstance(request_id, str) or not request_id:
        raise InvalidRequest("request_id is not a text of at least one character", param="request_id")
    if not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise InvalidRequest(f"priority is {priority!r}, not an integer of 32 bits"[:200], param="priority")
    try:
        submission.cache_salt.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise InvalidRequest("cache_salt is not a text of valid Unicode", param="cache_salt") from error
