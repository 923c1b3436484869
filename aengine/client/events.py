"""Server-sent events, read from chunks of bytes.

Owns: framing (WHATWG HTML, "Server-sent events"): lines, comments, fields, events across chunk borders.
Does not know: sockets, JSON.
Invariants: an event is told once its blank line came; an unfinished one at the end of the stream is not told.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_EVENT_BYTES = 64 * 2**20  # prompt ids of a long context, twice over


class EventTooLarge(ValueError):
    """An event is longer than any that a server of ours sends."""


class EventReader:
    """Feed bytes, get the data of whole events. Line ends are LF or CRLF."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The `data` field of each event that `data` completes. Raises EventTooLarge."""
        self._rest += data.replace(b"\r\n", b"\n") if b"\r" in data else data
        if b"\n\n" not in data and b"\n\n" not in self._rest:
            if len(self._rest) > MAX_EVENT_BYTES:
                raise EventTooLarge(f"an event has more than {MAX_EVENT_BYTES:,} bytes")
            return
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
