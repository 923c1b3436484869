"""Where every byte of the arena is.

Owns: the frozen statistics of a pool.
Does not know: how pages got where they are.
Invariants: live + fenced + cached + slab-free + pitch padding + unowned + null = arena, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aengine.memory.pool import Pool


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Pages of one group. `free`: free slots in slabs the group owns; `total` counts all pages of those slabs."""

    name: str
    slabs: int
    free: int
    live: int
    cached: int
    fenced: int
    evicted: int
    evicted_by_steal: int
    moved: int
    stranded_bytes: int

    @property
    def total(self) -> int:
        return self.free + self.live + self.cached + self.fenced


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Bytes of the arena by class. `live` and `fenced` are payload; a live page's unused tail is not known here."""

    arena_bytes: int
    null_bytes: int
    unowned_bytes: int
    live_bytes: int
    fenced_bytes: int
    cached_bytes: int
    slab_free_bytes: int
    pitch_bytes: int
    held_bytes: int  # live and fenced pages with their pitch padding
    groups: tuple[GroupStats, ...]
    unowned_slabs: int
    idle_slabs: int
    retypes: int
    moved_bytes: int  # by compaction, ever

    @property
    def usage(self) -> float:
        """Share of the usable arena held by sequences (live and fenced pages)."""
        return self.held_bytes / (self.arena_bytes - self.null_bytes)

    def waste(self, tail_bytes: int = 0) -> float:
        """Share of the arena that holds nothing and cannot: free slots of slabs in use, pitch padding, and the unused
        tails of live pages, which the caller knows."""
        return (self.slab_free_bytes + self.pitch_bytes + tail_bytes) / self.arena_bytes


def measure(pool: Pool) -> PoolStats:
    plan = pool.plan
    groups = []
    live = fenced = cached = free = pitch = held = moved = 0
    for group, planned in zip(pool.groups, plan.groups, strict=True):
        free_slots = group.owned * group.slots - group.live - group.cached - group.fenced
        live += group.live * planned.payload
        fenced += group.fenced * planned.payload
        cached += group.cached * planned.payload
        moved += group.moved * planned.payload
        held += (group.live + group.fenced) * planned.pitch
        free += free_slots * planned.payload
        pitch += group.owned * group.slots * (planned.pitch - planned.payload)
        groups.append(
            GroupStats(
                planned.spec.name,
                group.owned,
                free_slots,
                group.live,
                group.cached,
                group.fenced,
                group.evicted,
                group.evicted_by_steal,
                group.moved,
                pool.stranded_bytes(group.index),
            )
        )
    return PoolStats(
        arena_bytes=plan.arena_bytes,
        null_bytes=plan.large_bytes,
        unowned_bytes=pool.unowned_slabs * plan.large_bytes,
        live_bytes=live,
        fenced_bytes=fenced,
        cached_bytes=cached,
        slab_free_bytes=free,
        pitch_bytes=pitch,
        held_bytes=held,
        groups=tuple(groups),
        unowned_slabs=pool.unowned_slabs,
        idle_slabs=pool.idle_slabs,
        retypes=pool.retypes,
        moved_bytes=moved,
    )
