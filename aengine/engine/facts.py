"""What an engine tells about itself.

Owns: ModelInfo, Health, EngineStats, StartupReport.
Does not know: how they are measured.
Invariants: frozen; times in seconds, sizes in bytes unless the name says otherwise.
"""

from __future__ import annotations

import msgspec

from aengine.scheduler import SchedulerStats


class ModelInfo(msgspec.Struct, frozen=True):
    """The loaded model. `chat_stops` end a chat answer of a model that has no template of its own.

    `names` are the served names, the main one first; `max_model_len` in tokens.
    `image_token`: id of the placeholder of an image; None: the model takes text only."""

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    has_chat_template: bool
    created: int
    dtype: str = "float32"
    chat_stops: tuple[str, ...] = ()
    image_token: int | None = None

    @property
    def takes_images(self) -> bool:
        return self.image_token is not None


class Health(msgspec.Struct, frozen=True):
    """`ok` is false before "ready", when the loop died, or when work waits and no step has ended for a while."""

    ok: bool
    phase: str
    reason: str | None = None


class EngineStats(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    in_flight: int
    preemptions: int
    zombie_rows: int
    steps: int
    steps_overlapped: int
    drafts: int
    drafted_tokens: int
    accepted_tokens: int
    accepted_by_position: tuple[int, ...]
    forced_tokens: int
    kv_usage: float
    kv_waste: float
    kv_stranded_bytes: int
    kv_moved_bytes: int
    prefix_queries: int
    prefix_hits: int
    open_streams: int
    device_s: float
    media_items: int = 0
    media_computed: int = 0


class StartupReport(msgspec.Struct, frozen=True):
    """`phases`: (name, seconds); `ledger`: (what, bytes); `pages`: the table of page groups; `lines`:
    notes and warnings for the log."""

    phases: tuple[tuple[str, float], ...] = ()
    ledger: tuple[tuple[str, int], ...] = ()
    pages: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


__all__ = ["EngineStats", "Health", "ModelInfo", "SchedulerStats", "StartupReport"]
