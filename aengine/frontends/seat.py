"""One front-end as the engine process sees it.

Owns: its pipe, what it has counted, the images decoded for it and not yet used.
Does not know: steps, other front-ends.
Invariants: kept images are bounded by bytes, the oldest go first; a seat that is left is never taken again.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np

from aengine.errors import QueueFull
from aengine.frontends.wire import Count, Pipe
from aengine.metrics import Counts
from aengine.types import MediaInput

KEPT_IMAGE_BYTES = 2**29  # of one front-end: 35 images of four tiles of 560 pixels
KEPT = "kept"


class Seat:
    """`handles`: of its open sequences. `up`: it can serve. `left`: it is gone."""

    def __init__(self, index: int, pipe: Pipe) -> None:
        self.index = index
        self.pipe = pipe
        self.up = False
        self.left = False
        self.heard_s = time.monotonic()
        self.counts: Counts | None = None
        self.handles: set[int] = set()
        self._images: OrderedDict[int, MediaInput] = OrderedDict()
        self._image_bytes = 0
        self._next = 1
        self._counting: dict[int, asyncio.Future[None]] = {}

    # ---- counters

    def ask_counts(self) -> asyncio.Future[None]:
        """Done once `counts` holds all that was counted up to now."""
        self._next += 1
        future = self._counting[self._next] = asyncio.get_running_loop().create_future()
        self.pipe.send(Count(self._next))
        return future

    def counted(self, number: int, counts: Counts) -> None:
        self.counts = counts
        future = self._counting.pop(number, None)
        if future is not None and not future.done():
            future.set_result(None)

    def leave(self) -> None:
        self.left = True
        for future in self._counting.values():
            if not future.done():
                future.set_result(None)
        self._counting.clear()
        self._images.clear()

    # ---- images

    def keep(self, images: Sequence[MediaInput]) -> tuple[MediaInput, ...]:
        """What the front-end gets: the images without their pixels, which `take` finds again, once."""
        told = []
        for image in images:
            self._next += 1
            self._images[self._next] = image
            self._image_bytes += image.n_bytes
            told.append(msgspec.structs.replace(image, arrays={KEPT: np.array([self._next])}))
        while self._image_bytes > KEPT_IMAGE_BYTES and len(self._images) > len(images):
            self._image_bytes -= self._images.popitem(last=False)[1].n_bytes
        return tuple(told)

    def take(self, told: Sequence[MediaInput]) -> list[MediaInput]:
        """Raises QueueFull when one of them had to make room for others."""
        taken = [self._images.pop(int(image.arrays[KEPT][0]), None) for image in told]
        found = [image for image in taken if image is not None]
        self._image_bytes -= sum(image.n_bytes for image in found)
        if len(found) < len(told):
            raise QueueFull(
                f"{len(told) - len(found)} images were dropped: decoded images that wait for their requests may take "
                f"{KEPT_IMAGE_BYTES:,} bytes",
                retry_after_s=2,
            )
        return found
