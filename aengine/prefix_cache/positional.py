"""Groups whose pages follow positions: full, sliding-window and chunked attention.

Owns: how such a group matches, adopts, extends, publishes, prunes and lets go.
Does not know: other groups.
Invariants: page i holds positions i * T ... and is held from `base` on; page i < `keyed` was published or lost the
race to a twin; a window page leaves when `computed`, never `scheduled`, has moved past it.
"""

from __future__ import annotations

from aengine.memory.groups import GroupSpec
from aengine.memory.lifetimes import Full
from aengine.memory.naming import publish_all
from aengine.memory.pool import Pool
from aengine.memory.slabs import Page, Where
from aengine.prefix_cache.journal import Journal
from aengine.prefix_cache.keys import HASH_AHEAD_PAGES, TokenChain
from aengine.prefix_cache.lease import Lease, TablePart
from aengine.prefix_cache.retention import UNBOUNDED


class PageRun:
    """What a lease holds of a positional group."""

    __slots__ = ("adopted", "base", "group", "keyed", "pages", "sent", "serial")

    def __init__(self, group: int, serial: int) -> None:
        self.group = group
        self.serial = serial  # of the lease
        self.pages: list[Page | None] = []
        self.adopted = 0  # indices below were found, not computed: somebody keeps them for a reason
        self.base = 0  # first index still held
        self.sent = 0  # entries the device has
        self.keyed = 0  # indices below were offered to the cache

    @property
    def table(self) -> list[int]:
        """Page ids, 0 where none is held."""
        return _ids(self.pages)

    def append(self, page: Page | None) -> None:
        if page is not None:
            page.holder, page.index = self.serial, len(self.pages)
        self.pages.append(page)

    def extend(self, pages: list[Page]) -> None:
        serial = self.serial
        for index, page in enumerate(pages, len(self.pages)):
            page.holder, page.index = serial, index
        self.pages += pages

    def unsent(self) -> bool:
        """Whether the device lacks table entries."""
        return self.sent < len(self.pages)

    def news(self) -> TablePart:
        """The entries it lacks; told once."""
        sent, self.sent = self.sent, len(self.pages)
        return TablePart(self.group, sent, tuple(_ids(self.pages[sent:])))

    def held(self, index: int) -> bool:
        return index < len(self.pages) and self.pages[index] is not None


def _ids(pages: list[Page | None]) -> list[int]:
    return [page.id if page is not None else 0 for page in pages]


class PositionalRules:
    """One group's rules. `unit`: tokens per hash of the chain, a divisor of the group's page."""

    def __init__(self, pool: Pool, index: int, spec: GroupSpec, unit: int, journal: Journal) -> None:
        self.pool = pool
        self.journal = journal
        self.index = index
        self.lifetime = spec.lifetime
        self.page = spec.tokens_per_page
        self.full = isinstance(spec.lifetime, Full)
        self._stride = spec.tokens_per_page // unit
        self._names = pool.names[index]

    def open(self, lease: Lease) -> PageRun:
        return PageRun(self.index, lease.serial)

    # -- matching --------------------------------------------------------------------------------------------------

    def longest(self, chain: TokenChain, bound: int, run: PageRun | None = None, floor: int = 0) -> int:
        """The longest hit <= bound, in tokens; one <= floor may be any such number. Pages of `run` count as present."""
        return self._leading(chain, bound, run) if self.full else self._trailing(chain, bound, run, floor)

    def _leading(self, chain: TokenChain, bound: int, run: PageRun | None) -> int:
        index, end = len(run.pages) if run else 0, bound // self.page
        names, stride = self._names, self._stride
        while index < end:
            block = min(end, index + HASH_AHEAD_PAGES)
            digests = chain.extend(block * stride)
            while index < block and digests[(index + 1) * stride - 1] in names:
                index += 1
            if index < block:
                break
        return min(index, end) * self.page

    def _trailing(self, chain: TokenChain, bound: int, run: PageRun | None, floor: int) -> int:
        """From the right: a missing page rules out every end whose live span has it, so each page is looked at once."""
        page, stride, names = self.page, self._stride, self._names
        end = bound // page
        digests = chain.extend(end * stride)
        while end * page > floor:
            index, first = end - 1, self.lifetime.first_live(end * page) // page
            while index >= first and (digests[(index + 1) * stride - 1] in names or (run and run.held(index))):
                index -= 1
            if index < first:
                break
            end = index
        return end * page

    def adopt(self, lease: Lease, run: PageRun, tokens: int, step: int) -> None:
        """Hold the published pages of a hit of `tokens` tokens that the lease has not got yet."""
        count, names, stride = tokens // self.page, self._names, self._stride
        first = self.lifetime.first_live(tokens) // self.page
        digests, pin = lease.chain.digests, self.pool.pin
        for index in range(len(run.pages), count):
            if index < first:
                run.pages.append(None)
                continue
            page = names[digests[(index + 1) * stride - 1]]
            pin(page)
            run.pages.append(page)
        run.keyed = max(run.keyed, count)
        run.adopted = max(run.adopted, count)

    def has_tail(self, chain: TokenChain, tokens: int, key: bytes) -> bool:
        """Whether all pages of a tail are there, and the last, unfinished one can be taken over: nobody holds it and no
        step in flight may still fail it."""
        count, stride = tokens // self.page, self._stride
        digests = chain.extend(count * stride)
        first = self.lifetime.first_live(tokens) // self.page
        if tokens % self.page:
            page = self._names.get(key)
            if page is None or page.where != Where.CACHED:
                return False
        return all(digests[(index + 1) * stride - 1] in self._names for index in range(first, count))

    def adopt_tail(self, lease: Lease, run: PageRun, tokens: int, key: bytes) -> None:
        """Hold a tail's pages; the unfinished one keeps its name until it is claimed, so that releasing the lease
        unused loses nothing."""
        self.adopt(lease, run, tokens, 0)
        if tokens % self.page:
            page = self._names[key]
            self.pool.pin(page)
            run.pages.append(page)

    def claim_tail(self, run: PageRun) -> None:
        """From now on the last page is the lease's own, to be written."""
        page = run.pages[-1] if run.pages else None
        if page is not None and len(run.pages) > run.keyed:
            assert page.ref == 1, page
            self.pool.unpublish(page)

    def name_tail(self, lease: Lease, run: PageRun, tokens: int, key: bytes, step: int) -> None:
        """At release: name the pages that hold the first `tokens` positions, the unfinished last one by `key`."""
        self.publish(lease, run, tokens, step)
        index = tokens // self.page
        page = run.pages[index] if index < len(run.pages) else None
        if tokens % self.page and page is not None and page.key is None and self.pool.publish(page, key):
            self.journal.record(page, lease.serial, step)

    def aligned(self, run: PageRun, tokens: int) -> bool:
        """Whether the lease's pages end exactly at `tokens`: only then can it go on with somebody else's."""
        return len(run.pages) * self.page == tokens

    # -- growing ---------------------------------------------------------------------------------------------------

    def prepare(self, lease: Lease, run: PageRun, start: int, upto: int, step: int, drafts: int) -> int:
        """Pages to take before positions up to `upto` can be written."""
        return max(0, -(-upto // self.page) - len(run.pages))

    def extend(
        self, lease: Lease, run: PageRun, pages: list[Page], start: int, upto: int, step: int, parts: list[TablePart]
    ) -> int:
        """Append the pages taken, tell the device (`parts`), return the capacity in tokens."""
        run.extend(pages)
        if run.unsent():
            parts.append(run.news())
        return len(run.pages) * self.page

    def capacity(self, lease: Lease, run: PageRun) -> int:
        return len(run.pages) * self.page

    def publish(self, lease: Lease, run: PageRun, tokens: int, step: int | None) -> None:
        """Name the full pages among the first `tokens` positions; `step` will compute them (None: they are there)."""
        count, first = tokens // self.page, run.keyed
        if count <= first:
            return
        stride = self._stride
        digests = lease.chain.extend(count * stride)
        keys = digests[(first + 1) * stride - 1 : count * stride : stride]
        named = publish_all(self.pool, self.index, run.pages[first:count], keys)
        if named:
            self.journal.record_all(named, lease.serial, step)
        run.keyed = count

    # -- moving ----------------------------------------------------------------------------------------------------

    def relocate(self, run: PageRun, page: Page, source: int) -> tuple[int, tuple[int, ...]]:
        """`page` has moved from `source`: how often the lease holds it, and the table entries that changed. All that
        hold it have it at the same index, because its name names all that stands before it."""
        index = page.index
        if index >= len(run.pages) or run.pages[index] is not page:
            return 0, ()
        return 1, (index,)

    # -- letting go ------------------------------------------------------------------------------------------------

    def prune(self, lease: Lease, run: PageRun, computed: int, step: int) -> None:
        """Let go of pages that no query from `computed` on reads."""
        if self.full:
            return
        first = min(self.lifetime.first_live(computed) // self.page, len(run.pages))
        for index in range(run.base, first):
            page = run.pages[index]
            if page is not None:
                if (
                    page.key is not None
                    and page.ref == 1
                    and index >= run.adopted
                    and not self._retained(lease, index, computed)
                ):
                    self.pool.unpublish(page)
                self.pool.drop(page, step)
                run.pages[index] = None
        run.base = max(run.base, first)

    def _retained(self, lease: Lease, index: int, computed: int) -> bool:
        """Whether a retention point reads this page."""
        start, end = index * self.page, (index + 1) * self.page
        point = lease.points.after(start, self.page)
        while point < UNBOUNDED:
            if self.lifetime.first_live(point) >= end:
                return False
            if point <= computed:
                return True
            point = lease.points.after(point, self.page)
        return False

    def cut(self, lease: Lease, run: PageRun, tokens: int, step: int) -> int:
        """Drop pages beyond `tokens`; returns where computing goes on."""
        while len(run.pages) * self.page >= tokens + self.page:
            page = run.pages.pop()
            if page is not None:
                assert page.key is None, f"rollback to {tokens} tokens would drop published {page}"
                self.pool.drop(page, step)
        run.sent = min(run.sent, len(run.pages))
        run.base = min(run.base, len(run.pages))
        return tokens

    def close(self, lease: Lease, run: PageRun) -> list[tuple[int, Page]]:
        """All pages held, each with the position after its end."""
        return [((i + 1) * self.page, page) for i, page in enumerate(run.pages) if page is not None]

    def pages(self, run: PageRun) -> list[Page]:
        return [page for page in run.pages if page is not None]
