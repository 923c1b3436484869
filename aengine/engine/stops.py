"""Finding stop strings in streamed text without ever letting text behind one out.

Owns: `StopStrings`.
Does not know: tokens, streams.
Invariants: emitted text plus held text is all that was pushed, until a hit; emitted text never contains a stop string,
nor the beginning of one that later text completes.
"""

from __future__ import annotations


class StopStrings:
    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """New text -> (text that may go out now, the stop string hit or None).

        After a hit the text ends with, or (by default) before, the stop that begins first; the longest if several do.
        """
        if not self._stops:
            return text, None
        held = self._held + text
        hits = [(at, -len(stop), stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if hits:
            at, _, stop = min(hits)
            self._held = ""
            return held[: at + len(stop)] if self._include else held[:at], stop
        keep = self._partial(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def skip(self, text: str) -> str:
        """New text that may not stop (below min_tokens): goes out at once, with all that was held."""
        held, self._held = self._held + text, ""
        return held

    def flush(self) -> str:
        """The request ended otherwise: what was held back."""
        held, self._held = self._held, ""
        return held

    def _partial(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
