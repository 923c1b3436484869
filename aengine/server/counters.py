"""What happens at the socket, counted.

Owns: `Counters`.
Does not know: who counts, how it is shown.
Invariants: every kind is there from the beginning, with 0.
"""

from __future__ import annotations

from collections import Counter

from aengine.types import HttpFigures

EVENTS = (
    "malformed",  # not HTTP, or beyond the limits of a head
    "evicted",  # idle, closed to make room for a new connection
    "refused",  # all connections were busy
    "stalled",  # took no byte for too long
    "body_timeout",  # did not send its body in time
    "uploads_full",  # bodies that are being read hold all the memory they may
)


class Counters:
    """`connections` and `busy` are what is open now."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter(dict.fromkeys(EVENTS, 0))
        self.connections = 0
        self.busy = 0
        self.upload_bytes = 0

    def figures(self) -> HttpFigures:
        return HttpFigures(dict(self.events), self.connections, self.busy, self.upload_bytes)
