"""What an engine knows of itself at the moment it is asked: gauges, and counts kept elsewhere.

Owns: the names of these figures.
Does not know: who keeps them, what they are called on the wire.
Invariants: pure values; reading one waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Snapshot(Protocol):
    """What is read at scrape time. All but `running`, `waiting`, `kv_usage`, `kv_waste` and `kv_stranded_bytes` only
    grow."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...  # used part of the KV pool, 0 to 1
    @property
    def kv_waste(self) -> float: ...  # part of the KV pool that holds nothing and cannot, 0 to 1
    @property
    def kv_stranded_bytes(self) -> int: ...  # free, but out of reach of the group of layers that has it worst
    @property
    def kv_moved_bytes(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def zombie_rows(self) -> int: ...
    @property
    def prefix_queries(self) -> int: ...  # tokens
    @property
    def prefix_hits(self) -> int: ...  # tokens
    @property
    def drafts(self) -> int: ...  # rows with draft tokens, one a step
    @property
    def drafted_tokens(self) -> int: ...
    @property
    def accepted_tokens(self) -> int: ...
    @property
    def accepted_by_position(self) -> tuple[int, ...]: ...
    @property
    def forced_tokens(self) -> int: ...  # taken over from grammars
    @property
    def media_items(self) -> int: ...  # placed for rows
    @property
    def media_computed(self) -> int: ...  # of these, computed rather than found in the cache


@dataclass(frozen=True, slots=True)
class Idle:
    """A snapshot of an engine that has done nothing."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv_waste: float = 0.0
    kv_stranded_bytes: int = 0
    kv_moved_bytes: int = 0
    preemptions: int = 0
    zombie_rows: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    forced_tokens: int = 0
    media_items: int = 0
    media_computed: int = 0
