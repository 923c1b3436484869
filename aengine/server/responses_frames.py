"""Answers of `/v1/responses`: the response object and its named events.

Owns: the shapes of a response, its output items and content parts; the order and the numbers of events.
Does not know: HTTP, the engine, how text is cut into blocks.
Invariants: every event has the next sequence number; what was added is done before the next item is added; the last
event carries the very response that a request without streaming would have got.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from aengine.errors import AengineError
from aengine.server.blocks import Block, Blocks, Closed, Grew, Opened
from aengine.server.envelope import MAX_MESSAGE_CHARS, encode_json, shorten
from aengine.server.jobs import Job
from aengine.server.logprobs import TokenTexts, chat_logprobs
from aengine.server.responses_schema import ResponsesBody
from aengine.types import FinishReason, OutputDelta, TokenLogprob

_PREFIX = {"text": "msg", "reasoning": "rs", "call": "fc"}


class ResponseFrames:
    """The events of one streamed response. Without streaming, its collector: feed it all deltas, read `response`."""

    def __init__(self, job: Job, body: ResponsesBody, blocks: Blocks, text: TokenTexts) -> None:
        self._job = job
        self._body = body
        self._blocks = blocks
        self._text = text
        self._number = 2  # of the next event; the opening's two are made after the first delta's
        self._items: list[dict[str, Any]] = []  # those that are done
        self._entries: list[TokenLogprob] = []  # of tokens whose text no event has shown yet
        self._shown: list[dict[str, Any]] = []  # log-probabilities of the open text
        self._finish: FinishReason | None = None

    def opening(self) -> bytes:
        response = self._response("in_progress") | {"output": []}
        names = ("response.created", "response.in_progress")
        return b"".join(_frame(name, i, {"response": response}) for i, name in enumerate(names))

    idle_opening = opening

    def delta(self, delta: OutputDelta) -> bytes:
        self._entries.extend(delta.logprobs or ())
        changes = self._blocks.feed(delta.text)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
            changes += self._blocks.finish()
        return b"".join(self._change(change) for change in changes)

    def closing(self) -> bytes:
        response = self.response()
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, error: AengineError) -> bytes:
        message = shorten(error.message, MAX_MESSAGE_CHARS)
        failed = {"code": error.code or "server_error", "message": message}
        return self._event("response.failed", response=self._response("failed") | {"error": failed})

    def response(self) -> dict[str, Any]:
        """The whole response, once the last delta was fed."""
        if self._finish is FinishReason.LENGTH:
            return self._response("incomplete") | {"incomplete_details": {"reason": "max_output_tokens"}}
        return self._response("completed")

    def _event(self, type: str, **fields: Any) -> bytes:
        self._number += 1
        return _frame(type, self._number - 1, fields)

    def _change(self, change: Opened | Grew | Closed) -> bytes:
        match change:
            case Opened(block):
                return self._opened(block)
            case Grew(block, text):
                return self._grew(block, text)
            case Closed(block):
                return self._closed(block)

    def _opened(self, block: Block) -> bytes:
        item = _item(block, self._id(block), "in_progress", (), "")
        if block.kind != "call":
            item["content"] = []
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return added
        return added + self._event("response.content_part.added", **self._place(block), part=_part(block, (), ""))

    def _grew(self, block: Block, text: str) -> bytes:
        if block.kind == "call":
            where = {"item_id": self._id(block), "output_index": block.index}
            return self._event("response.function_call_arguments.delta", **where, delta=text)
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **self._place(block), delta=text)
        entries = self._logprobs()
        self._shown += entries
        return self._event("response.output_text.delta", **self._place(block), delta=text, logprobs=entries)

    def _closed(self, block: Block) -> bytes:
        id, text = self._id(block), block.text
        shown, self._shown = self._shown, []
        if block.kind == "text":
            shown += self._logprobs()
        cut = self._finish is FinishReason.LENGTH and block is self._blocks.done[-1]
        item = _item(block, id, "incomplete" if cut else "completed", shown, text)
        self._items.append(item)
        whole = self._whole(block, id, text, shown)
        return whole + self._event("response.output_item.done", output_index=block.index, item=item)

    def _whole(self, block: Block, id: str, text: str, shown: list[dict[str, Any]]) -> bytes:
        """What tells the whole text of a block, before its item is done."""
        if block.kind == "call":
            where = {"item_id": id, "output_index": block.index, "name": block.name}
            return self._event("response.function_call_arguments.done", **where, arguments=text)
        place = self._place(block)
        if block.kind == "reasoning":
            told = self._event("response.reasoning_text.done", **place, text=text)
        else:
            told = self._event("response.output_text.done", **place, text=text, logprobs=shown)
        return told + self._event("response.content_part.done", **place, part=_part(block, shown, text))

    def _logprobs(self) -> list[dict[str, Any]]:
        """The entries that no event has shown yet."""
        entries, self._entries = self._entries, []
        listed: list[dict[str, Any]] = chat_logprobs(entries, self._text)["content"]
        return listed

    def _id(self, block: Block) -> str:
        return f"{_PREFIX[block.kind]}_{self._job.head.id.partition('-')[2]}_{block.index}"

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._id(block), "output_index": block.index, "content_index": 0}

    def _response(self, status: str) -> dict[str, Any]:
        body, head, ended = self._body, self._job.head, status != "in_progress"
        return {
            "id": head.id.replace("-", "_", 1),
            "object": "response",
            "created_at": head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": head.model,
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            "metadata": body.metadata or {},
        }

    def _usage(self) -> dict[str, Any]:
        job = self._job
        return {
            "input_tokens": job.prompt_tokens,
            "input_tokens_details": {"cached_tokens": job.cached_tokens},
            "output_tokens": job.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": job.reasoning_tokens or 0},
            "total_tokens": job.prompt_tokens + job.completion_tokens,
        }


def _frame(type: str, number: int, fields: dict[str, Any]) -> bytes:
    data = encode_json({"type": type, "sequence_number": number, **fields})
    return b"event: " + type.encode() + b"\ndata: " + data + b"\n\n"


def _item(block: Block, id: str, status: str, logprobs: Sequence[dict[str, Any]], text: str) -> dict[str, Any]:
    if block.kind == "call":
        call = {"call_id": block.call_id, "name": block.name, "arguments": text}
        return {"id": id, "type": "function_call", "status": status, **call}
    content = [_part(block, logprobs, text)]
    if block.kind == "reasoning":
        return {"id": id, "type": "reasoning", "status": status, "summary": [], "content": content}
    return {"id": id, "type": "message", "status": status, "role": "assistant", "content": content}


def _part(block: Block, logprobs: Iterable[dict[str, Any]], text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
