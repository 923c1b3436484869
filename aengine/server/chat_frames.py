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

from aengine.server.answers import finish_reason, message_fields
from aengine.server.envelope import encode_json
from aengine.server.jobs import Choice, Job
from aengine.server.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from aengine.server.pieces import AnswerParser, CallArguments, CallStart, Piece, Reasoning, Text
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

    __slots__ = (
        "_after",
        "_before",
        "_called",
        "_fixed",
        "_heads",
        "_job",
        "_null_usage",
        "_options",
        "_parsers",
        "_plain",
        "_text",
    )

    def __init__(
        self, job: Job, options: ChunkOptions, text: TokenTexts, parsers: Sequence[AnswerParser] | None = None
    ) -> None:
        """`parsers`, one per choice, cut the text into pieces; None: the text is the content."""
        self._parsers = parsers
        self._called: set[int] = set()  # choices that called a tool
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
        self._before = tuple(head + b'{"content":' for head in self._heads)
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
        if self._parsers is not None:
            return self._parsed(delta, self._parsers[delta.index])
        if self._plain and delta.finish_reason is None:
            return self._before[delta.index] + encode_json(delta.text) + self._after if delta.text else b""
        shown = delta.text or self._tells(delta)
        data = self._content(delta, b'"content":' + encode_json(delta.text)) if shown else b""
        return data if delta.finish_reason is None else data + self._finish(delta, delta.finish_reason)

    def _parsed(self, delta: OutputDelta, parser: AnswerParser) -> bytes:
        pieces = list(parser.feed(delta.text)) if delta.text else []
        if delta.finish_reason is not None:
            pieces += parser.finish()
        if any(isinstance(piece, CallStart) for piece in pieces):
            self._called.add(delta.index)
        fields = [encode_json(delta_fields(piece))[1:-1] for piece in pieces]
        if not fields and self._tells(delta):
            fields = [b'"content":""']
        chunks = [self._content(delta, field, first=i == 0) for i, field in enumerate(fields)]
        if delta.finish_reason is not None:
            called = delta.index in self._called
            chunks.append(self._finish(delta, finish_reason(delta.finish_reason, parser, called=called)))
        return b"".join(chunks)

    def _tells(self, delta: OutputDelta) -> bool:
        """Whether its tokens are told even without text."""
        return bool(delta.token_ids) and (self._options.logprobs or self._options.token_ids)

    def closing(self) -> bytes:
        if not self._options.usage:
            return b""
        return self._fixed + b',"choices":[],"usage":' + encode_json(self._job.usage()) + b"}\n\n"

    def _content(self, delta: OutputDelta, fields: bytes, *, first: bool = True) -> bytes:
        """One chunk. What a delta tells of its tokens is in its first one."""
        logprobs, ids = b"null", b""
        if first and self._options.logprobs and delta.logprobs is not None:
            logprobs = encode_json(chat_logprobs(delta.logprobs, self._text))
        if self._options.token_ids:
            ids = b',"token_ids":' + encode_json(delta.token_ids if first else ())
        return b"".join(
            (
                self._heads[delta.index],
                b"{",
                fields,
                b'},"logprobs":',
                logprobs,
                b',"finish_reason":null',
                ids,
                b"}]",
                self._usage(),
                b"}\n\n",
            )
        )

    def _finish(self, delta: OutputDelta, why: str) -> bytes:
        reason, stop = encode_json(str(why)), encode_json(delta.stop_reason)
        tail = b'{},"logprobs":null,"finish_reason":' + reason + b',"stop_reason":' + stop + b"}]"
        return self._heads[delta.index] + tail + self._usage() + b"}\n\n"

    def _usage(self) -> bytes:
        if self._options.running_usage:
            return b',"usage":' + encode_json(self._job.usage())
        return self._null_usage


def delta_fields(piece: Piece) -> dict[str, Any]:
    """A piece as fields of a chunk's delta."""
    match piece:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning": text, "reasoning_content": text}
        case CallStart(index, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def chat_answer(
    job: Job,
    choices: Sequence[Choice],
    options: ChunkOptions,
    text: TokenTexts,
    parsers: Sequence[AnswerParser] | None = None,
) -> dict[str, Any]:
    """The whole answer of a chat that is not streamed."""
    head, stream = job.head, job.streams[0]
    told = [_choice(choice, options, text, parsers[choice.index] if parsers else None) for choice in choices]
    answer: dict[str, Any] = {
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
        "choices": told,
        "usage": job.usage(),
    }
    if stream.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(stream.prompt_logprobs, text)
    if options.token_ids:
        answer["prompt_token_ids"] = stream.prompt_ids
    return answer


def _choice(choice: Choice, options: ChunkOptions, text: TokenTexts, parser: AnswerParser | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"content": choice.text, "refusal": None}
    why = choice.finish_reason
    if parser is not None:
        fields = message_fields([*parser.feed(choice.text), *parser.finish()])
        why = finish_reason(why, parser, called="tool_calls" in fields)
    out = {
        "index": choice.index,
        "message": {"role": "assistant", **fields},
        "logprobs": chat_logprobs(choice.logprobs, options.names or text) if options.logprobs else None,
        "finish_reason": why,
        "stop_reason": choice.stop_reason,
    }
    if options.token_ids:
        out["token_ids"] = choice.token_ids
    return out
