"""Groups whose pages belong to media items: cross-attention KV and media embeddings.

Owns: how such a group finds, computes, publishes and lets go of the pages of each item.
Does not know: the text around the items: a page is named by the item alone, within its namespace.
Invariants: an item's pages are found whole or computed whole; each item begins on a page of its own; a missing item
never shortens the text hit, because its pages can be computed without the text.
"""

from __future__ import annotations

from aengine.memory.groups import GroupSpec
from aengine.memory.lifetimes import Media
from aengine.memory.pool import Pool
from aengine.memory.slabs import Page
from aengine.prefix_cache.journal import Journal
from aengine.prefix_cache.keys import MediaItem, TokenChain, media_keys
from aengine.prefix_cache.lease import Lease, TablePart
from aengine.prefix_cache.retention import UNBOUNDED


class ItemPages:
    """What a lease holds of an item group, by item.

    `columns[i]`: first table column of item i, -1 while it has none. `fresh`: items to compute in the coming step.
    """

    __slots__ = ("columns", "fresh", "group", "keys", "pages", "sent", "serial", "table")

    def __init__(self, group: int, serial: int, keys: list[list[bytes]]) -> None:
        self.group = group
        self.serial = serial  # of the lease
        self.keys = keys
        self.pages: list[list[Page]] = [[] for _ in keys]
        self.columns = [-1] * len(keys)
        self.table: list[int] = []
        self.sent = 0
        self.fresh: list[int] = []

    def unsent(self) -> bool:
        """Whether the device lacks table entries."""
        return self.sent < len(self.table)

    def news(self) -> TablePart:
        """The entries it lacks; told once."""
        sent, self.sent = self.sent, len(self.table)
        return TablePart(self.group, sent, tuple(self.table[sent:]))

    def place(self, item: int, pages: list[Page]) -> None:
        self.columns[item] = len(self.table)
        self.pages[item] = pages
        self.table += [page.id for page in pages]
        for page in pages:
            page.holder = self.serial


class ItemRules:
    """One item group's rules."""

    full = False

    def __init__(self, pool: Pool, index: int, spec: GroupSpec, unit: int, journal: Journal) -> None:
        self.pool = pool
        self.journal = journal
        self.index = index
        self.page = spec.tokens_per_page
        self._passing = isinstance(spec.lifetime, Media)  # read only while the item's placeholders are computed
        self._names = pool.names[index]

    def open(self, lease: Lease) -> ItemPages:
        root = lease.chain.root
        keys = [media_keys(root, item, -(-item.tokens // self.page)) for item in lease.media]
        return ItemPages(self.index, lease.serial, keys)

    # -- matching --------------------------------------------------------------------------------------------------

    def longest(self, chain: TokenChain, bound: int, hold: ItemPages | None = None, floor: int = 0) -> int:
        return bound

    def adopt(self, lease: Lease, hold: ItemPages, tokens: int, step: int) -> None:
        """Hold the published pages of every item that computing from `tokens` on will read."""
        self._adopt(lease, hold, tokens, lease.known)

    def _adopt(self, lease: Lease, hold: ItemPages, start: int, upto: int) -> None:
        names = self._names
        for index in self._wanted(lease, hold, start, upto):
            if all(key in names for key in hold.keys[index]):
                pages = [names[key] for key in hold.keys[index]]
                for page in pages:
                    self.pool.pin(page)
                hold.place(index, pages)

    def _wanted(self, lease: Lease, hold: ItemPages, start: int, upto: int) -> list[int]:
        """Items without pages that positions start .. upto read."""
        return [
            i
            for i, item in enumerate(lease.media)
            if hold.columns[i] < 0 and item.position < upto and not (self._passing and _end(item) <= start)
        ]

    def has_tail(self, chain: TokenChain, tokens: int, key: bytes) -> bool:
        return True

    def adopt_tail(self, lease: Lease, hold: ItemPages, tokens: int, key: bytes) -> None:
        self.adopt(lease, hold, tokens, 0)

    def claim_tail(self, hold: ItemPages) -> None:
        """Item pages are complete or not there."""

    def name_tail(self, lease: Lease, hold: ItemPages, tokens: int, key: bytes, step: int) -> None:
        """Item pages have their names already."""

    def aligned(self, hold: ItemPages, tokens: int) -> bool:
        return True

    # -- growing ---------------------------------------------------------------------------------------------------

    def prepare(self, lease: Lease, hold: ItemPages, start: int, upto: int, step: int, drafts: int) -> int:
        hold.fresh.clear()
        self._adopt(lease, hold, start, upto)
        return sum(len(hold.keys[i]) for i in self._wanted(lease, hold, start, upto))

    def extend(
        self, lease: Lease, hold: ItemPages, pages: list[Page], start: int, upto: int, step: int, parts: list[TablePart]
    ) -> int:
        at = 0
        for index in self._wanted(lease, hold, start, upto):
            count = len(hold.keys[index])
            hold.place(index, pages[at : at + count])
            hold.fresh.append(index)
            at += count
        if hold.unsent():
            parts.append(hold.news())
        return self.capacity(lease, hold)

    def capacity(self, lease: Lease, hold: ItemPages) -> int:
        """Up to the next item that has no pages yet."""
        ready = lease.tokens_ready
        ahead = [
            item.position
            for item, column in zip(lease.media, hold.columns, strict=True)
            if column < 0 and _end(item) > ready
        ]
        return min(ahead, default=UNBOUNDED)

    def publish(self, lease: Lease, hold: ItemPages, tokens: int, step: int | None) -> None:
        """Items computed by the coming step are there before any attention of that step reads them."""
        for index in hold.fresh:
            for page, key in zip(hold.pages[index], hold.keys[index], strict=True):
                if self.pool.publish(page, key):
                    self.journal.record(page, lease.serial, step)
        hold.fresh.clear()

    # -- moving ----------------------------------------------------------------------------------------------------

    def relocate(self, hold: ItemPages, page: Page, source: int) -> tuple[int, tuple[int, ...]]:
        """`page` has moved from `source`: how often the lease holds it (one image may stand twice in a prompt), and the
        table entries that changed."""
        indices = []
        for column, pages in zip(hold.columns, hold.pages, strict=True):
            if page in pages:
                indices.append(column + pages.index(page))
                hold.table[indices[-1]] = page.id
        return len(indices), tuple(indices)

    def item_at(self, hold: ItemPages, index: int) -> int:
        """The item that table entry `index` belongs to."""
        return max((column, item) for item, column in enumerate(hold.columns) if 0 <= column <= index)[1]

    # -- letting go ------------------------------------------------------------------------------------------------

    def prune(self, lease: Lease, hold: ItemPages, computed: int, step: int) -> None:
        if self._passing:
            for index, item in enumerate(lease.media):
                if hold.pages[index] and _end(item) <= computed:
                    self._drop_item(hold, index, step)

    def _drop_item(self, hold: ItemPages, index: int, step: int) -> None:
        column = hold.columns[index]
        for offset, page in enumerate(hold.pages[index]):
            hold.table[column + offset] = 0
            self.pool.drop(page, step)
        hold.pages[index] = []

    def cut(self, lease: Lease, hold: ItemPages, tokens: int, step: int) -> int:
        return tokens

    def close(self, lease: Lease, hold: ItemPages) -> list[tuple[int, Page]]:
        return [
            (item.position + 1, page) for item, pages in zip(lease.media, hold.pages, strict=True) for page in pages
        ]

    def pages(self, hold: ItemPages) -> list[Page]:
        return [page for pages in hold.pages for page in pages]


def _end(item: MediaItem) -> int:
    return item.position + item.span
