"""One device step: its plan, its handle, its result.

Owns: StepPlan and what it carries, StepHandle, StepResult, Choices.
Does not know: who plans, who runs.
Invariants: columns of one plan or result have one entry per row; arrays are read-only by agreement of both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from aengine.types.arrays import Bools, Float32s, Int32s, Int64s
from aengine.types.requests import MediaInput
from aengine.types.sampling import SamplingParams, TokenRules


class SlotSetup(msgspec.Struct, frozen=True):
    """Given to the device with the first step of a request in a slot: everything sampling needs to know.

    `history_ids` int32 [known]: prompt and earlier output, only when `sampling.needs_history`; else empty.
    """

    slot: int
    handle: int
    prompt_tokens: int
    sampling: SamplingParams
    rules: TokenRules
    seed: int
    history_ids: Int32s


class TableDelta(msgspec.Struct, frozen=True):
    """Entries of the block tables of one group, of one slot or of many: table[slots[i], columns[i]] = pages[i].

    No entry is named twice in one delta; the deltas of a plan apply in order.
    """

    group: int
    slots: Int64s
    columns: Int64s
    pages: Int32s

    @classmethod
    def run(cls, slot: int, group: int, first: int, pages: Sequence[int]) -> TableDelta:
        """table[slot, first : first + len(pages)] = pages."""
        count = len(pages)
        columns = np.arange(first, first + count, dtype=np.int64)
        return cls(group, np.full(count, slot, np.int64), columns, np.array(pages, np.int32))


class PageMove(msgspec.Struct, frozen=True):
    """Copy page `source` of a group to page `target`; the source's bytes are not read again."""

    group: int
    source: int
    target: int


class MediaPlacement(msgspec.Struct, frozen=True):
    """From this step on the row in `slot` reads item `item` (its number in the prompt) of an item group. A later
    placement of the same item takes the place of an earlier one: its pages have moved.

    Entry i of the item is in page pages[i // tokens per page]; there are `tokens` of them. Positions `first` <= p <
    `until` see it. `input`: the step computes the pages first, before any row; None: they are computed, or an earlier
    placement of the same plan names them with an input.
    """

    slot: int
    group: int
    item: int
    pages: tuple[int, ...]
    tokens: int
    first: int
    until: int
    input: MediaInput | None = None


NO_ROWS: Int64s = np.zeros(0, np.int64)


class StepPlan(msgspec.Struct, frozen=True):
    """One device step, in columns; R rows, row i is slots[i]. Made by the scheduler, read by the runner.

    A row computes positions starts[i] .. starts[i] + counts[i] - 1 of its sequence, and samples after its last
    `samples[i]` positions: 0 = none (a prefill chunk that does not end the prompt), 1 = after the last position,
    counts[i] = after every position (draft verification: position j's sample must equal draft j + 1 to go on).

    Input ids: `relay[i]` rows (always counts[i] == 1) take the token their slot sampled last, on the device. All
    other rows take counts[i] ids from `ids`, rows in order, concatenated.

    `prompt_logprobs` maps row index -> int32 [m] target ids: row position j (from 0) predicts target j. How many
    best tokens to return is in the slot's SamplingParams.prompt_logprobs.

    `zero`: large pages of the arena to zero first, because they change element type (stale bits may be NaN). `moves`:
    pages to copy, one after the other, behind that and before anything else. A plan with moves may have no rows.

    `decodes`: at least that many rows, the first ones, compute one position and sample once.

    `deferred`: rows, rising, that sample once, but not before `StepHandle.choose` says which tokens they may get.
    """

    step: int
    slots: Int64s  # [R]
    handles: Int64s  # [R]
    starts: Int32s  # [R] first position
    counts: Int32s  # [R] positions computed, >= 1
    samples: Int32s  # [R] 0, 1 or counts
    relay: Bools  # [R]
    ids: Int32s  # [sum of counts over non-relay rows]
    tables: tuple[TableDelta, ...] = ()
    setups: tuple[SlotSetup, ...] = ()
    prompt_logprobs: Mapping[int, Int32s] = {}
    zero: tuple[int, ...] = ()
    media: tuple[MediaPlacement, ...] = ()
    moves: tuple[PageMove, ...] = ()
    decodes: int = 0
    deferred: Int64s = NO_ROWS

    @property
    def n_tokens(self) -> int:
        return int(self.counts.sum())


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of m positions: the chosen token first, then the k best in falling order.

    ids int32 [m, k + 1], values float32 [m, k + 1], ranks int32 [m] (1 = the chosen token was the most likely).
    """

    ids: Int32s
    values: Float32s
    ranks: Int32s


class StepResult(msgspec.Struct, frozen=True):
    """What a step sampled. Row i of the plan has counts[i] tokens in tokens[i, :counts[i]].

    For a draft row, counts[i] - 1 drafts were accepted and the last token is the model's own.
    `failed` maps row index -> message for rows that failed alone (for instance NaN logits).
    `device_s` is the time the device spent on the step, between `began_s` and `ended_s` on the host's clock
    (time.perf_counter).
    """

    step: int
    tokens: Int32s  # [R, K]
    counts: Int32s  # [R], 0 where the row did not sample
    logprobs: Mapping[int, Logprobs] = {}
    prompt_logprobs: Mapping[int, Logprobs] = {}
    failed: Mapping[int, str] = {}
    device_s: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0


class Choices(msgspec.Struct, frozen=True):
    """Which tokens deferred rows may get. `rows` int64 [n], rising, of the plan; `masks` int32 [n, ceil(V / 32)]:
    rows[i] may get token t if bit t % 32 of masks[i, t // 32] is set.

    Deferred rows that are not among them sample freely, and nobody hears of it.
    """

    rows: Int64s
    masks: Int32s


NO_CHOICES = Choices(NO_ROWS, np.zeros((0, 0), np.int32))


class StepHandle(Protocol):
    """A launched step. Awaited exactly once; raises StepFailed when the step raised.

    `launched` False: the device never heard of it, nor of the tables and set-ups it carried; no later step may be
    launched before it was awaited. `undecided`: it has deferred rows, and `choose` must be called, once, before any
    later step is launched and before it is awaited.

    `staged_s`: when the plan's values had been copied and only launching was left. `arrived_s`: when the host had the
    result; known once it was awaited. Both on the clock of time.perf_counter.
    """

    step: int
    launched: bool
    undecided: bool
    staged_s: float

    @property
    def arrived_s(self) -> float: ...

    def choose(self, choices: Choices) -> None:
        """Launch the sampling of the deferred rows; returns at once."""
        ...

    async def wait(self) -> StepResult: ...
