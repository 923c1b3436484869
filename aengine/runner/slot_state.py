"""The device-side state of all slots: block tables, the relay of last sampled tokens, sampling state, media.

Owns: that state, and how a step's set-ups and table deltas change it.
Does not know: models, what a step computes, scheduling.
Invariants: changes on the stream only, in step order, before the step computes. A slot's relay holds -1 from its setup
until a step samples for it, and after a failure. If a change fails, what is on the device is unknown and no later
step may run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from aengine.runner.media import SlotMedia
from aengine.runner.upload import Upload, plain_upload
from aengine.types import PageMove, SlotSetup, StepPlan, TableDelta

POISON = -1


class HasSetup(Protocol):
    """What sampling state must offer."""

    def setup(self, setup: SlotSetup) -> None: ...


class SlotState:
    """`table_columns[g]` is the width of a block table of group g; `zero` zeroes large pages of the arena, `move`
    copies small ones."""

    def __init__(
        self,
        slots: int,
        table_columns: Sequence[int],
        device: torch.device,
        sampler: HasSetup,
        media: SlotMedia | None,
        zero: Callable[[Sequence[int]], None] | None,
        move: Callable[[Sequence[PageMove]], None] | None,
        upload: Upload | None = None,
    ) -> None:
        self._upload = upload or plain_upload(device)
        self._device, self._sampler, self._zero_pages, self._move_pages = device, sampler, zero, move
        self.media = media
        self.tables = tuple(self._zeros(slots, columns) for columns in table_columns)
        self.relay = self._zeros(slots).fill_(POISON)
        # The same memory, where it is the host's: torch would let go of the interpreter, and get it back a turn later.
        host = upload is None and device.type == "cpu"
        self._arrays = [table.numpy() for table in (self.relay, *self.tables)] if host else None
        self._lost: str | None = None

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    def apply(self, plan: StepPlan) -> None:
        """Bring tables and slots up to date. If that fails, a later step could write through a stale table, so none may
        run any more (the engine dies of it)."""
        if self._lost is not None:
            raise RuntimeError(f"the block tables are lost since {self._lost}")
        try:
            if plan.zero and self._zero_pages is not None:
                self._zero_pages(plan.zero)
            if plan.moves:
                assert self._move_pages is not None, f"step {plan.step} moves pages of an executor that has none"
                self._move_pages(plan.moves)
            self._update_slots(plan.setups, plan.tables)
        except BaseException as error:
            self._lost = f"step {plan.step} failed with {error!r}"
            raise

    def _update_slots(self, setups: Sequence[SlotSetup], deltas: Sequence[TableDelta]) -> None:
        for setup in setups:
            self._clear(setup.slot)
            self._sampler.setup(setup)
            if self.media is not None:
                self.media.vacate(setup.slot)
        for delta in deltas:
            if self._arrays is not None:
                self._arrays[1 + delta.group][delta.slots, delta.columns] = delta.pages
                continue
            at = self._upload(delta.slots), self._upload(delta.columns)
            self.tables[delta.group].index_put_(at, self._upload(delta.pages))

    def _clear(self, slot: int) -> None:
        if self._arrays is not None:
            for array in self._arrays:
                array[slot] = 0
            self._arrays[0][slot] = POISON
            return
        self.relay[slot].fill_(POISON)
        for table in self.tables:
            table[slot].zero_()
