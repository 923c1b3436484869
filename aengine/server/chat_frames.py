"""Chat answers as JSON: chunks of a stream, and the whole.

Owns: the shapes of `chat.completion.chunk` and `chat.completion`.
Does not know: HTTP, the engine; it sees a job's counts and its deltas.
Invariants: per choice first a chunk with the role, then content, last one empty delta with the finish reason. What
repeats is encoded once: a content chunk costs two joins and the encoding of its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aengine.server.envelope import encode_json
from aengine.server.jobs import Choice, Job
from aengine.server.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from aengine.types import OutputDelta


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """`usage`: one usage chunk at the end; `running_usage`: usage in every chunk; `token_ids`: ids beside the text.

    `names`: what log-probabilities call tokens; None: by their text.
    """

    usage: bool = False
    running_usage: bool = False
    token_ids: bool = False
    logprobs: bool = False
    names: TokenTexts | None = None


_AFTER = b'},"logprobs":null,"finish_reason":null}]}\n\n'
_AFTER_WITH_USAGE = b'},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'


class ChatFrames:
    """The frames of one streamed chat."""

    __slots__ = ("_after", "_before", "_fixed", "_heads", "_job", "_null_usage", "_options", "_plain", "_text")

    def __init__(self, job: Job, options: ChunkOptions, text: TokenTexts) -> None:
        self._job = job
        self._options = options
        self._text = options.names or text
        head = job.head
        fixed = {
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._fixed = b"data: " + encode_json(fixed)[:-1]
        self._heads = [self._fixed + b',"choices":[{"index":%d,"delta":' % i for i in range(job.choices)]
        self._null_usage = b',"usage":null' if options.usage else b""
        self._plain = not (options.logprobs or options.token_ids or options.running_usage)
        self._before = [head + b'{"content":' for head in self._heads]
        self._after = _AFTER_WITH_USAGE if options.usage else _AFTER

    def opening(self) -> bytes:
        prompt = b""
        if self._options.token_ids:
            prompt = b',"prompt_token_ids":' + encode_json(self._job.streams[0].prompt_ids)
        frames = []
        for i, head in enumerate(self._heads):
            role = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            frames.append(head + role + (b"" if i else prompt) + self._usage() + b"}\n\n")
        return b"".join(frames)

    idle_opening = opening

    def delta(self, delta: OutputDelta) -> bytes:
        if self._plain and delta.finish_reason is None:
            return self._before[delta.index] + encode_json(delta.text) + self._after if delta.text else b""
        shown = delta.text or (delta.token_ids and (self._options.logprobs or self._options.token_ids))
        data = self._content(delta) if shown else b""
        return data if delta.finish_reason is None else data + self._finish(delta)

    def closing(self) -> bytes:
        if not self._options.usage:
            return b""
        return self._fixed + b',"choices":[],"usage":' + encode_json(self._job.usage()) + b"}\n\n"

    def _content(self, delta: OutputDelta) -> bytes:
        logprobs = b"null"
        if self._options.logprobs and delta.logprobs is not None:
            logprobs = encode_json(chat_logprobs(delta.logprobs, self._text))
        ids = b',"token_ids":' + encode_json(delta.token_ids) if self._options.token_ids else b""
        return b"".join(
            (
                self._heads[delta.index],
                b'{"content":',
                encode_json(delta.text),
                b'},"logprobs":',
                logprobs,
                b',"finish_reason":null',
                ids,
                b"}]",
                self._usage(),
                b"}\n\n",
            )
        )

    def _finish(self, delta: OutputDelta) -> bytes:
        reason, stop = encode_json(str(delta.finish_reason)), encode_json(delta.stop_reason)
        tail = b'{},"logprobs":null,"finish_reason":' + reason + b',"stop_reason":' + stop + b"}]"
        return self._heads[delta.index] + tail + self._usage() + b"}\n\n"

    def _usage(self) -> bytes:
        if self._options.running_usage:
            return b',"usage":' + encode_json(self._job.usage())
        return self._null_usage


def chat_answer(job: Job, choices: Sequence[Choice], options: ChunkOptions, text: TokenTexts) -> dict[str, Any]:
    """The whole answer of a chat that is not streamed."""
    head, stream = job.head, job.streams[0]
    answer: dict[str, Any] = {
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
        "choices": [_choice(choice, options, text) for choice in choices],
        "usage": job.usage(),
    }
    if stream.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(stream.prompt_logprobs, text)
    if options.token_ids:
        answer["prompt_token_ids"] = stream.prompt_ids
    return answer


def _choice(choice: Choice, options: ChunkOptions, text: TokenTexts) -> dict[str, Any]:
    out = {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": chat_logprobs(choice.logprobs, options.names or text) if options.logprobs else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if options.token_ids:
        out["token_ids"] = choice.token_ids
    return out
