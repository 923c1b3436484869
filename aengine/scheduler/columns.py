"""Row state in NumPy columns, indexed by slot.

Owns: the arrays, and the bookkeeping of launching and retiring rows on them.
Does not know: queues, leases, policies.
Invariants: for every running slot, computed <= scheduled <= expected, where `known` counts token ids on the host
(prompt and output), `expected` also sampled tokens still in flight, `scheduled` positions launched and `computed`
positions of retired steps. A free slot has handle -1 and nothing expected. While `even` is positive every running row
is ready to decode: nobody has come, gone or been paused since that was found out. `steady` is set only then.
"""

from __future__ import annotations

import numpy as np

from aengine.scheduler.steady import SteadyRows
from aengine.types import Int32s, Int64s, Request, StepPlan

STOP_COLUMNS = 4  # stop ids compared in NumPy; a request with more is checked in Python


class Columns:
    """One entry per slot; `tokens` int32 [slots, at least max_tokens] is lazily touched virtual memory.

    `stride`: see SteadyRows. `pages` int32 [pages, stride]: the same ids page by page; without a stride, slot by slot.
    """

    def __init__(self, slots: int, max_tokens: int, stride: int = 0) -> None:
        width = -(-max_tokens // stride) * stride if stride else max_tokens
        self.tokens = np.zeros((slots, width), np.int32)
        self.flat = self.tokens.reshape(-1)  # the same memory: one index is cheaper than two
        self.page = stride or width
        self.pages = self.tokens.reshape(-1, self.page)
        self.base = np.arange(slots, dtype=np.int64) * width
        self.first_page = self.base // self.page  # in `pages`
        self.handle = np.full(slots, -1, np.int64)
        self.ones = np.ones(slots, np.int32)  # counts and samples of decode rows
        self.all, self.none = np.ones(slots, np.bool_), np.zeros(slots, np.bool_)  # what they find in the relay
        for column in (self.ones, self.all, self.none):
            column.flags.writeable = False
        self.known = np.zeros(slots, np.int32)
        self.scheduled = np.zeros(slots, np.int32)
        self.computed = np.zeros(slots, np.int32)
        self.expected = np.zeros(slots, np.int32)
        self.limit = np.zeros(slots, np.int32)
        self.capacity = np.zeros(slots, np.int32)
        self.last_step = np.zeros(slots, np.int64)
        self._stop_ids = [np.full(slots, -1, np.int32) for _ in range(STOP_COLUMNS)]
        self._stops_used = 0  # the first so many of them
        self.check_at = np.zeros(slots, np.int32)  # ends are looked for in Python when so many ids are known
        self.paused = np.zeros(slots, np.bool_)  # not planned: aborting, void, or about to be preempted
        self.mute = np.zeros(slots, np.bool_)  # results in flight are discarded
        self.structured = np.zeros(slots, np.bool_)  # a grammar rules the output
        self.settled = np.zeros(slots, np.int64)  # the last step whose sample was known before it was made
        self.running = 0
        self.active = np.zeros(slots, np.int32)  # 1 where somebody runs
        self.even = 0  # in so many steps to come all running rows can decode; 0: it is not known
        self.stride = stride
        self.steady: SteadyRows | None = None
        self.drafting = np.zeros(slots, np.bool_)  # a draft row is in flight: its length is unknown until it retires

    def occupy(self, slot: int, request: Request, ids: Int32s, cached: int, *, structured: bool = False) -> None:
        """Give `slot` to a request whose first `cached` positions already have KV."""
        stops = request.rules.stop_ids
        self.running += 1
        self.active[slot] = 1
        self.disturb()
        self.handle[slot] = request.handle
        self.known[slot] = self.expected[slot] = len(ids)
        self.scheduled[slot] = self.computed[slot] = cached
        self.limit[slot] = request.max_total_tokens
        self.last_step[slot] = self.settled[slot] = 0
        self.structured[slot] = structured
        self.check_at[slot] = request.max_total_tokens if len(stops) <= STOP_COLUMNS else 0
        for number, column in enumerate(self._stop_ids):
            column[slot] = stops[number] if number < len(stops) else -1
        self._stops_used = max(self._stops_used, min(len(stops), STOP_COLUMNS))
        self.paused[slot] = self.mute[slot] = self.drafting[slot] = False

    def vacate(self, slot: int) -> None:
        self.running -= 1
        self.active[slot] = 0
        self.disturb()
        self.handle[slot] = -1
        self.structured[slot] = False
        self.known[slot] = self.expected[slot] = self.scheduled[slot] = 0  # nothing to do, so never planned

    def pause(self, slot: int, *, mute: bool = False) -> None:
        """No more steps for the row; `mute`: nor anything that is in flight for it."""
        self.disturb()
        self.paused[slot] = True
        if mute:
            self.mute[slot] = True

    def disturb(self) -> None:
        """It is no longer known that all running rows can decode."""
        self.even = 0
        self.steady = None

    def launched(self, plan: StepPlan) -> None:
        steady, slots = self.steady, plan.slots
        if steady is not None and steady.step == plan.step:
            self._launched_steady(steady)
            return
        self.last_step[slots] = plan.step
        if plan.decodes == len(slots):
            self.even = max(self.even - 1, 0) if len(slots) == self.running else 0
            scheduled = plan.starts + 1
            self.scheduled[slots] = scheduled
            self.expected[slots] = scheduled + 1
            self.steady = SteadyRows(self, plan, self.stride) if self.even else None
            return
        self.disturb()
        self.scheduled[slots] = plan.starts + plan.counts
        self.expected[slots] += plan.samples > 0
        self.drafting[slots] = plan.samples > 1

    def _launched_steady(self, steady: SteadyRows) -> None:
        steady.launched = steady.step
        steady.step += 1
        self.last_step.fill(steady.launched)
        np.add(self.scheduled, self.active, self.scheduled)
        np.add(self.expected, self.active, self.expected)
        self.even -= 1
        if not self.even:
            self.steady = None

    @property
    def stop_columns(self) -> list[Int32s]:
        return self._stop_ids[: self._stops_used]

    def append(self, slots: Int64s, at: Int32s, tokens: Int32s) -> Int64s:
        """One token more for each of `slots`, which know at[i]; returns indices of those that may end with it."""
        self.flat[self.base[slots] + at] = tokens
        known = at + 1
        self.known[slots] = known
        stopped = known >= self.check_at[slots]
        for column in self.stop_columns:
            stopped |= column[slots] == tokens
        ends: Int64s = stopped.nonzero()[0]
        return ends
