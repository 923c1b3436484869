"""Plain completions as JSON: chunks of a stream, and the whole.

Owns: the shape of `text_completion`, echoed prompts, the choice of the best of several answers.
Does not know: HTTP, the engine; it sees a job's counts and its deltas.
Invariants: an echoed prompt comes before its choice's first text; with log-probabilities the echoed tokens are followed
by exactly the generated ones; `scores_only` shows no generated token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aengine.server.chat_frames import ChunkOptions
from aengine.server.envelope import encode_json
from aengine.server.jobs import Choice, Job
from aengine.server.logprobs import CompletionLogprobs, TokenTexts, prompt_logprobs
from aengine.types import FinishReason, OutputDelta, TokenLogprob

_NO_END = b',"logprobs":null,"finish_reason":null,"stop_reason":null'
_IDS = _NO_END + b',"token_ids":'


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """`echoes`: the text of each prompt, to be repeated; None: no echo. `n`: choices returned per prompt."""

    chunk: ChunkOptions
    n: int = 1
    echoes: Sequence[str] | None = None
    scores_only: bool = False
    prompt_logprobs: bool = False


@dataclass(slots=True)
class _Progress:
    """How far one streamed choice is."""

    logprobs: CompletionLogprobs
    begun: bool = False


class CompletionFrames:
    """The frames of one streamed completion."""

    __slots__ = (
        "_after",
        "_fast",
        "_fixed",
        "_heads",
        "_job",
        "_no_end",
        "_options",
        "_plain",
        "_progress",
        "_wants_ids",
    )

    def __init__(self, job: Job, options: CompletionOptions, text: TokenTexts) -> None:
        self._job = job
        self._options = options
        self._progress = [_Progress(CompletionLogprobs(text, options.chunk.names)) for _ in range(job.choices)]
        self._fixed = b"data: " + encode_json(_fixed(job))[:-1]
        self._heads = tuple(self._fixed + b',"choices":[{"index":%d,"text":' % i for i in range(job.choices))
        chunk = options.chunk
        self._fast = False  # every choice has begun, and chunks have nothing unusual
        self._plain = not (chunk.logprobs or chunk.running_usage or options.scores_only)
        self._wants_ids = chunk.token_ids
        self._after = b'}],"usage":null}\n\n' if chunk.usage else b"}]}\n\n"
        ids = b',"token_ids":[]' if chunk.token_ids else b""  # text without a new token
        self._no_end = _NO_END + ids + self._after

    def opening(self) -> bytes:
        return b""

    def idle_opening(self) -> bytes:
        """Without a role to send, an empty text tells that the request lives."""
        return self._chunk(0, "")

    def delta(self, delta: OutputDelta) -> bytes:
        if self._fast and delta.finish_reason is None:  # the usual chunk, in few pieces: text, and ids if wanted
            text, ids = delta.text, delta.token_ids
            if self._wants_ids and ids:
                return b"".join((self._heads[delta.index], encode_json(text), _IDS, encode_json(ids), self._after))
            return self._heads[delta.index] + encode_json(text) + self._no_end if text else b""
        begun = self._begin(delta.index)
        text, ids, logprobs = delta.text, delta.token_ids, delta.logprobs
        if self._options.scores_only:
            text, ids, logprobs = "", (), None
        if not text and not (ids and self._shows_ids) and delta.finish_reason is None:
            return begun
        extras = self._extras(delta.index, ids, logprobs)
        return begun + self._chunk(delta.index, text, delta, extras)

    def closing(self) -> bytes:
        if not self._options.chunk.usage:
            return b""
        return self._fixed + b',"choices":[],"usage":' + encode_json(self._counts()) + b"}\n\n"

    @property
    def _shows_ids(self) -> bool:
        return self._options.chunk.logprobs or self._options.chunk.token_ids

    def _begin(self, index: int) -> bytes:
        """The chunk before a choice's first text: the echo, and the prompt's ids when they are wanted."""
        progress = self._progress[index]
        if progress.begun:
            return b""
        progress.begun = True
        self._fast = self._plain and all(each.begun for each in self._progress)
        options, stream = self._options, self._job.streams[index // self._job.n]
        extras: dict[str, Any] = {}
        if options.chunk.token_ids:
            extras.update(prompt_token_ids=stream.prompt_ids, token_ids=[])
        echo = "" if options.echoes is None else options.echoes[index // self._job.n]
        if options.echoes is not None and options.chunk.logprobs:
            extras["logprobs"] = progress.logprobs.form(stream.prompt_ids, stream.prompt_logprobs or ())
        return self._chunk(index, echo, None, extras) if echo or extras else b""

    def _extras(self, index: int, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._options.chunk.logprobs and logprobs:
            extras["logprobs"] = self._progress[index].logprobs.form(ids, logprobs)
        if self._options.chunk.token_ids:
            extras["token_ids"] = ids
        return extras

    def _chunk(
        self, index: int, text: str, delta: OutputDelta | None = None, extras: dict[str, Any] | None = None
    ) -> bytes:
        finish = None if delta is None or delta.finish_reason is None else str(delta.finish_reason)
        stop = None if delta is None else delta.stop_reason
        if self._options.scores_only and finish is not None:
            finish, stop = str(FinishReason.LENGTH), None
        rest: dict[str, Any] = {"logprobs": None, "finish_reason": finish, "stop_reason": stop} | (extras or {})
        tail = encode_json(text) + b"," + encode_json(rest)[1:-1] + b"}]"
        return self._heads[index] + tail + self._usage() + b"}\n\n"

    def _usage(self) -> bytes:
        if self._options.chunk.running_usage:
            return b',"usage":' + encode_json(self._counts())
        return b',"usage":null' if self._options.chunk.usage else b""

    def _counts(self) -> dict[str, Any]:
        return self._job.usage(0 if self._options.scores_only else None)


def completion_answer(
    job: Job, choices: Sequence[Choice], options: CompletionOptions, text: TokenTexts
) -> dict[str, Any]:
    """The whole answer of a completion that is not streamed."""
    chosen = best(choices, job.n, options.n)
    answer = _fixed(job)
    answer["choices"] = [_choice(job, choice, i, options, text) for i, choice in enumerate(chosen)]
    answer["usage"] = job.usage(0 if options.scores_only else None)
    return answer


def best(choices: Sequence[Choice], made: int, wanted: int) -> Sequence[Choice]:
    """Of each prompt's `made` choices the `wanted` ones with the highest mean log-probability per token."""
    if made == wanted:
        return choices
    groups = [choices[i : i + made] for i in range(0, len(choices), made)]
    return [choice for group in groups for choice in sorted(group, key=_mean_logprob, reverse=True)[:wanted]]


def _mean_logprob(choice: Choice) -> float:
    return sum(entry.logprob for entry in choice.logprobs) / max(len(choice.logprobs), 1)


def _fixed(job: Job) -> dict[str, Any]:
    return {
        "id": job.head.id,
        "object": "text_completion",
        "created": job.head.created,
        "model": job.head.model,
        "system_fingerprint": job.head.fingerprint,
    }


def _choice(job: Job, choice: Choice, index: int, options: CompletionOptions, text: TokenTexts) -> dict[str, Any]:
    prompt = choice.index // job.n
    stream = job.streams[prompt]
    if options.scores_only:
        choice = Choice(choice.index, finish_reason=str(FinishReason.LENGTH))
    out: dict[str, Any] = {
        "index": index,
        "text": ("" if options.echoes is None else options.echoes[prompt]) + choice.text,
        "logprobs": _logprobs(choice, stream.prompt_ids, stream.prompt_logprobs, options, text),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if options.prompt_logprobs:
        out["prompt_logprobs"] = prompt_logprobs(stream.prompt_logprobs, text)
    if options.chunk.token_ids:
        out.update(token_ids=choice.token_ids, prompt_token_ids=stream.prompt_ids)
    return out


def _logprobs(
    choice: Choice,
    prompt_ids: Sequence[int],
    prompt_entries: Sequence[TokenLogprob | None] | None,
    options: CompletionOptions,
    text: TokenTexts,
) -> dict[str, Any] | None:
    if not options.chunk.logprobs:
        return None
    ids: list[int] = list(choice.token_ids)
    entries: list[TokenLogprob | None] = list(choice.logprobs)
    if options.echoes is not None:
        ids = [*prompt_ids, *ids]
        entries = [*(prompt_entries or ()), *entries]
    return CompletionLogprobs(text, options.chunk.names).form(ids, entries)
