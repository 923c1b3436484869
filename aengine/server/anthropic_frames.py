"""Answers of `/v1/messages`: the message and its events.

Owns: the shapes of a message, its blocks, its stop reasons and its usage.
Does not know: HTTP, the engine, how text is cut into blocks.
Invariants: message_start and ping first, each block between its start and stop, message_delta and message_stop last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from aengine.errors import AengineError
from aengine.server.blocks import Block, Blocks, Change, Closed, Grew, Opened
from aengine.server.envelope import encode_json, typed_error_object
from aengine.server.jobs import Job
from aengine.server.sse import Dialect
from aengine.types import FinishReason, OutputDelta


def event(type: str, **fields: Any) -> bytes:
    return b"event: " + type.encode() + b"\ndata: " + encode_json({"type": type, **fields}) + b"\n\n"


PING = event("ping")


def failure(error: AengineError) -> bytes:
    return b"event: error\ndata: " + encode_json(typed_error_object(error)) + b"\n\n"


DIALECT = Dialect(done=b"", keep_alive=PING, failure=failure)


class MessageFrames:
    """The events of one streamed message; without streaming, its collector: feed it all deltas, then read `message`.

    `stops` are the client's own stop sequences; others that the server added are no news to it.
    """

    def __init__(self, job: Job, blocks: Blocks, stops: Sequence[str]) -> None:
        self._job = job
        self._blocks = blocks
        self._stops = stops
        self._finish: FinishReason | None = None
        self._stop: str | None = None

    def opening(self) -> bytes:
        return event("message_start", message=self._message([], self._usage() | {"output_tokens": 0})) + PING

    idle_opening = opening

    def delta(self, delta: OutputDelta) -> bytes:
        changes = self._blocks.feed(delta.text)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
            self._stop = next((stop for stop in self._stops if stop == delta.stop_reason), None)
            changes += self._blocks.finish()
        return b"".join(_change(change) for change in changes)

    def closing(self) -> bytes:
        return event("message_delta", delta=self._ending(), usage=self._usage()) + event("message_stop")

    def message(self) -> dict[str, Any]:
        """The whole message, once the last delta was fed."""
        blocks = [_block(block, block.text) for block in self._blocks.done]
        return self._message(blocks, self._usage()) | self._ending()

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        head = self._job.head
        return {
            "id": head.id.replace("-", "_", 1),
            "type": "message",
            "role": "assistant",
            "model": head.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _ending(self) -> dict[str, Any]:
        if self._finish is FinishReason.LENGTH:
            reason = "max_tokens"
        elif self._stop is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._blocks.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": self._stop}

    def _usage(self) -> dict[str, Any]:
        """What the cache held is counted apart from the rest of the prompt."""
        job = self._job
        return {
            "input_tokens": job.prompt_tokens - job.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": job.cached_tokens,
            "output_tokens": job.completion_tokens,
        }


def _change(change: Change) -> bytes:
    match change:
        case Opened(block):
            return event("content_block_start", index=block.index, content_block=_block(block, ""))
        case Grew(block, text):
            return event("content_block_delta", index=block.index, delta=_grown(block, text))
        case Closed(block):
            return event("content_block_stop", index=block.index)


def _block(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _arguments(text)}


def _grown(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text_delta", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _arguments(text: str) -> dict[str, Any]:
    """The wire has an object here. Arguments that were cut off by a limit, or are no object, stand in one field."""
    if not text:
        return {}
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {"_raw": text}
    return decoded if isinstance(decoded, dict) else {"_raw": text}
