"""Media items on the device: computed once, seen by rows.

Owns: which items the row in each slot sees, the computing of items a step brings, the spans of a step's tokens that see
the same items.
Does not know: prompts, caches, how an item is computed.
Invariants: changes on the stream only, in step order; an item's pages are written before any row of its step reads
them. A fault of one item is told for its slot alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from aengine.kernels.ops import CrossBatch, CrossItem, CrossSpan, LayerKV, MediaModel, Ops
from aengine.runner.upload import Upload, plain_upload
from aengine.types import MediaInput, MediaPlacement


@dataclass(frozen=True, slots=True)
class _Seen:
    """Item number `item` of a row's prompt, seen by positions first <= p < until."""

    group: int
    item: int
    first: int
    until: int
    entries: CrossItem


class SlotMedia:
    """The media side of a step of `model`; `kv` by layer."""

    def __init__(
        self,
        model: MediaModel,
        ops: Ops,
        kv: Sequence[LayerKV],
        slots: int,
        device: torch.device,
        upload: Upload | None = None,
    ) -> None:
        self._model, self._ops, self._kv, self._upload = model, ops, kv, upload or plain_upload(device)
        self._slots: list[list[_Seen]] = [[] for _ in range(slots)]

    def vacate(self, slot: int) -> None:
        self._slots[slot] = []

    def seen_by(self, slots: Sequence[int]) -> bool:
        """Whether a row in one of the slots sees an item."""
        return any(self._slots[slot] for slot in slots)

    def place(self, placements: Sequence[MediaPlacement]) -> dict[int, str]:
        """Compute the items that come with an input, note what rows see. -> message by slot whose item failed.

        Twins of one image within the step are computed once and written to the pages of each.
        """
        failed: dict[int, str] = {}
        computed: dict[bytes, Tensor] = {}
        for one in placements:
            pages = self._upload(np.array(one.pages, dtype=np.int64))
            if one.input is not None:
                try:
                    self._write(one.input, pages, computed)
                except Exception as error:  # a bad image must not fail the other rows of the step
                    failed[one.slot] = f"image {one.item} cannot be computed: {type(error).__name__}: {error}"
            row = self._slots[one.slot]
            row[:] = [seen for seen in row if (seen.group, seen.item) != (one.group, one.item)]  # its pages have moved
            row.append(_Seen(one.group, one.item, one.first, one.until, CrossItem(pages, one.tokens)))
            row.sort(key=lambda seen: seen.item)  # their order is the order of sums: not that of arrival
        return failed

    def _write(self, source: MediaInput, pages: Tensor, computed: dict[bytes, Tensor]) -> None:
        entries = computed.get(source.digest)
        if entries is None:
            entries = computed[source.digest] = self._model.encode_media(self._arrays(source))
            if len(entries) != source.tokens:
                raise ValueError(f"the model made {len(entries)} entries of it, not {source.tokens}")
        self._model.write_media(self._ops, entries, self._kv, pages)

    def _arrays(self, source: MediaInput) -> Mapping[str, Tensor]:
        return {name: self._upload(array.copy()) for name, array in source.arrays.items()}

    def batch(self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> CrossBatch | None:
        """What the tokens of a step's rows see; None: nothing."""
        tokens: list[int] = []
        spans: list[CrossSpan] = []
        offset = 0
        for slot, start, count in zip(slots, starts, counts, strict=True):
            seen = self._slots[slot]
            if seen:
                for low, high in pairwise(_edges(seen, start, start + count)):
                    items = tuple(one.entries for one in seen if one.first <= low < one.until)
                    if items:
                        spans.append(CrossSpan(len(tokens), high - low, items))
                        tokens.extend(range(offset + low - start, offset + high - start))
            offset += count
        if not spans:
            return None
        return CrossBatch(self._upload(np.array(tokens, dtype=np.int64)), tuple(spans))


def _edges(seen: Sequence[_Seen], start: int, end: int) -> list[int]:
    """Positions between which the same items are seen, `start` and `end` included."""
    inner = {edge for one in seen for edge in (one.first, one.until) if start < edge < end}
    return [start, *sorted(inner), end]
