"""A step plan under construction.

Owns: collecting decode rows (as arrays) and other rows (one by one), and turning them into one frozen StepPlan.
Does not know: why a row was chosen.
Invariants: a held slot is in no built plan; rows keep the order decode first, then prefill.
"""

from __future__ import annotations

import numpy as np

from aengine.scheduler.columns import Columns
from aengine.types import NO_ROWS, Int32s, Int64s, MediaPlacement, PageMove, SlotSetup, StepPlan, TableDelta

_NO_IDS = np.zeros(0, np.int32)
_NO_SLOTS = np.zeros(0, np.int64)


class PlanBuilder:
    def __init__(self, step: int, budget_tokens: int, columns: Columns) -> None:
        self.step = step
        self.left = budget_tokens
        self._columns = columns
        self._decode: Int64s = _NO_SLOTS
        self._starts: Int32s = _NO_IDS
        self._slots: list[int] = []
        self._counts: list[int] = []
        self._samples: list[int] = []
        self._drafts: dict[int, Int32s] = {}
        self._targets: dict[int, Int32s] = {}  # by slot
        self._pinned: list[int] = []
        self.held: list[int] = []
        self.unfed = True  # whether there may be running prompts with more than one token to go

    def decode(self, slots: Int64s, starts: Int32s) -> None:
        """Rows of one token each, sampled, at positions `starts`."""
        self._decode, self._starts = slots, starts
        self.left -= len(slots)

    def row(self, slot: int, count: int, samples: int, drafts: Int32s | None = None) -> None:
        """A prefill chunk, or (with `drafts`) one known token followed by draft tokens."""
        self._slots.append(slot)
        self._counts.append(count)
        self._samples.append(samples)
        if drafts is not None:
            self._drafts[slot] = drafts
        self.left -= count

    @property
    def decodes(self) -> int:
        """Positions of decode rows so far, drafts included."""
        return len(self._decode) + sum(1 + len(drafts) for drafts in self._drafts.values())

    def prompt_targets(self, slot: int, targets: Int32s) -> None:
        self._targets[slot] = targets

    def has_row(self, slot: int) -> bool:
        """Whether the step has a row for `slot` that can no longer be left out (its pages may be published)."""
        return slot in self._slots or slot in self._pinned

    def pin(self, slot: int) -> None:
        """A decode row that can no longer be left out."""
        self._pinned.append(slot)

    def hold(self, slot: int) -> None:
        """Keep a slot out of this step, so that it can be preempted once it is not in flight."""
        self.held.append(slot)

    def build(
        self,
        tables: list[TableDelta],
        setups: list[SlotSetup],
        zero: list[int],
        media: list[MediaPlacement],
        moves: tuple[PageMove, ...] = (),
    ) -> StepPlan | None:
        """None when there is nothing to do: no row, and no pages to move."""
        c, slots, starts = self._columns, self._decode, self._starts
        if self.held:
            kept = ~np.isin(slots, self.held)
            slots, starts = slots[kept], starts[kept]
        decodes = len(slots)
        if not decodes and not self._slots and not moves:
            return None
        ones = c.ones[:decodes]
        relay = starts >= c.known[slots]
        relayed = np.count_nonzero(relay)
        ids = _NO_IDS if relayed == decodes else c.tokens[slots, starts][~relay]
        counts = samples = ones
        if self._slots:
            others = np.array(self._slots, np.int64)
            slots = np.concatenate([slots, others])
            starts = np.concatenate([starts, c.scheduled[others]])
            counts = np.concatenate([ones, np.array(self._counts, np.int32)])
            samples = np.concatenate([ones, np.array(self._samples, np.int32)])
            relay = np.concatenate([relay, np.zeros(len(others), np.bool_)])
            ids = np.concatenate([ids, *map(self._row_ids, self._slots, self._counts)])
        deferred = NO_ROWS
        if np.count_nonzero(c.structured):
            deferred = (c.structured[slots] & (samples == 1)).nonzero()[0]
        return StepPlan(
            step=self.step,
            slots=slots,
            handles=c.handle[slots],
            starts=starts,
            counts=counts,
            samples=samples,
            relay=relay,
            ids=ids,
            tables=tuple(tables),
            setups=tuple(setups),
            prompt_logprobs=self._targets_by_row(slots) if self._targets else {},
            zero=tuple(zero),
            media=tuple(media),
            moves=moves,
            decodes=decodes,
            deferred=deferred,
        )

    def _row_ids(self, slot: int, count: int) -> Int32s:
        start = int(self._columns.scheduled[slot])
        drafts = self._drafts.get(slot)
        if drafts is None:
            return self._columns.tokens[slot, start : start + count].copy()
        return np.concatenate([self._columns.tokens[slot, start : start + 1], drafts])

    def _targets_by_row(self, slots: Int64s) -> dict[int, Int32s]:
        return {row: self._targets[slot] for row, slot in enumerate(slots.tolist()) if slot in self._targets}
