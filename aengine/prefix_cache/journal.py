"""What was published for steps that have not retired, and what they move.

Owns: the lists of such pages by step, so that a failed step can take its pages back.
Does not know: pools, groups.
Invariants: an entry is dropped when its step retires; entries are in order of publication.
"""

from __future__ import annotations

from aengine.memory.slabs import Page


class Journal:
    """`serial` identifies the publishing lease."""

    __slots__ = ("_moved", "_steps", "published")

    def __init__(self) -> None:
        self._moved: dict[int, list[Page]] = {}
        self._steps: dict[int, list[tuple[Page, bytes, int]]] = {}
        self.published = 0  # pages, ever, whether journalled or not

    def record(self, page: Page, serial: int, step: int | None) -> None:
        """`step` None: what the page holds has been computed already."""
        self.published += 1
        if step is None:
            return
        assert page.key is not None
        entries = self._steps.get(step)
        if entries is None:
            entries = self._steps[step] = []
        entries.append((page, page.key, serial))

    def record_all(self, pages: list[Page], serial: int, step: int | None) -> None:
        self.published += len(pages)
        if step is not None:
            entries = self._steps.setdefault(step, [])
            entries += [(page, page.key, serial) for page in pages if page.key is not None]

    def moved(self, page: Page, step: int) -> None:
        """`step` copies the page to the address it has now."""
        self._moved.setdefault(step, []).append(page)

    def moved_by(self, step: int) -> list[Page]:
        return self._moved.get(step, [])

    def retire(self, step: int) -> None:
        for entries in (self._steps, self._moved):
            if entries:
                for done in [s for s in entries if s <= step]:
                    del entries[done]

    def take(self, step: int, serial: int | None) -> list[tuple[Page, bytes, int]]:
        """Remove and return (page, name it got then, serial) of `step` and later, of one lease or of all."""
        out = []
        for failed in sorted(s for s in self._steps if s >= step):
            kept = []
            for page, key, owner in self._steps[failed]:
                if serial is not None and owner != serial:
                    kept.append((page, key, owner))
                else:
                    out.append((page, key, owner))
            self._steps[failed] = kept
        return out
