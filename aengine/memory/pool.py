"""Which page belongs to whom: small pages of several groups cut from equal large pages.

Owns: the state of every page and slab, the names (keys) of published pages, LRU order, the fence.
Does not know: tokens, lifetimes, sequences, tensors.
Invariants: every page is exactly one of free, live (ref > 0), fenced (ref 0, a step that names it has not retired) or
cached (ref 0, keyed, evictable); a live or fenced page is never handed out; a published page keeps its key until it
is evicted or unpublished; `take` succeeds exactly when `shortage` says nothing is missing; no decision depends on
time, hashing order or object identity.
"""

from __future__ import annotations

from collections.abc import Sequence

from aengine.memory.accounting import PoolStats, measure
from aengine.memory.fence import Fence
from aengine.memory.planner import PagePlan
from aengine.memory.slabs import GroupSlabs, Page, Slab, Where
from aengine.memory.spare import SpareSlabs
from aengine.memory.whole import claim_whole, evict_whole

_CACHED = int(Where.CACHED)
_FENCED = int(Where.FENCED)


class Pool:
    """Pages of the groups of `plan`. All calls are synchronous and O(1) amortised per page."""

    def __init__(self, plan: PagePlan) -> None:
        self.plan = plan
        self.fence: Fence[Page] = Fence()
        self.names: list[dict[bytes, Page]] = [{} for _ in plan.groups]
        self.groups = [
            GroupSlabs(i, group.slots, plan.large_pages, group.spec.elements) for i, group in enumerate(plan.groups)
        ]
        self.movable = tuple(group for group in self.groups if group.slots > 1)
        self.slabs = [Slab(i) for i in range(plan.large_pages)]
        self.spare = SpareSlabs(self.slabs)
        self._clock = 0
        self._retyped: list[int] = []
        self.retypes = 0

    # -- admission -------------------------------------------------------------------------------------------------

    @property
    def unowned_slabs(self) -> int:
        return len(self.spare.unowned)

    @property
    def idle_slabs(self) -> int:
        return self.spare.idle_slabs

    def shortage(self, need: Sequence[int]) -> tuple[int, ...] | None:
        """Pages of each group that cannot be had now if need[g] pages of each are wanted; None: all can be had.

        Exact and O(groups). Fenced pages do not count as available.
        """
        spare = len(self.spare.unowned) + self.spare.idle_slabs
        short: list[int] = []
        for group, count in zip(self.groups, need, strict=True):
            beyond = count and count - group.free_active - group.cached_active
            if beyond <= 0:
                short.append(0)
                continue
            slabs = min(-(-beyond // group.slots), spare)
            spare -= slabs
            short.append(max(0, beyond - slabs * group.slots))
        return tuple(short) if any(short) else None

    def large_needed(self, need: Sequence[int]) -> int:
        """Unowned or idle large pages that taking need[g] pages of each group opens."""
        return sum(group.opens(count) for group, count in zip(self.groups, need, strict=True))

    def packs(self, need: Sequence[int], less: Sequence[int] | None = None) -> bool:
        """Whether need[g] pages of each group can be had once what is fenced has come back and live pages have been
        moved together; `less`: pages of each group that are to be let go first. O(groups)."""
        slabs = 0
        for group, count in zip(self.groups, need, strict=True):
            held = group.live + count - (less[group.index] if less is not None else 0)
            slabs += -(-held // group.slots)
        return slabs <= self.plan.usable

    # -- taking ----------------------------------------------------------------------------------------------------

    def take(self, need: Sequence[int]) -> list[list[Page]]:
        """need[g] pages of each group, ref 1 and unkeyed, evicting cached pages as needed. `shortage(need)` is None.

        Order per page: the fullest active slab, a free slot of an own idle slab, an unowned slab, else whatever has
        been unused longest: an own cached page or another group's idle slab. Opening a slab beyond the group's quota
        is allowed only out of what no group of this call needs, so no choice can break the promise to a later group.
        """
        pages = self.try_take(need)
        assert pages is not None, f"short of {self.shortage(need)} pages for {list(need)}"
        return pages

    def try_take(self, need: Sequence[int]) -> list[list[Page]] | None:
        """As `take`, but None, and nothing changed, when `shortage` says that pages are missing."""
        quota = [group.opens(need[group.index]) for group in self.groups]
        surplus = len(self.spare.unowned) + self.spare.idle_slabs - sum(quota)
        if surplus < 0:
            return None
        out: list[list[Page]] = []
        for group in self.groups:
            pages: list[Page] = []
            count = need[group.index]
            if count:
                surplus = self._take_group(group, count, quota[group.index], surplus, pages)
            out.append(pages)
        return out

    def try_take_of(self, index: int, count: int) -> list[Page] | None:
        """As `try_take`, of one group."""
        group, pages = self.groups[index], list[Page]()
        quota = group.opens(count)
        surplus = len(self.spare.unowned) + self.spare.idle_slabs - quota
        if surplus < 0:
            return None
        self._take_group(group, count, quota, surplus, pages)
        return pages

    def take_one(self, index: int) -> Page | None:
        """One page of one group, as `take` would give it; None when there is none."""
        group = self.groups[index]
        if group.with_free.occupied:
            return self._take_slot(group, group.with_free.fullest())
        if self.spare.unowned or self.spare.idle_slabs or group.cached_active:
            return self._open_or_evict(group)[0]
        return None

    def _take_group(self, group: GroupSlabs, count: int, quota: int, surplus: int, pages: list[Page]) -> int:
        """Append `count` pages to `pages`; returns what is left of the surplus."""
        if group.slots == 1 and self.spare.unowned:
            claimed = claim_whole(self, group, min(count, quota + surplus), pages)
            count, quota, surplus = count - claimed, max(0, quota - claimed), surplus - max(0, claimed - quota)
        if count and group.slots == len(self.groups) == 1:
            evict_whole(self, group, count, pages)
            return surplus
        for _ in range(count):
            if group.with_free.occupied:
                page, opened = self._take_slot(group, group.with_free.fullest()), False
            elif quota + surplus > 0:
                page, opened = self._open_or_evict(group)
            else:
                page, opened = self._evict(group, self._oldest_in_active(group)), False
            if opened and quota > 0:
                quota -= 1
            elif opened:
                surplus -= 1
            pages.append(page)
        return surplus

    def retype(self, slab: Slab, element: tuple[str, ...]) -> None:
        """From now on the slab holds numbers of other types."""
        if slab.element is not None:
            self.retypes += 1
            self._retyped.append(slab.index)
        slab.element = element

    def _open_or_evict(self, group: GroupSlabs) -> tuple[Page, bool]:
        """(page, whether it cost an idle or unowned slab)."""
        if group.idle_free:
            return self._take_slot(group, next(reversed(group.idle_free.values()))), True
        if self.spare.unowned:
            return self._claim(group, self.spare.unowned.pop()), True
        idle, oldest = self.spare.idle.next, group.lru.next
        if oldest is group.lru or (idle is not self.spare.idle and idle.stamp < oldest.stamp):
            self._empty(idle)
            return self._claim(group, self.spare.unowned.pop()), True
        was_idle = oldest.slab.live == 0
        return self._evict(group, oldest), was_idle

    def _claim(self, group: GroupSlabs, slab: Slab) -> Page:
        """Give an unowned slab to the group and take its slot 0."""
        slots = group.slots
        slab.group = group.index
        slab.live = 1
        slab.free = (1 << slots) - 2
        slab.free_slots = slots - 1
        group.owned += 1
        group.free_active += slots - 1
        if slab.element != group.element:
            self.retype(slab, group.element)
        if slots > 1:
            group.file(slab)
        return self._lend(group, group.page(slab, 0))

    def _take_slot(self, group: GroupSlabs, slab: Slab) -> Page:
        """Take the lowest free slot of an owned slab."""
        if not slab.live:
            self.spare.activate(group, slab)
        bit = slab.free & -slab.free
        slab.free ^= bit
        slab.free_slots -= 1
        slab.live += 1
        group.free_active -= 1
        group.file(slab)
        return self._lend(group, group.page(slab, bit.bit_length() - 1))

    def _lend(self, group: GroupSlabs, page: Page) -> Page:
        assert page.ref == page.where == 0, page
        page.ref = 1
        group.live += 1
        return page

    # -- holding ---------------------------------------------------------------------------------------------------

    def pin(self, page: Page) -> None:
        """One more holder of a live, fenced or cached page."""
        page.ref += 1
        if page.ref > 1:
            return
        group, slab = self.groups[page.group], page.slab
        group.live += 1
        if page.where == _FENCED:
            group.fenced -= 1
            slab.fenced -= 1
            if slab.closed:
                self.spare.reopen(group, slab)
        else:
            assert page.where == _CACHED, page
            self._uncache(group, page)
            slab.live += 1
            if group.slots > 1:
                group.file(slab)
        page.where = 0

    def drop(self, page: Page, step: int) -> None:
        """One holder fewer; `step` is the last step that names the page for that holder. Without holders the page goes
        to the cache (keyed) or becomes free, at once or when all steps that name it have retired."""
        if step > page.last:
            page.last = step
        page.ref -= 1
        if page.ref:
            assert page.ref > 0, page
            return
        group = self.groups[page.group]
        group.live -= 1
        if page.last > self.fence.retired:
            group.fenced += 1
            page.slab.fenced += 1
            self.put_behind_fence(page, page.last)
        else:
            self._settle(group, page)

    def put_behind_fence(self, page: Page, step: int) -> None:
        """A page without holders, counted as fenced, stays so until `step` has retired."""
        page.where = _FENCED
        page.last = step
        self.fence.defer(step, page)

    def retire(self, step: int) -> None:
        """All steps up to `step` have retired. An entry is stale when the page was pinned again meanwhile."""
        for page in self.fence.retire(step):
            if page.where == _FENCED and page.last <= step:
                group = self.groups[page.group]
                group.fenced -= 1
                page.slab.fenced -= 1
                self._settle(group, page)

    def _settle(self, group: GroupSlabs, page: Page) -> None:
        """From live or fenced to cached or free."""
        slab = page.slab
        slab.live -= 1
        if page.key is None:
            page.where = 0
            slab.free |= 1 << page.slot
            slab.free_slots += 1
            group.free_active += not slab.closed
        else:
            page.where = _CACHED
            self._clock += 1
            page.stamp = self._clock
            last = group.lru.prev
            page.prev, page.next = last, group.lru
            last.next = group.lru.prev = page
            group.cached += 1
            group.cached_active += not slab.closed
            slab.cached += 1
        if not slab.live:
            self.spare.deactivate(group, slab, self._clock)
        elif group.slots > 1:
            group.file(slab)

    # -- names -----------------------------------------------------------------------------------------------------

    def publish(self, page: Page, key: bytes) -> bool:
        """Name a live page. False when another page has the name already: this one stays unkeyed."""
        names = self.names[page.group]
        if key in names:
            return False
        names[key] = page
        page.key = key
        return True

    def unpublish(self, page: Page) -> None:
        """Take the name away; a cached page becomes free."""
        assert page.key is not None
        del self.names[page.group][page.key]
        page.key = None
        if page.where == _CACHED:
            group, slab = self.groups[page.group], page.slab
            active = slab.live > 0
            self._unlink_cached(group, page)
            page.where = 0
            slab.free |= 1 << page.slot
            slab.free_slots += 1
            if active:
                group.free_active += not slab.closed
                group.file(slab)
            elif not slab.cached:
                self.spare.forget(group, slab)
            else:
                group.idle_free[slab.index] = slab

    def clear(self) -> None:
        """Forget every page without a holder; fenced ones become free when their step retires."""
        for names in self.names:
            for page in [page for page in names.values() if not page.ref]:
                self.unpublish(page)

    def _evict(self, group: GroupSlabs, page: Page) -> Page:
        """Take a cached page of the own group away from its key."""
        assert page.key is not None
        del self.names[page.group][page.key]
        page.key = None
        self._uncache(group, page)
        page.where = 0
        page.slab.live += 1
        group.evicted += 1
        if group.slots > 1:
            group.file(page.slab)
        return self._lend(group, page)

    def _oldest_in_active(self, group: GroupSlabs) -> Page:
        """The oldest cached page in an active slab. Only reached when every idle slab is promised to another group of
        the same call, so no more idle slabs are skipped than that call opens."""
        page = group.lru.next
        while not page.slab.live:
            page = page.next
        return page

    def _empty(self, slab: Slab) -> None:
        """Evict all pages of an idle slab for another group."""
        group = self.groups[slab.group]
        for page in group.cached_pages(slab):
            group.evicted_by_steal += 1
            self.unpublish(page)

    # -- slab states -----------------------------------------------------------------------------------------------

    def _uncache(self, group: GroupSlabs, page: Page) -> None:
        """Out of the LRU list, its slab made active; the caller counts the page as live."""
        if not page.slab.live:
            self.spare.activate(group, page.slab)
        elif page.slab.closed:
            self.spare.reopen(group, page.slab)
        self._unlink_cached(group, page)

    def _unlink_cached(self, group: GroupSlabs, page: Page) -> None:
        before, after = page.prev, page.next
        before.next, after.prev = after, before
        page.prev = page.next = page
        group.cached -= 1
        slab = page.slab
        slab.cached -= 1
        if slab.next is slab and not slab.closed:  # not in the idle list
            group.cached_active -= 1

    # -- accounting ------------------------------------------------------------------------------------------------

    def drain_retyped(self) -> tuple[int, ...]:
        """Large pages that changed element type since the last call: zero them before the next step writes."""
        retyped = tuple(self._retyped)
        self._retyped.clear()
        return retyped

    def stats(self) -> PoolStats:
        return measure(self)

    def stranded_bytes(self, group: int) -> int:
        """Free or evictable bytes that pages of `group` cannot use now: slots in active slabs of other groups."""
        return sum(
            (other.free_active + other.cached_active) * planned.pitch
            for other, planned in zip(self.groups, self.plan.groups, strict=True)
            if other.index != group
        )
