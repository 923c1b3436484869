"""Row state in NumPy columns, indexed by slot.

Owns: the arrays, and the bookkeeping of launching and retiring rows on them.
Does not know: queues, leases, policies.
Invariants: for every running slot, computed <= scheduled <= known + pending, where `known` counts token ids on the host
(prompt and output), `scheduled` positions launched, `computed` positions of retired steps and `pending` sampled tokens
still in flight. A free slot has handle -1.
"""

from __future__ import annotations

import numpy as np

from aengine.types import Int32s, Request, StepPlan

STOP_COLUMNS = 4  # stop ids compared in NumPy; a request with more is checked in Python


class Columns:
    """One entry per slot; `tokens` int32 [slots, max_tokens] is lazily touched virtual memory."""

    def __init__(self, slots: int, max_tokens: int) -> None:
        self.tokens = np.zeros((slots, max_tokens), np.int32)
        self.handle = np.full(slots, -1, np.int64)
        self.known = np.zeros(slots, np.int32)
        self.scheduled = np.zeros(slots, np.int32)
        self.computed = np.zeros(slots, np.int32)
        self.pending = np.zeros(slots, np.int32)
        self.limit = np.zeros(slots, np.int32)
        self.capacity = np.zeros(slots, np.int32)
        self.commit_at = np.zeros(slots, np.int32)
        self.last_step = np.zeros(slots, np.int64)
        self.stop_ids = np.full((slots, STOP_COLUMNS), -1, np.int32)
        self.many_stops = np.zeros(slots, np.bool_)
        self.paused = np.zeros(slots, np.bool_)  # not planned: aborting, void, or about to be preempted
        self.mute = np.zeros(slots, np.bool_)  # results in flight are discarded
        self.drafting = np.zeros(slots, np.bool_)  # a draft row is in flight: its length is unknown until it retires

    def occupy(self, slot: int, request: Request, ids: Int32s, cached: int) -> None:
        """Give `slot` to a request whose first `cached` positions already have KV."""
        stops = request.rules.stop_ids
        self.handle[slot] = request.handle
        self.known[slot] = len(ids)
        self.scheduled[slot] = self.computed[slot] = cached
        self.pending[slot] = 0
        self.limit[slot] = request.max_total_tokens
        self.last_step[slot] = 0
        self.stop_ids[slot] = -1
        self.many_stops[slot] = len(stops) > STOP_COLUMNS
        for column, stop in enumerate(stops[:STOP_COLUMNS]):
            self.stop_ids[slot, column] = stop
        self.paused[slot] = self.mute[slot] = self.drafting[slot] = False

    def vacate(self, slot: int) -> None:
        self.handle[slot] = -1

    def launched(self, plan: StepPlan) -> None:
        slots = plan.slots
        self.scheduled[slots] = plan.starts + plan.counts
        self.pending[slots] += plan.samples > 0
        self.last_step[slots] = plan.step
        self.drafting[slots] = plan.samples > 1
