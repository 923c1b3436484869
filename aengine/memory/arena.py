"""The bytes: one uint8 buffer, and strided views of it.

Owns: allocation of the buffer, views by group, layer and part, copying of pages, zeroing of large ones. The only file
here that touches torch.
Does not know: which pages are in use.
Invariants: every view aliases the buffer; page id p of a group begins at byte p * pitch; the buffer starts out zero,
and large page 0, the null pages, is never written by a sequence.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from aengine.kernels.ops import LayerKV, LayerState
from aengine.memory.planner import PagePlan
from aengine.types import PageMove

_HUGE = 2 * 2**20


class Arena:
    """The buffer of `plan` on `device`.

    On the CPU it is anonymous memory advised to use huge pages: scattered KV pages read 1.3-2 times faster so than from
    4 KiB pages, and untouched pages cost nothing.
    """

    def __init__(self, plan: PagePlan, device: torch.device | str = "cpu") -> None:
        self.plan = plan
        self.device = torch.device(device)
        if self.device.type == "cpu":
            self.buffer = _huge_buffer(plan.arena_bytes)
        else:
            self.buffer = torch.zeros(plan.arena_bytes, dtype=torch.uint8, device=self.device)

    def view(self, group: int, layer: int, part: int | str) -> Tensor:
        """One part of one layer: [pages, entries, *shape], or [pages, *shape] for recurrent state.

        `layer` counts within the group; `part` is an index or a name. stride(0) is the pitch, in elements.
        """
        planned = self.plan.groups[group]
        spec = planned.spec
        if isinstance(part, str):
            part = [p.name for p in spec.layers[layer].parts].index(part)
        place = planned.places[layer][part]
        dtype = getattr(torch, place.dtype)
        item = dtype.itemsize
        shape = (
            place.shape
            if not spec.lifetime.positional and not spec.lifetime.per_item
            else (place.entries, *place.shape)
        )
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        pages = planned.slots * self.plan.large_pages
        typed = self.buffer.view(dtype)
        offset = typed.storage_offset() + place.offset // item  # as_strided counts from the storage, not from the view
        return typed.as_strided((pages, *shape), (planned.pitch // item, *strides[: len(shape)]), offset)

    def layer_kv(self, layers: Sequence[tuple[int, int]]) -> tuple[LayerKV, ...]:
        """K and V views for layers given as (group, layer number), in order of layer number; of int8 pages also scales.

        The i-th pair of a group is the i-th layer of its pages.
        """
        seen = [0] * len(self.plan.groups)
        out = []
        for group, _ in layers:
            index = seen[group]
            seen[group] += 1
            parts = self.plan.groups[group].spec.layers[index].parts
            out.append(LayerKV(**{part.name: self.view(group, index, part.name) for part in parts}))
        return tuple(out)

    def layer_states(self, layers: Sequence[tuple[int, int]]) -> tuple[LayerState, ...]:
        """State views for layers given as (group, layer number), in order of layer number, as `layer_kv`."""
        seen = [0] * len(self.plan.groups)
        out = []
        for group, _ in layers:
            index = seen[group]
            seen[group] += 1
            parts = range(len(self.plan.groups[group].spec.layers[index].parts))
            out.append(LayerState(tuple(self.view(group, index, part) for part in parts)))
        return tuple(out)

    def page_bytes(self, group: int, page: int) -> Tensor:
        """The payload of one page: a contiguous uint8 slice."""
        planned = self.plan.groups[group]
        start = page * planned.pitch
        return self.buffer[start : start + planned.payload]

    def move(self, moves: Iterable[PageMove]) -> None:
        """Copy pages one after the other, on the current stream."""
        for move in moves:
            self.page_bytes(move.group, move.target).copy_(self.page_bytes(move.group, move.source))

    def zero(self, large_pages: Iterable[int]) -> None:
        """Zero whole large pages, on the current stream: needed when they change element type."""
        size = self.plan.large_bytes
        for index in large_pages:
            self.buffer[index * size : (index + 1) * size].zero_()


def _huge_buffer(size: int) -> Tensor:
    """Zeroed uint8 memory that begins at a huge-page border where the system has huge pages."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, size + _HUGE, **private)  # by default shared, which few systems give huge pages
    if hasattr(mmap, "MADV_DONTDUMP"):
        memory.madvise(mmap.MADV_DONTDUMP)  # gigabytes that a core dump can do without; also a mapping of its own
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without huge pages: the memory works all the same
            return torch.frombuffer(memory, dtype=torch.uint8)[:size]
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -whole.data_ptr() % _HUGE
    return whole[skip : skip + size]
