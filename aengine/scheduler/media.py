"""The media items of running sequences.

Owns: what the device has been told of them, and which of them still need pages.
Does not know: how items are computed or preprocessed; when pages are granted.
Invariants: an item is told once for each stay in a slot, in a plan no later than the first that reads it, and again
when its pages move; the ones to be computed go out in the plan they were granted for. Sequences without items cost
nothing.
"""

from __future__ import annotations

import msgspec

from aengine.prefix_cache import Grown, Lease
from aengine.prefix_cache.keys import MediaItem
from aengine.types import MediaPlacement, Request

Lacking = dict[tuple[bytes, bytes], int]


def media_items(request: Request) -> tuple[MediaItem, ...]:
    """A request's items as the prefix cache knows them."""
    return tuple(MediaItem(one.input.digest, one.position, one.span, one.input.tokens) for one in request.media)


class _Stay:
    """One sequence's stay in a slot. `untold`: (group, item) pairs, in the order of items."""

    __slots__ = ("lease", "request", "untold")

    def __init__(self, request: Request, lease: Lease, groups: tuple[int, ...]) -> None:
        self.request = request
        self.lease = lease
        self.untold = [(group, item) for item in range(len(request.media)) for group in groups]


class MediaBook:
    """`groups`: the cache's item groups. `pending`: placements for the next plan that is launched. `items`,
    `computed`: placements so far, and those that had to be computed."""

    def __init__(self, groups: tuple[int, ...]) -> None:
        self.groups = groups
        self.pending: list[MediaPlacement] = []
        self.items = self.computed = 0
        self._stays: dict[int, _Stay] = {}  # by slot; only sequences with items the device does not know yet

    def start(self, slot: int, request: Request, lease: Lease) -> None:
        if request.media:
            self._stays[slot] = _Stay(request, lease, self.groups)

    def stop(self, slot: int) -> None:
        self._stays.pop(slot, None)
        if self.pending:
            self.pending = [placement for placement in self.pending if placement.slot != slot]

    def grown(self, slot: int, grown: Grown) -> None:
        """Pages were granted: place the items that got some. `grown.media` are those the step computes."""
        stay = self._stays.get(slot)
        if stay is None or grown.short:
            return
        untold = []
        for group, item in stay.untold:
            column = stay.lease.item_columns(group)[item]
            if column < 0:
                untold.append((group, item))
            else:
                fresh = (group, item) in grown.media
                self.items, self.computed = self.items + 1, self.computed + fresh
                self.pending.append(_placement(slot, stay.request, stay.lease, group, item, fresh=fresh))
        stay.untold = untold
        if not untold:
            del self._stays[slot]

    def moved(self, slot: int, request: Request, lease: Lease, group: int, item: int) -> None:
        """Pages of an item have moved: place it again if the device knows of it."""
        for index, placed in enumerate(self.pending):
            if (placed.slot, placed.group, placed.item) == (slot, group, item):
                pages = lease.item_pages(group, item)
                self.pending[index] = msgspec.structs.replace(placed, pages=pages)
                return
        stay = self._stays.get(slot)
        if stay is None or (group, item) not in stay.untold:
            self.pending.append(_placement(slot, request, lease, group, item, fresh=False))

    def lacking(self, lease: Lease, *, beside: Lacking) -> Lacking:
        """Entries of a lease's items that have no pages: tokens by (namespace, digest), so that twins count once. Those
        in `beside` are counted already."""
        out: Lacking = {}
        for group in self.groups:
            for item, column in zip(lease.media, lease.item_columns(group), strict=True):
                if column < 0 and (lease.chain.root, item.digest) not in beside:
                    out[lease.chain.root, item.digest] = item.tokens
        return out

    def owed(self) -> Lacking:
        """The same of all running sequences."""
        out: Lacking = {}
        for stay in self._stays.values():
            out |= self.lacking(stay.lease, beside=out)
        return out


def _placement(slot: int, request: Request, lease: Lease, group: int, item: int, *, fresh: bool) -> MediaPlacement:
    media = request.media[item]
    pages = lease.item_pages(group, item)
    return MediaPlacement(
        slot=slot,
        group=group,
        item=item,
        pages=pages,
        tokens=media.input.tokens,
        first=media.position,
        until=media.until,
        input=media.input if fresh else None,
    )
