"""What processes that listen tell of themselves.

Owns: the figures that cross from a listening process to the one that renders metrics.
Does not know: sockets, metrics' names.
Invariants: faults only grow; sums over processes are meaningful for every field.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class HttpFigures(msgspec.Struct, frozen=True):
    """What one listening process has seen at its sockets: faults by kind, which only grow, and what is open now."""

    faults: Mapping[str, int] = {}
    connections: int = 0
    connections_busy: int = 0
    upload_bytes: int = 0
