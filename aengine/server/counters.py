"""What happens at the socket, counted.

Owns: `Counters` and its Prometheus text.
Does not know: who counts, the engine's own metrics.
Invariants: every kind is there from the beginning, with 0; the text ends with a newline.
"""

from __future__ import annotations

from collections import Counter

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

    def render(self) -> bytes:
        lines = ["# HELP aengine:http_faults_total Connections and requests that were cut.", *self._events()]
        for name, text, value in (
            ("connections", "Open connections.", self.connections),
            ("connections_busy", "Connections with a request under way.", self.busy),
            ("upload_bytes", "Bytes of bodies that are being read.", self.upload_bytes),
        ):
            lines += [f"# HELP aengine:http_{name} {text}", f"# TYPE aengine:http_{name} gauge"]
            lines += [f"aengine:http_{name} {value}"]
        return "\n".join([*lines, ""]).encode()

    def _events(self) -> list[str]:
        counts = [f'aengine:http_faults_total{{kind="{kind}"}} {count}' for kind, count in self.events.items()]
        return ["# TYPE aengine:http_faults_total counter", *counts]
