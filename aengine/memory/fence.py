"""Things that may be used again only when a step has retired.

Owns: items waiting for a step, in the order they were deferred.
Does not know: what the items are.
Invariants: `retired` never falls; an item comes out exactly once, when its step or a later one retires.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Fence(Generic[T]):
    """Steps retire in order, so at most (steps in flight) lists are waiting at any time."""

    __slots__ = ("_items", "retired")

    def __init__(self) -> None:
        self.retired = 0  # every step up to this one has retired; steps are numbered from 1
        self._items: dict[int, list[T]] = {}

    def defer(self, step: int, item: T) -> None:
        """Hold `item` until `step` retires. The caller re-uses items of retired steps at once instead."""
        assert step > self.retired, f"step {step} has retired already (up to {self.retired})"
        items = self._items.get(step)
        if items is None:
            self._items[step] = [item]
        else:
            items.append(item)

    def retire(self, step: int) -> list[T]:
        """All steps up to `step` have retired: the items that waited for them, oldest step first."""
        if step <= self.retired:
            return []
        self.retired = step
        if not self._items:
            return []
        out: list[T] = []
        for due in sorted(waiting for waiting in self._items if waiting <= step):
            out += self._items.pop(due)
        return out

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))
