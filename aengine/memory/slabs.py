"""Pages, the large pages (slabs) they are cut from, and the lists they stand in.

Owns: Page, Slab and GroupSlabs, plain records with intrusive list links, and the moves of slabs between lists.
Does not know: when pages are taken or evicted; the pool decides.
Invariants: a page or slab that stands in no list is linked to itself; an active slab that is not closed stands at level
`live` of its group's `with_free` exactly when it has a free slot, and of `with_cached` exactly when it has a cached
page; a slab is in the group's `idle_free` exactly when it is idle and has a free slot.
"""

from __future__ import annotations

from enum import IntEnum


class Where(IntEnum):
    """What a page with ref 0 is. (With ref > 0 it is live, and this is PLAIN.)"""

    PLAIN = 0  # free, or never used
    CACHED = 1  # keyed, evictable, in its group's LRU list
    FENCED = 2  # named by a step that has not retired


class Page:
    """A small page. Identity is the object; (group, id) is its address, which compaction may change.

    `ref`: leases that hold it. `key`: the name it is published under, or None. `last`: the last step that names it,
    or any that has retired. `stamp`: logical time at which it was last let go. `holder`, `index`: notes of whoever
    holds it, for finding it in the holder's tables; the pool does not read them.
    """

    __slots__ = (
        "group",
        "holder",
        "id",
        "index",
        "key",
        "last",
        "next",
        "prev",
        "ref",
        "slab",
        "slot",
        "stamp",
        "where",
    )

    def __init__(self, group: int, id: int, slab: Slab | None, slot: int) -> None:
        self.group = group
        self.id = id
        self.slab: Slab = slab  # type: ignore[assignment]  # only the list heads have none
        self.slot = slot
        self.ref = 0
        self.key: bytes | None = None
        self.last = -1
        self.stamp = 0
        self.where = 0
        self.holder = -1
        self.index = 0
        self.prev: Page = self
        self.next: Page = self

    def __repr__(self) -> str:
        state = f"ref {self.ref}" if self.ref else Where(self.where).name.lower()
        return f"<page {self.group}:{self.id} {state}{' keyed' if self.key else ''}>"


class Slab:
    """A large page. `live` counts referenced and fenced pages, `fenced` the latter; `free` is a bit mask of free slots.

    Unowned: group -1. Active: live > 0. Idle: live == 0 and cached > 0. Closed: active, its pages moved away; no
    page of it is handed out, so that it becomes unowned or idle when the fence opens.
    """

    __slots__ = (
        "cached",
        "cached_at",
        "closed",
        "element",
        "fenced",
        "free",
        "free_at",
        "free_slots",
        "group",
        "index",
        "live",
        "next",
        "prev",
        "stamp",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.group = -1
        self.live = 0
        self.fenced = 0
        self.cached = 0
        self.free = 0
        self.free_slots = 0
        self.closed = False
        self.free_at = self.cached_at = -1  # its levels in `with_free` and `with_cached`
        self.element: tuple[str, ...] | None = None  # element types of the bytes in it; None: zeros
        self.stamp = 0
        self.prev: Slab = self
        self.next: Slab = self

    def __repr__(self) -> str:
        return f"<slab {self.index} of {self.group}: {self.live} live, {self.cached} cached, {self.free_slots} free>"


class Levels:
    """Slabs by number of live pages. `occupied` is the bit mask of the levels that have some: the fullest slab is at
    its highest bit, the sparsest at its lowest. Levels are insertion-ordered dicts used as stacks."""

    __slots__ = ("occupied", "rows")

    def __init__(self, slots: int) -> None:
        self.rows: list[dict[int, Slab]] = [{} for _ in range(slots)]
        self.occupied = 0

    def shift(self, slab: Slab, have: int, want: int) -> None:
        """From one level to another; -1: none."""
        if have >= 0:
            row = self.rows[have]
            del row[slab.index]
            if not row:
                self.occupied &= ~(1 << have)
        if want >= 0:
            self.rows[want][slab.index] = slab
            self.occupied |= 1 << want

    def fullest(self) -> Slab:
        """Only if `occupied`."""
        return next(reversed(self.rows[self.occupied.bit_length() - 1].values()))

    def sparsest(self) -> Slab | None:
        """The slab with fewest live pages of which some are held, not only waiting for the fence."""
        left = self.occupied
        while left:
            for slab in self.rows[(left & -left).bit_length() - 1].values():
                if slab.live > slab.fenced:
                    return slab
            left &= left - 1
        return None


class GroupSlabs:
    """One group's slabs, pages and counters. `free_active` and `cached_active` leave closed slabs out."""

    __slots__ = (
        "cached",
        "cached_active",
        "element",
        "evicted",
        "evicted_by_steal",
        "fenced",
        "free_active",
        "idle_free",
        "index",
        "live",
        "lru",
        "moved",
        "owned",
        "pages",
        "slots",
        "with_cached",
        "with_free",
    )

    def __init__(self, index: int, slots: int, large_pages: int, element: tuple[str, ...]) -> None:
        self.index = index
        self.slots = slots
        self.element = element
        self.pages: list[Page | None] = [None] * (slots * large_pages)  # made on first use
        self.with_free = Levels(slots)
        self.with_cached = Levels(slots)
        self.idle_free: dict[int, Slab] = {}
        self.lru = Page(index, -1, None, -1)  # list head: next is the oldest cached page
        self.owned = 0  # slabs
        self.live = 0  # pages with ref > 0
        self.cached = 0
        self.fenced = 0
        self.free_active = 0  # free slots in active slabs
        self.cached_active = 0  # cached pages in active slabs
        self.evicted = 0  # cached pages dropped for a page of this group
        self.evicted_by_steal = 0  # cached pages dropped with their slab
        self.moved = 0  # pages

    def file(self, slab: Slab) -> None:
        """Put an owned slab where its counts ask for; call after every change of live, free or cached."""
        live = -1 if slab.closed or not slab.live else slab.live
        want = live if slab.free else -1
        if want != slab.free_at:
            self.with_free.shift(slab, slab.free_at, want)
            slab.free_at = want
        want = live if slab.cached else -1
        if want != slab.cached_at:
            self.with_cached.shift(slab, slab.cached_at, want)
            slab.cached_at = want

    def opens(self, count: int) -> int:
        """Large pages, unowned or idle, that taking `count` pages uses up."""
        beyond = count - self.free_active - self.cached_active
        return -(-beyond // self.slots) if beyond > 0 else 0

    def page(self, slab: Slab, slot: int) -> Page:
        index = slab.index * self.slots + slot
        page = self.pages[index]
        if page is None:
            page = self.pages[index] = Page(self.index, index, slab, slot)
        return page

    def cached_pages(self, slab: Slab) -> list[Page]:
        return [page for page in self._made(slab) if page.where == Where.CACHED]

    def held_pages(self, slab: Slab) -> list[Page]:
        return [page for page in self._made(slab) if page.ref]

    def _made(self, slab: Slab) -> list[Page]:
        first = slab.index * self.slots
        return [page for page in self.pages[first : first + self.slots] if page is not None]
