"""Answers on the wire, gathered into the RequestOutput that a program sees.

Owns: the shapes of completions and chat completions as they are read, streamed or whole.
Does not know: sockets, request bodies.
Invariants: outputs are cumulative and ordered by index, as the engine's own are; what a program keeps does not grow
under its hands.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from aengine.errors import StepFailed
from aengine.types import CompletionOutput, FinishReason, RequestOutput, SamplingParams, TokenLogprob

ID_PREFIX = "token_id:"  # how a server names tokens that was asked for ids


class WireChoice(msgspec.Struct):
    """A choice of either endpoint, of a chunk (`delta`) or an answer (`message`); plain completions have `text`."""

    index: int = 0
    text: str | None = None
    delta: Mapping[str, Any] | None = None
    message: Mapping[str, Any] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: Mapping[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[Mapping[str, Any] | None] | None = None

    @property
    def content(self) -> str:
        if self.text is not None:
            return self.text
        return (self.delta or self.message or {}).get("content") or ""


class WireUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Mapping[str, Any] | None = None


class WireAnswer(msgspec.Struct):
    """A chunk of a stream or a whole answer."""

    choices: list[WireChoice] = []
    usage: WireUsage | None = None
    error: Mapping[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Mapping[str, Any] | None] | None = None


class WireModel(msgspec.Struct):
    id: str


class WireModels(msgspec.Struct):
    data: list[WireModel]


class WireTokens(msgspec.Struct):
    tokens: list[int]
    count: int
    max_model_len: int


class WireText(msgspec.Struct):
    prompt: str


class Gathered:
    """One request's answer so far."""

    def __init__(self, request_id: str, prompt: str | None, sampling: SamplingParams) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_top = sampling.prompt_logprobs or 0
        self._prompt_ids: list[int] = []
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        self._cached_tokens = 0
        logprobs = list if sampling.logprobs is not None else lambda: None
        self._outputs = [CompletionOutput(i, "", [], logprobs()) for i in range(sampling.n)]
        self._began_s = time.monotonic()
        self._ttft_s: float | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self._outputs)

    def add(self, answer: WireAnswer) -> bool:
        """Whether the answer brought output (rather than a role, or counts alone)."""
        told = False
        if answer.prompt_token_ids is not None:
            self._prompt_ids = answer.prompt_token_ids
        self._add_scores(answer.prompt_logprobs)
        for choice in answer.choices:
            told |= self._add_choice(choice)
        if answer.usage is not None and answer.usage.prompt_tokens_details is not None:
            self._cached_tokens = int(answer.usage.prompt_tokens_details.get("cached_tokens") or 0)
        return told

    def _add_choice(self, choice: WireChoice) -> bool:
        if choice.prompt_token_ids is not None:
            self._prompt_ids = choice.prompt_token_ids
        self._add_scores(choice.prompt_logprobs)
        if not 0 <= choice.index < len(self._outputs):
            raise StepFailed(f"the server answered with choice {choice.index} of {len(self._outputs)}")
        out, ids = self._outputs[choice.index], choice.token_ids or ()
        if self._ttft_s is None and (ids or choice.content):
            self._ttft_s = time.monotonic() - self._began_s
        out.text += choice.content
        out.token_ids.extend(ids)
        if out.logprobs is not None and choice.logprobs is not None:
            out.logprobs.extend(logprobs_of(choice.logprobs))
        if choice.finish_reason is not None:
            out.finish_reason, out.stop_reason = _reason(choice.finish_reason), choice.stop_reason
        return bool(ids or choice.content or choice.finish_reason)

    def abort(self) -> None:
        """What has not ended was ended by the reader."""
        for output in self._outputs:
            if output.finish_reason is None:
                output.finish_reason = FinishReason.ABORT

    def _add_scores(self, entries: list[Mapping[str, Any] | None] | None) -> None:
        """vLLM's form: per prompt token a dict from token id to {logprob, rank}."""
        if entries is not None:
            scored = zip(self._prompt_ids, entries, strict=True)
            self._prompt_logprobs = [_scored(token, entry, self._prompt_top) for token, entry in scored]

    def output(self) -> RequestOutput:
        """A copy of all that is known."""
        finished = self.finished
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_ids,
            outputs=[_copy(output) for output in self._outputs],
            finished=finished,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._cached_tokens,
            ttft_s=self._ttft_s,
            e2e_s=time.monotonic() - self._began_s if finished else None,
        )


def logprobs_of(form: Mapping[str, Any]) -> list[TokenLogprob]:
    """Both of OpenAI's forms, from a server that was asked to name tokens by id."""
    content: Sequence[Mapping[str, Any]] | None = form.get("content")
    if content is not None:
        return [
            TokenLogprob(
                _id(entry["token"]),
                entry["logprob"],
                int(entry.get("rank") or 0),
                tuple((_id(other["token"]), other["logprob"]) for other in entry.get("top_logprobs") or ()),
            )
            for entry in content
        ]
    tokens: Sequence[str] = form.get("tokens") or ()
    ranks: Sequence[int | None] = form.get("ranks") or [0] * len(tokens)
    counts: Sequence[int | None] = form.get("top_counts") or [None] * len(tokens)
    tops: Sequence[Mapping[str, float] | None] = form.get("top_logprobs") or [None] * len(tokens)
    values: Sequence[float | None] = form.get("token_logprobs") or ()
    return [
        TokenLogprob(_id(token), value, int(rank or 0), _best(top or {}, count))
        for token, value, rank, top, count in zip(tokens, values, ranks, tops, counts, strict=True)
        if value is not None
    ]


def _best(top: Mapping[str, float], count: int | None) -> tuple[tuple[int, float], ...]:
    """The first `count` of a dict whose last entry may be the chosen token, added to the best ones."""
    return tuple((_id(name), value) for name, value in list(top.items())[:count])


def _scored(token: int, entry: Mapping[str, Any] | None, k: int) -> TokenLogprob | None:
    if entry is None:
        return None
    own = entry[str(token)]
    best = sorted(entry.items(), key=lambda item: int(item[1]["rank"]))[:k]
    top = tuple((int(other), float(row["logprob"])) for other, row in best)
    return TokenLogprob(token, own["logprob"], own["rank"], top)


def _id(name: str) -> int:
    if not name.startswith(ID_PREFIX):
        raise StepFailed(f"the server names the token {name[:40]!r} by its text, not by its id")
    return int(name[len(ID_PREFIX) :])


def _reason(text: str) -> FinishReason:
    """A reason that only servers give (tool_calls) is an ordinary end."""
    try:
        return FinishReason(text)
    except ValueError:
        return FinishReason.STOP


def _copy(output: CompletionOutput) -> CompletionOutput:
    logprobs = None if output.logprobs is None else list(output.logprobs)
    return msgspec.structs.replace(output, token_ids=list(output.token_ids), logprobs=logprobs)
