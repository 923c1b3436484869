"""Large pages that no group holds pages in, and how a slab becomes or stops being one.

Owns: the stack of unowned slabs, the list of idle ones (oldest first), the count of closed ones, how far the arena has
been used.
Does not know: pages, names, the fence.
Invariants: a slab is in the idle list exactly when it is idle; `free_active` and `cached_active` of its group count it
exactly when it is active and not closed.
"""

from __future__ import annotations

from aengine.memory.slabs import GroupSlabs, Slab


class SpareSlabs:
    """`idle.next` has been idle longest. `closed`: emptied slabs that come back when the fence opens."""

    __slots__ = ("_reached", "_slabs", "closed", "idle", "idle_slabs", "unowned")

    def __init__(self, slabs: list[Slab]) -> None:
        self.unowned = slabs[:0:-1]  # slab 0 holds the null pages
        self._slabs = slabs
        self._reached = 1
        self.idle = Slab(-1)  # list head
        self.idle_slabs = 0
        self.closed = 0

    @property
    def count(self) -> int:
        """Large pages that any group may have, now or as soon as the fence opens."""
        return len(self.unowned) + self.idle_slabs + self.closed

    @property
    def reached(self) -> int:
        """Large pages from the first on that have ever held anything. All behind them are as they came from the system:
        the stack has used slabs above unused ones, and of those the first on top."""
        while self._reached < len(self._slabs) and self._slabs[self._reached].element is not None:
            self._reached += 1
        return self._reached

    def activate(self, group: GroupSlabs, slab: Slab) -> None:
        """Idle -> active; the caller raises `live` right after."""
        self._unlink(slab)
        group.free_active += slab.free_slots
        group.cached_active += slab.cached
        if slab.free:
            del group.idle_free[slab.index]

    def deactivate(self, group: GroupSlabs, slab: Slab, stamp: int) -> None:
        """Active -> idle or unowned, when the last live page has gone."""
        if slab.closed:
            slab.closed = False
            self.closed -= 1
        else:
            group.free_active -= slab.free_slots
            group.cached_active -= slab.cached
            if group.slots > 1:
                group.file(slab)
        if not slab.cached:
            self._disown(group, slab)
            return
        slab.stamp = stamp
        last = self.idle.prev
        slab.prev, slab.next = last, self.idle
        last.next = self.idle.prev = slab
        self.idle_slabs += 1
        if slab.free:
            group.idle_free[slab.index] = slab

    def forget(self, group: GroupSlabs, slab: Slab) -> None:
        """Idle -> unowned, when the last cached page has gone."""
        self._unlink(slab)
        group.idle_free.pop(slab.index, None)
        self._disown(group, slab)

    def close(self, group: GroupSlabs, slab: Slab) -> None:
        """No page of an active slab is handed out any more until the last live one has gone: compaction empties it."""
        group.free_active -= slab.free_slots
        group.cached_active -= slab.cached
        slab.closed = True
        self.closed += 1
        group.file(slab)

    def reopen(self, group: GroupSlabs, slab: Slab) -> None:
        """A page of a closed slab is wanted again."""
        slab.closed = False
        self.closed -= 1
        group.free_active += slab.free_slots
        group.cached_active += slab.cached
        group.file(slab)

    def _unlink(self, slab: Slab) -> None:
        before, after = slab.prev, slab.next
        before.next, after.prev = after, before
        slab.prev = slab.next = slab
        self.idle_slabs -= 1

    def _disown(self, group: GroupSlabs, slab: Slab) -> None:
        slab.group = -1
        slab.free = slab.free_slots = 0
        group.owned -= 1
        self.unowned.append(slab)
