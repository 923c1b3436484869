"""A step of a torch model: inputs, forward, sampling, result.

Owns: the device-side state by slot (block tables, the relay of last sampled tokens, sampling state) and the order in
which a step changes it.
Does not know: scheduling, text, what the ops are made of.
Invariants: all state changes on the stream, in step order. A slot's relay holds -1 from its setup until a step samples
for it, and after a failure; a row that reads -1 fails, as does one with an id outside the vocabulary, a row whose
logits hold NaN, and a row with all tokens masked: alone, with a message. At most `LOGIT_ROWS` x V logits exist at once.

    zeroing, moves -> setups, table deltas -> ids (host or relay) -> forward -> prompt logprobs
                                     -> logits of sampled positions -> sampling -> drafts accepted -> relay
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from aengine.kernels.ops import LayerKV, LayerState, MediaModel, Model, Ops, StepBatch
from aengine.runner.batch import SamplePoints, Staged, Staging, Tokens, lay_out, sample_points
from aengine.runner.logprobs import join_logprobs, make_logprobs
from aengine.runner.media import SlotMedia
from aengine.runner.sampler import Sampled, Sampler
from aengine.types import Int32s, Logprobs, PageMove, SlotSetup, StepPlan, StepResult, TableDelta

# 256 x 49,152 x 4 B = 48 MiB; a 256k vocabulary takes 256 MiB.
LOGIT_ROWS = 256
# Prompt logprobs sort and normalise beside their logits, so they get fewer rows: 64 x 49,152 x 4 B = 12 MiB.
PROMPT_LOGIT_ROWS = 64
# Steps in flight (depth + 1, depth at most 2) and one being planned.
STAGING_SETS = 4
POISON = -1


@dataclass(slots=True)
class _Outcome:
    """What the rows of the running step came to."""

    tokens: Int32s  # [R, K]
    counts: Int32s  # [R]
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class TorchExecutor:
    """`Executor` of a torch model.

    `kv[l]` are the pages of the model's attention layer l; `table_columns[g]` is how many pages a sequence of
    `max_model_len` tokens has in group g; `max_num_seqs` is the number of slots. `zero` zeroes large pages of the
    arena, `move` copies small ones. `states[l]` are the pages of recurrent layer l, whose groups have 2 table columns.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        kv: Sequence[LayerKV],
        table_columns: Sequence[int],
        max_num_seqs: int,
        max_model_len: int,
        *,
        device: torch.device | None = None,
        zero: Callable[[Sequence[int]], None] | None = None,
        move: Callable[[Sequence[PageMove]], None] | None = None,
        states: Sequence[LayerState] = (),
    ) -> None:
        self._model = model
        self._zero_pages = zero
        self._move_pages = move
        self._lost: str | None = None
        self._ops = ops
        self._kv = tuple(kv)
        self._states = tuple(states)
        self._device = device or torch.device("cpu")
        self._staging = Staging(STAGING_SETS)
        self._tables = tuple(self._zeros(max_num_seqs, columns) for columns in table_columns)
        self._relay = self._zeros(max_num_seqs).fill_(POISON)
        self._media: SlotMedia | None = None
        self._input_vocab = model.vocab_size
        if isinstance(model, MediaModel):
            self._media = SlotMedia(model, ops, self._kv, max_num_seqs, self._device)
            self._input_vocab = model.input_vocab
        self._sampler = Sampler(max_num_seqs, model.vocab_size, max_model_len, self._device)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    def stage(self, plan: StepPlan) -> Staged:
        return self._staging.stage(plan)

    @torch.inference_mode()
    def run(self, staged: Staged) -> StepResult:
        try:
            return self._run(staged)
        finally:
            self._staging.release(staged)

    def _run(self, staged: Staged) -> StepResult:
        self._apply(staged)
        tokens = lay_out(staged)
        width = max(1, int(staged.samples.max(initial=0)))
        rows = len(staged.slots)
        outcome = _Outcome(np.zeros((rows, width), dtype=np.int32), np.zeros(rows, dtype=np.int32))
        if staged.media:
            self._place_media(staged, outcome)
        if not rows:  # a step that only moves pages
            return StepResult(step=staged.step, tokens=outcome.tokens, counts=outcome.counts)
        batch = self._batch(staged, tokens, outcome)
        hidden = self._model.forward(self._ops, batch)
        for row, targets in staged.prompt_logprobs.items():
            if row not in outcome.failed:
                self._score_prompt(staged, tokens, hidden, row, targets, outcome)
        self._sample(staged, tokens, hidden, outcome)
        return StepResult(
            step=staged.step,
            tokens=outcome.tokens,
            counts=outcome.counts,
            logprobs=outcome.logprobs,
            prompt_logprobs=outcome.prompt_logprobs,
            failed=outcome.failed,
        )

    # ---- state by slot

    def _apply(self, staged: Staged) -> None:
        """Bring tables and slots up to date. If that fails, what is on the device is unknown: a later step could write
        through a stale table, so none may run any more (the engine dies of it)."""
        if self._lost is not None:
            raise RuntimeError(f"the block tables are lost since {self._lost}")
        try:
            if staged.zero and self._zero_pages is not None:
                self._zero_pages(staged.zero)
            if staged.moves:
                assert self._move_pages is not None, f"step {staged.step} moves pages of an executor that has none"
                self._move_pages(staged.moves)
            self._update_slots(staged.setups, staged.tables)
        except BaseException as error:
            self._lost = f"step {staged.step} failed with {error!r}"
            raise

    def _update_slots(self, setups: Sequence[SlotSetup], deltas: Sequence[TableDelta]) -> None:
        for setup in setups:
            self._relay[setup.slot] = POISON
            for table in self._tables:
                table[setup.slot] = 0
            self._sampler.setup(setup)
            if self._media is not None:
                self._media.vacate(setup.slot)
        for delta in deltas:
            at = self._to_device(delta.slots), self._to_device(delta.columns)
            self._tables[delta.group][at] = self._to_device(delta.pages)

    def _place_media(self, staged: Staged, outcome: _Outcome) -> None:
        assert self._media is not None, f"step {staged.step} brings images to a model that takes none"
        slots = staged.slots.tolist()
        for slot, message in self._media.place(staged.media).items():
            if slot in slots:
                outcome.failed[slots.index(slot)] = message

    # ---- inputs

    def _batch(self, staged: Staged, tokens: Tokens, outcome: _Outcome) -> StepBatch:
        slots = self._to_device(staged.slots)
        context = staged.starts + staged.counts
        counts, starts = tuple(staged.counts.tolist()), tuple(staged.starts.tolist())
        return StepBatch(
            ids=self._ids(staged, tokens, outcome),
            positions=self._to_device(tokens.positions.astype(np.int32)),
            row_offsets=self._to_device(tokens.offsets.astype(np.int32)),
            context=self._to_device(context),
            tables=tuple(table.index_select(0, slots) for table in self._tables),
            kv=self._kv,
            states=self._states,
            max_context=int(context.max(initial=0)),
            host_counts=counts,
            host_starts=starts,
            cross=None if self._media is None else self._media.batch(staged.slots.tolist(), starts, counts),
        )

    def _ids(self, staged: Staged, tokens: Tokens, outcome: _Outcome) -> Tensor:
        """Ids [T], relayed ones filled in. A row with an unusable id goes on with token 0 and is marked failed."""
        ids = self._to_device(tokens.ids)
        relayed = np.nonzero(staged.relay)[0]
        if relayed.size:
            slots = self._to_device(staged.slots[relayed].astype(np.int64))
            ids[self._to_device(tokens.offsets[relayed])] = self._relay[slots]
        unusable = (ids < 0) | (ids >= self._input_vocab)
        for token in unusable.nonzero().squeeze(1).tolist():
            row = int(tokens.rows[token])
            if staged.relay[row]:
                message = f"slot {staged.slots[row]} has no sampled token to go on from"
            else:
                message = f"token id {int(ids[token])} is outside the vocabulary of {self._input_vocab}"
            outcome.failed.setdefault(row, message)
        return ids.masked_fill_(unusable, 0)

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    # ---- outputs

    def _score_prompt(
        self, staged: Staged, tokens: Tokens, hidden: Tensor, row: int, targets: Int32s, outcome: _Outcome
    ) -> None:
        """Log-probabilities of the row's targets, a few positions at a time."""
        if targets.size and not 0 <= targets.min() <= targets.max() < self._model.vocab_size:
            outcome.failed[row] = f"a prompt token id is outside the vocabulary of {self._model.vocab_size}"
            return
        k = max(0, int(self._sampler.slots.prompt_logprobs[staged.slots[row]]))
        parts = []
        for first in range(0, len(targets), PROMPT_LOGIT_ROWS):
            wanted = self._to_device(targets[first : first + PROMPT_LOGIT_ROWS].astype(np.int64))
            start = int(tokens.offsets[row]) + first
            logits = self._model.logits(self._ops, hidden[start : start + len(wanted)])
            parts.append(make_logprobs(logits, wanted, k))
        if any(np.isnan(part.values).any() for part in parts):
            outcome.failed[row] = "the model's logits of the prompt hold NaN"
        elif parts:
            outcome.prompt_logprobs[row] = join_logprobs(parts)

    def _sample(self, staged: Staged, tokens: Tokens, hidden: Tensor, outcome: _Outcome) -> None:
        samples = staged.samples.copy()
        samples[list(outcome.failed)] = 0
        points = sample_points(samples, tokens)
        sampled = self._draw(staged, tokens, hidden, points)
        for point, message in sampled.failed.items():
            outcome.failed.setdefault(int(points.rows[point]), message)
        _settle_single_rows(points, samples, sampled, outcome)
        for row in np.nonzero(samples > 1)[0].tolist():
            if row not in outcome.failed:
                _settle_draft_row(row, tokens, points, sampled, outcome)
        self._update_relay(staged, outcome)

    def _draw(self, staged: Staged, tokens: Tokens, hidden: Tensor, points: SamplePoints) -> Sampled:
        """Sample all points, LOGIT_ROWS at a time."""
        drawn = Sampled(np.zeros(len(points.rows), dtype=np.int64), {}, {})
        for first in range(0, len(points.rows), LOGIT_ROWS):
            part = slice(first, min(first + LOGIT_ROWS, len(points.rows)))
            at = points.tokens[part]
            logits = self._model.logits(self._ops, hidden.index_select(0, self._to_device(at)))
            one = self._sampler.sample(logits, staged.slots[points.rows[part]], tokens.positions[at] + 1)
            drawn.tokens[part] = one.tokens
            drawn.logprobs.update({first + point: value for point, value in one.logprobs.items()})
            drawn.failed.update({first + point: message for point, message in one.failed.items()})
        return drawn

    def _update_relay(self, staged: Staged, outcome: _Outcome) -> None:
        """The last token of each row that sampled; poison where a row failed."""
        failed = list(outcome.failed)
        outcome.counts[failed] = 0
        outcome.tokens[failed] = 0
        rows = np.nonzero(outcome.counts)[0]
        last = outcome.tokens[rows, outcome.counts[rows] - 1]
        self._relay[self._to_device(staged.slots[rows].astype(np.int64))] = self._to_device(last)
        self._relay[self._to_device(staged.slots[failed].astype(np.int64))] = POISON


def _settle_single_rows(points: SamplePoints, samples: Int32s, sampled: Sampled, outcome: _Outcome) -> None:
    """Rows that sampled after one position: the common case, without a loop over rows."""
    rows = np.nonzero(samples == 1)[0]
    at = points.offsets[rows]
    outcome.tokens[rows, 0] = sampled.tokens[at]
    outcome.counts[rows] = 1
    for point, logprobs in sampled.logprobs.items():
        row = int(points.rows[point])
        if samples[row] == 1 and row not in outcome.failed:
            outcome.logprobs[row] = logprobs


def _settle_draft_row(row: int, tokens: Tokens, points: SamplePoints, sampled: Sampled, outcome: _Outcome) -> None:
    """Keep the samples up to the first that differs from the draft after it; that one is the model's own."""
    first, end = int(points.offsets[row]), int(points.offsets[row + 1])
    drafts = tokens.ids[tokens.offsets[row] + 1 : tokens.offsets[row + 1]]
    own = sampled.tokens[first:end]
    differs = np.nonzero(own[:-1] != drafts)[0]
    count = int(differs[0]) + 1 if differs.size else end - first
    outcome.tokens[row, :count] = own[:count]
    outcome.counts[row] = count
    if first in sampled.logprobs:
        outcome.logprobs[row] = join_logprobs([sampled.logprobs[point] for point in range(first, first + count)])
