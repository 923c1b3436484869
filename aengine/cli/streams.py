"""An answer as it comes over the wire, for `aengine chat`.

Owns: event streams of chat completions: their lines, chunks, what is gathered from them.
Does not know: sockets, status codes.
Invariants: whatever comes is a chunk, the end, an error that the server told, or Malformed; text is whole characters.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Protocol

from aengine.cli.session import Answer
from aengine.errors import InvalidRequest

MAX_LINE_BYTES = 16 * 2**20
SHOWN = 300  # characters of what a server told


class Malformed(ValueError):
    """What came is no stream of an answer."""


class Lines(Protocol):
    def readline(self, limit: int, /) -> bytes: ...


def chunks(lines: Lines) -> Iterator[dict[str, Any]]:
    """Until the stream ends; the last is {"done": True} where the server said so. Raises InvalidRequest for an error
    that the server told."""
    while line := lines.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise Malformed(f"sent a line of more than {MAX_LINE_BYTES:,} bytes")
        if not line.startswith(b"data:") or not line.endswith(b"\n"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            yield {"done": True}
            return
        try:
            chunk = json.loads(data.decode(errors="replace"))
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, dict):
            raise Malformed(f"sent what is no chunk of an answer: {data[:80].decode(errors='replace')!r}")
        if chunk.get("error") or ("choices" not in chunk and said(chunk)):
            raise InvalidRequest(f"the server broke the answer off: {said(chunk)}")
        yield chunk


class Gathered:
    """One answer so far."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._ttft_s: float | None = None
        self._text, self._thought = Joined(), Joined()
        self._usage: dict[str, Any] = {}
        self._finish: str | None = None
        self._done = False

    def add(self, chunk: dict[str, Any]) -> Answer:
        """The answer with the chunk in it. Raises Malformed."""
        if chunk.get("done"):
            self._done = True
        try:
            self._take(chunk)
            return self._answer()
        except (TypeError, ValueError, AttributeError, LookupError):
            raise Malformed(f"sent what is no chunk of an answer: {json.dumps(chunk)[:80]}") from None

    @property
    def complete(self) -> bool:
        """Some servers leave the last line out, but none the reason for which an answer ended."""
        return self._done or self._finish is not None

    def _take(self, chunk: dict[str, Any]) -> None:
        self._usage = chunk.get("usage") or self._usage
        choices = chunk.get("choices")
        if not choices:
            return
        delta = choices[0].get("delta") or {}
        thought, text = delta.get("reasoning_content") or delta.get("reasoning") or "", delta.get("content") or ""
        if self._ttft_s is None and (thought or text):
            self._ttft_s = time.perf_counter() - self._began_s
        self._thought.add(thought)
        self._text.add(text)
        self._finish = choices[0].get("finish_reason") or self._finish

    def _answer(self) -> Answer:
        details = self._usage.get("prompt_tokens_details") or {}
        return Answer(
            text=self._text.text,
            tokens=int(self._usage.get("completion_tokens") or 0),
            prompt_tokens=int(self._usage.get("prompt_tokens") or 0),
            cached_tokens=int(details.get("cached_tokens") or 0),
            ttft_s=self._ttft_s,
            reasoning=self._thought.text,
            cut_off=self._finish == "length",
        )


class Joined:
    """Text from pieces, of which one may end in the middle of a character that UTF-16 has in two halves."""

    def __init__(self) -> None:
        self.text = ""
        self._half = ""

    def add(self, piece: str) -> None:
        piece = self._half + piece
        self._half = piece[-1:] if "\ud800" <= piece[-1:] <= "\udbff" else ""
        whole = piece.removesuffix(self._half)
        self.text += whole.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def said(told: object) -> str:
    """The message in an error of any of the common forms, on one line; "" where there is none."""
    while isinstance(told, dict):
        told = next((told[name] for name in ("error", "message", "detail", "msg") if told.get(name)), "")
    if isinstance(told, list):
        return said(told[0]) if told else ""
    text = " ".join(str(told or "").split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
