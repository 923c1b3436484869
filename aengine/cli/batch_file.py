"""Batch files in OpenAI's format: requests in, answers out, one JSON object a line.

Owns: reading and checking request lines, answer lines, what an earlier run has already answered.
Does not know: sockets, engines, progress bars.
Invariants: every request line gets exactly one answer line, found by its custom_id; a line that an interrupted run left
unfinished is cut off before more is written.

Format: OpenAI Batch API, "The request input object" and "The request output object".
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from aengine.errors import AengineError, InvalidRequest

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")


class BatchError(AengineError):
    """The file cannot be worked on as a whole."""


class BatchRequest(msgspec.Struct, frozen=True):
    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class BatchResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: Any


class BatchFault(msgspec.Struct, frozen=True):
    code: str
    message: str


class BatchAnswer(msgspec.Struct, frozen=True):
    """`response` None: nothing was answered. `error`: set when the status is not 200."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: BatchFault | None

    @property
    def final(self) -> bool:
        """Whether asking again would be answered the same: a success, or what the request asks for."""
        return self.status in (200, 501) or (400 <= self.status < 500 and self.status != 429)

    @property
    def fault(self) -> bool:
        """Whether the server failed at this request, rather than having no room or no time for it."""
        return self.status == 500

    @property
    def status(self) -> int:
        """0: nothing was answered."""
        return 0 if self.response is None else self.response.status_code


_decode_request = msgspec.json.Decoder(BatchRequest).decode
_decode_answer = msgspec.json.Decoder(BatchAnswer).decode


def read_requests(path: Path) -> list[BatchRequest]:
    """All requests of a file. Raises BatchError naming the first line that is none, or whose custom_id is taken."""
    requests: dict[str, BatchRequest] = {}
    for number, line in _lines(path):
        try:
            request = _decode_request(line)
            check(request)
        except (msgspec.MsgspecError, InvalidRequest) as error:
            raise BatchError(f"{path}, line {number}: {error}") from None
        if request.custom_id in requests:
            raise BatchError(f"{path}, line {number}: custom_id {request.custom_id[:100]!r} appears twice")
        requests[request.custom_id] = request
    return list(requests.values())


def check(request: BatchRequest) -> None:
    """Raises InvalidRequest for what no server could answer in a file."""
    if request.url not in ENDPOINTS:
        raise InvalidRequest(f"url is {request.url[:100]!r}, not one of {', '.join(ENDPOINTS)}", param="url")
    if request.method != "POST":
        raise InvalidRequest(f"method is {request.method[:20]!r}, not POST", param="method")
    if request.body.get("stream"):
        raise InvalidRequest("body.stream is true: an answer in a file cannot be streamed", param="stream")


def answered(path: Path) -> dict[str, BatchAnswer]:
    """Final answers of an earlier run, by custom_id; the file keeps these and nothing else.

    Raises BatchError when the file holds something that is no answer, except an unfinished last line.
    """
    if not path.exists():
        return {}
    done: dict[str, BatchAnswer] = {}
    whole, cut = True, False
    for number, line in _lines(path):
        try:
            answer = _decode_answer(line)
        except msgspec.MsgspecError as error:
            if not line.endswith(b"\n"):  # the run was ended while it wrote
                cut = True
                continue
            raise BatchError(
                f"{path}, line {number} is no answer of a batch ({error}); choose another output"
            ) from None
        cut |= not line.endswith(b"\n")
        whole &= answer.final and answer.custom_id not in done
        if answer.final:
            done[answer.custom_id] = answer
    if cut or not whole:
        kept = path.with_name(path.name + ".kept")
        kept.write_bytes(b"".join(map(answer_line, done.values())))
        kept.replace(path)
    return done


def answer_line(answer: BatchAnswer) -> bytes:
    return msgspec.json.encode(answer) + b"\n"


def answer_of(request: BatchRequest, status: int, request_id: str, body: Any) -> BatchAnswer:
    fault = None
    if status != 200:
        said = body.get("error") if isinstance(body, dict) else None
        told: dict[str, Any] = said if isinstance(said, dict) else {}
        code, message = told.get("code") or told.get("type") or status, told.get("message") or f"status {status}"
        fault = BatchFault(str(code), str(message))
    return BatchAnswer(_new_id(), request.custom_id, BatchResponse(status, request_id, body), fault)


def unanswered(request: BatchRequest, message: str) -> BatchAnswer:
    return BatchAnswer(_new_id(), request.custom_id, None, BatchFault("server_unreachable", message))


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise BatchError(f"{path} cannot be read: {error.strerror or error}") from error
