"""How the tokens of a request are chosen, and why it ended.

Owns: SamplingParams and its checks, Grammar, TokenRules, FinishReason.
Does not know: requests, tokenizers.
Invariants: a SamplingParams that exists is in range: a value that is not raises InvalidRequest with `param` set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from aengine.errors import InvalidRequest


class FinishReason(StrEnum):
    """Why a request ended. `STOP`: EOS, a stop token or a stop string; `LENGTH`: max_tokens or the context."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Grammar(msgspec.Struct, frozen=True):
    """What an answer must look like, as the client wrote it.

    `kind` and `source`: "json_object" (empty), "json_schema" (the schema as JSON text), "regex" (the pattern), "choice"
    (a JSON list of strings), "lark" (a grammar in llguidance's Lark dialect, or in GBNF).
    """

    kind: str
    source: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen. Names follow vLLM's.

    `temperature` 0 is greedy. `top_k` 0 or -1 is off. `seed` is any 64-bit integer (None: a random one is drawn at
    submission). `logprobs`/`prompt_logprobs` k: the chosen token's log-probability and the k best, of the model's
    own distribution before temperature, penalties and masks (log-softmax of the raw logits); None: off.
    `max_tokens` None: up to the context length.

    Raises InvalidRequest with `param` set for every value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids"):
            self._make_tuple(name)
        for name in ("n", "top_k", "min_tokens", "max_tokens", "seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise InvalidRequest(f"{name} is {value!r}, not an integer"[:200], param=name)
        _check_range("n", self.n, 1, 1024)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("top_k", self.top_k, -1, 2**31 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})", param="min_tokens"
                )
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, 0, 1024)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids is empty: no token could be sampled", param="allowed_token_ids")
        if self.logit_bias:
            for token, bias in self.logit_bias.items():
                if not math.isfinite(bias) or not -100.0 <= bias <= 100.0:
                    raise InvalidRequest(f"logit_bias[{token}] is {bias}, not in [-100, 100]", param="logit_bias")
        if any(not text for text in self.stop):
            raise InvalidRequest("stop contains an empty string", param="stop")
        _check_bad_words(self.bad_words)

    def _make_tuple(self, name: str) -> None:
        """A single string or id stands for itself, not for its characters; lists become tuples."""
        value = getattr(self, name)
        if isinstance(value, str | int):
            msgspec.structs.force_setattr(self, name, (value,))
        elif value is None or not isinstance(value, tuple):
            msgspec.structs.force_setattr(self, name, tuple(value or ()))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether sampling depends on earlier tokens (penalties, bad words)."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.bad_words)


BAD_WORDS_MAX = 128


BAD_WORD_CHARS_MAX = 256


def _check_bad_words(words: tuple[str, ...]) -> None:
    """Each word costs work at every step of its request."""
    if len(words) > BAD_WORDS_MAX:
        raise InvalidRequest(f"{len(words)} bad_words; at most {BAD_WORDS_MAX} are allowed", param="bad_words")
    for word in words:
        if not word.strip():
            raise InvalidRequest("bad_words contains an empty word", param="bad_words")
        if len(word) > BAD_WORD_CHARS_MAX:
            raise InvalidRequest(
                f"a bad word has {len(word)} characters; at most {BAD_WORD_CHARS_MAX} are allowed", param="bad_words"
            )


def _check_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    inside = (low < value if low_open else low <= value) and value <= high
    if not inside:  # also catches NaN, for which every comparison is false
        bracket = "(" if low_open else "["
        raise InvalidRequest(f"{name} is {value}, not in {bracket}{low}, {high}]", param=name)


class TokenRules(msgspec.Struct, frozen=True):
    """The parts of SamplingParams that need a tokenizer, resolved to token ids before submission.

    `stop_ids` end the request (EOS unless ignore_eos, plus stop_token_ids) and are masked until `min_tokens`.
    `bad_words` are token id sequences that may not be completed.
    """

    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
