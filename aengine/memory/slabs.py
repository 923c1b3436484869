"""Pages, the large pages (slabs) they are cut from, and the lists they stand in.

Owns: Page, Slab and GroupSlabs, plain records with intrusive list links, and the moves of slabs between lists.
Does not know: when pages are taken or evicted; the pool decides.
Invariants: a page or slab that stands in no list is linked to itself; a slab is in bucket `live` of its group exactly
when it is active (live > 0) and has a free slot; in the group's `idle_free` exactly when it is idle and has one.
"""

from __future__ import annotations

from enum import IntEnum


class Where(IntEnum):
    """What a page with ref 0 is. (With ref > 0 it is live, and this is PLAIN.)"""

    PLAIN = 0  # free, or never used
    CACHED = 1  # keyed, evictable, in its group's LRU list
    FENCED = 2  # named by a step that has not retired


class Page:
    """A small page. Identity is the object; (group, id) is its address.

    `ref`: leases that hold it. `key`: the name it is published under, or None. `last`: the last step that names it.
    `stamp`: logical time at which it was last let go.
    """

    __slots__ = ("group", "id", "key", "last", "next", "prev", "ref", "slab", "slot", "stamp", "where")

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
        self.prev: Page = self
        self.next: Page = self

    def __repr__(self) -> str:
        state = f"ref {self.ref}" if self.ref else Where(self.where).name.lower()
        return f"<page {self.group}:{self.id} {state}{' keyed' if self.key else ''}>"


class Slab:
    """A large page. `live` counts referenced and fenced pages; `free` is a bit mask of free slots.

    Unowned: group -1. Active: live > 0. Idle: live == 0 and cached > 0.
    """

    __slots__ = ("bucket", "cached", "element", "free", "free_slots", "group", "index", "live", "next", "prev", "stamp")

    def __init__(self, index: int) -> None:
        self.index = index
        self.group = -1
        self.live = 0
        self.cached = 0
        self.free = 0
        self.free_slots = 0
        self.bucket = -1
        self.element: tuple[str, ...] | None = None  # element types of the bytes in it; None: zeros
        self.stamp = 0
        self.prev: Slab = self
        self.next: Slab = self

    def __repr__(self) -> str:
        return f"<slab {self.index} of {self.group}: {self.live} live, {self.cached} cached, {self.free_slots} free>"


class GroupSlabs:
    """One group's slabs, pages and counters.

    `buckets[l]` holds the active slabs with l live pages and a free slot, `occupied` is the bit mask of non-empty
    buckets: the fullest slab is its highest bit. Buckets are insertion-ordered dicts used as stacks (popitem is
    O(1)).
    """

    __slots__ = (
        "buckets",
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
        "occupied",
        "owned",
        "pages",
        "slots",
    )

    def __init__(self, index: int, slots: int, large_pages: int, element: tuple[str, ...]) -> None:
        self.index = index
        self.slots = slots
        self.element = element
        self.pages: list[Page | None] = [None] * (slots * large_pages)  # made on first use
        self.buckets: list[dict[int, Slab]] = [{} for _ in range(slots)]
        self.occupied = 0
        self.idle_free: dict[int, Slab] = {}
        self.lru = Page(index, -1, None, -1)  # list head: next is the oldest cached page
        self.owned = 0  # slabs
        self.live = 0  # pages with ref > 0
        self.cached = 0
        self.fenced = 0
        self.free_active = 0  # free slots in active slabs
        self.cached_active = 0  # cached pages in active slabs
        self.evicted = 0  # cached pages dropped for a page of this group
        self.evicted_by_steal = 0  # cached pages dropped with their slab, for another group

    def file(self, slab: Slab) -> None:
        """Put an owned slab into the bucket its counts ask for; call after every change of live or free."""
        want = slab.live if slab.live and slab.free else -1
        have = slab.bucket
        if want == have:
            return
        if have >= 0:
            bucket = self.buckets[have]
            del bucket[slab.index]
            if not bucket:
                self.occupied &= ~(1 << have)
        if want >= 0:
            self.buckets[want][slab.index] = slab
            self.occupied |= 1 << want
        slab.bucket = want

    def fullest(self) -> Slab:
        """The active slab with most live pages among those with a free slot. Only if `occupied`."""
        return next(reversed(self.buckets[self.occupied.bit_length() - 1].values()))

    def page(self, slab: Slab, slot: int) -> Page:
        index = slab.index * self.slots + slot
        page = self.pages[index]
        if page is None:
            page = self.pages[index] = Page(self.index, index, slab, slot)
        return page

    def cached_pages(self, slab: Slab) -> list[Page]:
        pages = [self.pages[slab.index * self.slots + slot] for slot in range(self.slots)]
        return [page for page in pages if page is not None and page.where == Where.CACHED]
