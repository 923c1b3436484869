"""A step of a torch model: inputs, forward, sampling, result.

Owns: what a step computes, one operation after another, and its order.
Does not know: scheduling, text, what the ops are made of.
Invariants: a row that reads -1 from the relay fails, as does one with an id outside the vocabulary, a row whose logits
hold NaN, and a row with all tokens masked: alone, with a message. At most `LOGIT_ROWS` x V logits exist at once.

    zeroing, moves -> setups, table deltas -> ids (host or relay) -> forward -> prompt logprobs
                                     -> logits of sampled positions -> sampling -> drafts accepted -> relay
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from aengine.kernels.ops import LayerKV, LayerState, MediaModel, Model, Ops, StepBatch
from aengine.runner.batch import SamplePoints, Tokens, lay_out, sample_points
from aengine.runner.logprobs import join_logprobs
from aengine.runner.masks import Masks, masks_of
from aengine.runner.media import SlotMedia
from aengine.runner.sampler import Sampled, Sampler
from aengine.runner.slot_state import POISON, SlotState
from aengine.runner.step import Undecided
from aengine.types import Bools, Choices, Int32s, Int64s, Logprobs, PageMove, SlotSetup, StepPlan, StepResult

# 256 x 49,152 x 4 B = 48 MiB; a 256k vocabulary takes 256 MiB.
LOGIT_ROWS = 256
# Prompt logprobs sort and normalise beside their logits, so they get fewer rows: 64 x 49,152 x 4 B = 12 MiB.
PROMPT_LOGIT_ROWS = 64


class AnySampler(Protocol):
    """What a step needs of a sampler; see `Sampler`."""

    def setup(self, setup: SlotSetup) -> None: ...

    def sample(self, logits: Tensor, slots: Int32s, positions: Int64s, masks: Masks | None = None) -> Sampled: ...

    def score(self, logits: Tensor, targets: Int32s, slot: int) -> Logprobs: ...


@dataclass(slots=True)
class _Outcome:
    """What the rows of the running step came to."""

    tokens: Int32s  # [R, K]
    counts: Int32s  # [R]
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Sampling:
    """A step whose forward is through: where it samples, and what came of it so far."""

    plan: StepPlan
    tokens: Tokens
    points: SamplePoints
    samples: Int32s
    sampled: Sampled
    outcome: _Outcome


class TorchExecutor:
    """`Executor` of a torch model.

    `kv[l]` are the pages of the model's attention layer l; `table_columns[g]` is how many pages a sequence of
    `max_model_len` tokens has in group g; `max_num_seqs` is the number of slots. `zero` zeroes large pages of the
    arena, `move` copies small ones. `states[l]` are the pages of recurrent layer l, whose groups have 2 table columns.
    `sampler` None: plain torch.
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
        sampler: AnySampler | None = None,
    ) -> None:
        self._model = model
        self._ops = ops
        self._kv = tuple(kv)
        self._states = tuple(states)
        self._device = device or torch.device("cpu")
        self._input_vocab = model.vocab_size
        media = None
        if isinstance(model, MediaModel):
            media = SlotMedia(model, ops, self._kv, max_num_seqs, self._device)
            self._input_vocab = model.input_vocab
        self._sampler: AnySampler = sampler or Sampler(max_num_seqs, model.vocab_size, max_model_len, self._device)
        self.state = SlotState(max_num_seqs, table_columns, self._device, self._sampler, media, zero, move)

    def stage(self, plan: StepPlan) -> StepPlan:
        return plan  # its arrays are written by nobody, and a thread reads them where they are

    def run(self, plan: StepPlan) -> StepResult | Undecided:
        self.state.apply(plan)
        return self.compute(plan)

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> StepResult | Undecided:
        """The step, once the slots' state is up to date."""
        tokens = lay_out(plan)
        width = max(1, int(plan.samples.max(initial=0)))
        rows = len(plan.slots)
        outcome = _Outcome(np.zeros((rows, width), dtype=np.int32), np.zeros(rows, dtype=np.int32))
        if plan.media:
            self._place_media(plan, outcome)
        if not rows:  # a step that only moves pages
            return StepResult(step=plan.step, tokens=outcome.tokens, counts=outcome.counts)
        batch = self._batch(plan, tokens, outcome)
        hidden = self._model.forward(self._ops, batch)
        for row, targets in plan.prompt_logprobs.items():
            if row not in outcome.failed:
                self._score_prompt(plan, tokens, hidden, row, targets, outcome)
        return self._sample(plan, tokens, hidden, outcome)

    def _result(self, plan: StepPlan, outcome: _Outcome) -> StepResult:
        return StepResult(
            step=plan.step,
            tokens=outcome.tokens,
            counts=outcome.counts,
            logprobs=outcome.logprobs,
            prompt_logprobs=outcome.prompt_logprobs,
            failed=outcome.failed,
        )

    def _place_media(self, plan: StepPlan, outcome: _Outcome) -> None:
        media = self.state.media
        assert media is not None, f"step {plan.step} brings images to a model that takes none"
        slots = plan.slots.tolist()
        for slot, message in media.place(plan.media).items():
            if slot not in slots:  # nobody would hear of it, and the item's pages have a name
                raise RuntimeError(f"slot {slot} has no row in step {plan.step}, and {message}")
            outcome.failed[slots.index(slot)] = message

    # ---- inputs

    def _batch(self, plan: StepPlan, tokens: Tokens, outcome: _Outcome) -> StepBatch:
        slots = self._to_device(plan.slots)
        context = plan.starts + plan.counts
        media = self.state.media
        counts, starts = tuple(plan.counts.tolist()), tuple(plan.starts.tolist())
        return StepBatch(
            ids=self._ids(plan, tokens, outcome),
            positions=self._to_device(tokens.positions.astype(np.int32)),
            row_offsets=self._to_device(tokens.offsets.astype(np.int32)),
            context=self._to_device(context),
            tables=tuple(table.index_select(0, slots) for table in self.state.tables),
            kv=self._kv,
            states=self._states,
            max_context=int(context.max(initial=0)),
            host_counts=counts,
            host_starts=starts,
            cross=None if media is None else media.batch(plan.slots.tolist(), starts, counts),
        )

    def _ids(self, plan: StepPlan, tokens: Tokens, outcome: _Outcome) -> Tensor:
        """Ids [T], relayed ones filled in. A row with an unusable id goes on with token 0 and is marked failed."""
        ids = self._to_device(tokens.ids)
        relayed = np.nonzero(plan.relay)[0]
        if relayed.size:
            slots = self._to_device(plan.slots[relayed].astype(np.int64))
            ids[self._to_device(tokens.offsets[relayed])] = self.state.relay[slots]
        unusable = (ids < 0) | (ids >= self._input_vocab)
        for token in unusable.nonzero().squeeze(1).tolist():
            row = int(tokens.rows[token])
            if plan.relay[row]:
                message = f"slot {plan.slots[row]} has no sampled token to go on from"
            else:
                message = f"token id {int(ids[token])} is outside the vocabulary of {self._input_vocab}"
            outcome.failed.setdefault(row, message)
        return ids.masked_fill_(unusable, 0)

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    # ---- outputs

    def _score_prompt(
        self, plan: StepPlan, tokens: Tokens, hidden: Tensor, row: int, targets: Int32s, outcome: _Outcome
    ) -> None:
        first = int(tokens.offsets[row])
        scores = score_prompt(
            self._model, self._ops, self._sampler, hidden[first : first + len(targets)], targets, int(plan.slots[row])
        )
        if isinstance(scores, str):
            outcome.failed[row] = scores
        elif scores is not None:
            outcome.prompt_logprobs[row] = scores

    def _sample(self, plan: StepPlan, tokens: Tokens, hidden: Tensor, outcome: _Outcome) -> StepResult | Undecided:
        samples = plan.samples.copy()
        samples[list(outcome.failed)] = 0
        points = sample_points(samples, tokens)
        waiting = np.isin(points.rows, plan.deferred)
        sampled, kept = self._draw(plan, tokens, hidden, points, waiting)
        step = _Sampling(plan, tokens, points, samples, sampled, outcome)
        return self._settle(step) if not len(plan.deferred) else Undecided(partial(self._decide, step, waiting, kept))

    @torch.inference_mode()
    def _decide(self, step: _Sampling, waiting: Bools, kept: list[Tensor], choices: Choices) -> StepResult:
        at = waiting.nonzero()[0]
        if at.size:
            rows = step.points.rows[at]
            known = np.isin(choices.rows, rows)  # a row may have failed before it could be sampled
            masks = masks_of(Choices(choices.rows[known], choices.masks[known]), rows)
            positions = step.tokens.positions[step.points.tokens[at]] + 1
            one = self._sampler.sample(torch.cat(kept), step.plan.slots[rows].astype(np.int32), positions, masks)
            step.sampled.merge(at, one)
        return self._settle(step)

    def _settle(self, step: _Sampling) -> StepResult:
        plan, points, samples, sampled, outcome = step.plan, step.points, step.samples, step.sampled, step.outcome
        for point, message in sampled.failed.items():
            outcome.failed.setdefault(int(points.rows[point]), message)
        _settle_single_rows(points, samples, sampled, outcome)
        for row in np.nonzero(samples > 1)[0].tolist():
            if row not in outcome.failed:
                _settle_draft_row(row, step.tokens, points, sampled, outcome)
        self._update_relay(plan, outcome)
        return self._result(plan, outcome)

    def _draw(
        self, plan: StepPlan, tokens: Tokens, hidden: Tensor, points: SamplePoints, waiting: Bools
    ) -> tuple[Sampled, list[Tensor]]:
        """Sample the points that do not wait, LOGIT_ROWS at a time -> (them, logits of those that do)."""
        kept: list[Tensor] = []
        drawn = Sampled(np.zeros(len(points.rows), dtype=np.int64), {}, {})
        for first in range(0, len(points.rows), LOGIT_ROWS):
            part = slice(first, min(first + LOGIT_ROWS, len(points.rows)))
            at = points.tokens[part]
            logits = self._model.logits(self._ops, hidden.index_select(0, self._to_device(at)))
            free = np.flatnonzero(~waiting[part])
            if len(free) < len(at):
                kept.append(logits[self._to_device(np.flatnonzero(waiting[part]))])
                logits = logits[self._to_device(free)]
            if len(free):
                slots = plan.slots[points.rows[part][free]].astype(np.int32)
                drawn.merge(first + free, self._sampler.sample(logits, slots, tokens.positions[at[free]] + 1))
        return drawn, kept

    def _update_relay(self, plan: StepPlan, outcome: _Outcome) -> None:
        """The last token of each row that sampled; poison where a row failed."""
        failed = list(outcome.failed)
        outcome.counts[failed] = 0
        outcome.tokens[failed] = 0
        rows = np.nonzero(outcome.counts)[0]
        last = outcome.tokens[rows, outcome.counts[rows] - 1]
        self.state.relay[self._to_device(plan.slots[rows].astype(np.int64))] = self._to_device(last)
        self.state.relay[self._to_device(plan.slots[failed].astype(np.int64))] = POISON


def score_prompt(
    model: Model, ops: Ops, sampler: AnySampler, hidden: Tensor, targets: Int32s, slot: int
) -> Logprobs | str | None:
    """Log-probabilities of targets [n] after hidden states [n, D], a few positions at a time; a message where they
    cannot be told; None for no targets."""
    if targets.size and not 0 <= targets.min() <= targets.max() < model.vocab_size:
        return f"a prompt token id is outside the vocabulary of {model.vocab_size}"
    parts = []
    for first in range(0, len(targets), PROMPT_LOGIT_ROWS):
        part = slice(first, first + PROMPT_LOGIT_ROWS)
        parts.append(sampler.score(model.logits(ops, hidden[part]), targets[part], slot))
    if any(np.isnan(part.values).any() for part in parts):
        return "the model's logits of the prompt hold NaN"
    return join_logprobs(parts) if parts else None


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
