"""A step of a torch model on a CUDA device: all of it enqueued, none of it waited for.

Owns: what a step enqueues and in which order, and what is made of it once it has run.
Does not know: scheduling, text, how ops are computed, who waits.
Invariants: a steady decode step makes no call that waits for the device. Ids the host does not know are gathered from
the relay on the device, behind the step that wrote them. Tables, page moves and zeroing change on the compute stream.
A faulty row fails alone, by a code that comes back with the tokens.

    compute  H2D | zero, moves, setups, tables | ids | forward | sampling | relay |
    copy                                                                  | D2H tokens, faults, logprobs | event
    host     enqueue all of it ...                          (other work)             waiter wakes -> collect
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from aengine.kernels.ops import LayerKV, LayerState, MediaModel, Model, Ops, StepBatch
from aengine.runner.batch import SamplePoints, Tokens, lay_out, sample_points
from aengine.runner.cuda.api import Event
from aengine.runner.cuda.graphs import PHASE, DecodeGraphs, Progress, capturable
from aengine.runner.cuda.outcome import Collected, Outputs, PlanFacts, ScoredPrompt
from aengine.runner.cuda.pieces import Pieces
from aengine.runner.cuda.sampler import NO_TOKEN, SOUND, DeviceSampler, Drawn, MakeChooser, take_rows
from aengine.runner.cuda.staging import CudaStaging, StagingSet
from aengine.runner.cuda.stream import CudaStream
from aengine.runner.masks import Masks, masks_of
from aengine.runner.media import SlotMedia
from aengine.runner.slot_state import POISON, SlotState
from aengine.runner.step import Undecided
from aengine.types import Choices, Int32s, Int64s, PageMove, StepPlan

# 256 x 128,256 x 4 B = 131 MB of logits, and about four times that while random rows are drawn.
LOGIT_ROWS = 256
PROMPT_LOGIT_ROWS = 64
# Steps in flight (depth + 1, depth at most 2) and one being launched.
STAGING_SETS = 4


@dataclass(slots=True)
class Staged:
    """A plan, laid out on the host, and the set that carries it. `failed`: rows known to be faulty before they run."""

    plan: StepPlan
    set: StagingSet
    tokens: Tokens
    points: SamplePoints
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Sampling:
    """What of a step was sampled so far, and logits that wait: by points. `missing`: see `_forward`."""

    drawn: list[tuple[Int64s, Drawn]] = field(default_factory=list)
    kept: list[tuple[Int64s, Tensor]] = field(default_factory=list)
    missing: Tensor | None = None
    prompts: tuple[ScoredPrompt, ...] = ()


class CudaExecutor:
    """`Executor` of a torch model on the device of `stream`; arguments as `TorchExecutor`'s."""

    def __init__(
        self,
        stream: CudaStream,
        model: Model,
        ops: Ops,
        kv: Sequence[LayerKV],
        table_columns: Sequence[int],
        max_num_seqs: int,
        max_model_len: int,
        *,
        zero: Callable[[Sequence[int]], None] | None = None,
        move: Callable[[Sequence[PageMove]], None] | None = None,
        states: Sequence[LayerState] = (),
        staging: CudaStaging | None = None,
        chooser: MakeChooser | None = None,
    ) -> None:
        self._stream, self._model, self._ops = stream, model, ops
        self._kv, self._states, self._context = tuple(kv), tuple(states), max_model_len
        device = stream.api.device
        self._upload = staging or CudaStaging(stream.api, STAGING_SETS)
        self._input_vocab = model.vocab_size
        media = None
        if isinstance(model, MediaModel):
            media = SlotMedia(model, ops, self._kv, max_num_seqs, device, self._upload)
            self._input_vocab = model.input_vocab
        self.sampler = DeviceSampler(max_num_seqs, model.vocab_size, max_model_len, device, self._upload, chooser)
        # One slot more than sequences: the null slot, which rows that fill a graph up stand in.
        self.state = SlotState(max_num_seqs + 1, table_columns, device, self.sampler, media, zero, move, self._upload)
        self._most = max_num_seqs
        self._graphs: DecodeGraphs | None = None
        self._pieces: Pieces | None = None
        stream.api.settle()

    def capture(self, progress: Progress | None = None, *, tokens: int = 0, room_bytes: int = 2**40) -> str:
        """Record steps as graphs where the model and its ops allow it -> a line for the report. Decode steps whole;
        others of up to `tokens` tokens in pieces, which may take `room_bytes` of the device."""
        if not capturable(self._ops):
            return f"steps are launched one operation at a time: {self._ops.name} kernels cannot be captured"
        api, compute = self._stream.api, self._stream.compute
        with api.on(compute):
            graphs = DecodeGraphs(
                api, self._model, self._ops, self.state, self._kv,
                most=self._most, context=self._context, input_vocab=self._input_vocab, states=self._states,
            )  # fmt: skip
            pieces = Pieces(api, self._model, self._ops, tokens=tokens) if tokens else None
        of = len(graphs.sizes) + (pieces.wanted if pieces else 0)
        tell = progress or (lambda phase, done, total: None)
        first = 0
        if pieces is not None:  # before the others, which then find room in what the largest pieces needed
            for first in pieces.capture(compute, room_bytes):
                tell(PHASE, first, of)
        for done in graphs.capture(compute):
            tell(PHASE, first + done, first + len(graphs.sizes))
        self._graphs, self._pieces = graphs, pieces
        line = f"decode steps are {len(graphs.sizes)} CUDA graphs of up to {graphs.sizes[-1]} rows; "
        if pieces is None:
            others = "others" if self.state.media is None else "others, and those that see an image,"
            return f"{line}{others} run eagerly"
        line += f"others are cut at attention, the pieces between recorded for {pieces.recorded} numbers of tokens"
        if pieces.recorded < pieces.wanted:
            line += f" ({pieces.wanted} were wanted, but {room_bytes / 2**20:,.0f} MiB are used up)"
        return line + ("" if self.state.media is None else "; eager where few of the tokens see an image")

    # ---- launching

    def stage(self, plan: StepPlan) -> Staged:
        carrier = self._upload.take(plan.step)
        try:
            tokens = lay_out(plan)
            failed = self._bad_ids(plan, tokens)
            samples = plan.samples.copy()
            samples[list(failed)] = 0
            return Staged(plan, carrier, tokens, sample_points(samples, tokens), failed)
        except BaseException:
            self._upload.give(carrier)
            raise

    def _bad_ids(self, plan: StepPlan, tokens: Tokens) -> dict[int, str]:
        """Rows whose given ids are outside the vocabulary; the ids become 0."""
        bad = np.flatnonzero((tokens.ids < 0) | (tokens.ids >= self._input_vocab))
        failed: dict[int, str] = {}
        for token in bad.tolist():
            message = f"token id {int(tokens.ids[token])} is outside the vocabulary of {self._input_vocab}"
            failed.setdefault(int(tokens.rows[token]), message)
        tokens.ids[bad] = 0
        return failed

    @torch.inference_mode()
    def run(self, staged: Staged) -> Collected | Undecided:
        with self._giving_back(staged):
            began = self._stream.compute.record(timed=True)
            self.state.apply(staged.plan)
            sampling = self._compute(staged)
            if len(staged.plan.deferred):
                return Undecided(partial(self._decide, staged, sampling, began))
            return self._end(staged, sampling, began)

    @torch.inference_mode()
    def _decide(self, staged: Staged, sampling: _Sampling, began: Event, choices: Choices) -> Collected:
        with self._giving_back(staged):
            self._upload.current = staged.set
            points = staged.points
            for at, logits in sampling.kept:
                rows = points.rows[at]
                mine = np.isin(choices.rows, rows)
                masks = masks_of(Choices(choices.rows[mine], choices.masks[mine]), rows)
                sampling.drawn.append((at, self._draw(staged, logits, at, masks)))
            return self._end(staged, sampling, began)

    @contextmanager
    def _giving_back(self, staged: Staged) -> Iterator[None]:
        """When enqueuing fails, the step's staging set is free once what was enqueued has run."""
        try:
            yield
        except BaseException:
            self._stream.copy.wait(self._stream.compute.record())
            staged.set.guard = self._stream.copy.record()
            self._upload.give(staged.set)
            raise

    def _end(self, staged: Staged, sampling: _Sampling, began: Event) -> Collected:
        outputs = self._settle(staged, sampling) if len(staged.plan.slots) else Outputs(None)
        return self._bring_back(staged, outputs, began, self._stream.compute.record(timed=True))

    def _bring_back(self, staged: Staged, outputs: Outputs, began: Event, ended: Event) -> Collected:
        """Enqueue the copies to the host, which are behind the whole step."""
        copy = self._stream.copy
        copy.wait(ended)
        with self._stream.api.on(copy):
            made = outputs.download(staged.set)
        staged.set.guard = copy.record()
        plan = staged.plan
        width = int(plan.samples.max(initial=0))
        facts = PlanFacts(plan.step, plan.slots.astype(np.int32), width, staged.tokens, staged.points)
        give_back = partial(self._upload.give, staged.set)
        return Collected(facts, staged.failed, made, (began, ended), give_back, keep=outputs)

    def _compute(self, staged: Staged) -> _Sampling:
        plan = staged.plan
        if plan.media:
            self._place_media(staged)
        if not len(plan.slots):  # a step that only moves pages
            return _Sampling()
        rows = len(plan.slots)
        graphs, sampling = self._graphs, _Sampling()
        if graphs is not None and graphs.fits(rows) and self._is_decode(staged):
            logits, without_token = graphs.replay(self._decode_block(staged, graphs), plan.starts.tolist())
            sampling.missing = without_token[:rows]
            self._draw_free(staged, logits[:rows], slice(0, rows), sampling)
        else:
            hidden, sampling.missing = self._forward(staged)
            sampling.prompts = self._score_prompts(staged, hidden)
            for part in _parts(len(staged.points.rows), LOGIT_ROWS):
                self._draw_free(staged, self._logits(staged, hidden, part), part, sampling)
        return sampling

    def _is_decode(self, staged: Staged) -> bool:
        plan, media = staged.plan, self.state.media
        if media is not None and media.seen_by(plan.slots.tolist()):
            return False
        one_each = bool((plan.counts == 1).all()) and len(staged.points.rows) == len(plan.slots)
        return one_each and bool((plan.samples == 1).all()) and not plan.prompt_logprobs and not staged.failed

    def _decode_block(self, staged: Staged, graphs: DecodeGraphs) -> Tensor:
        rows = len(staged.plan.slots)
        block = np.zeros((4, graphs.size_for(rows)), dtype=np.int32)
        block[2] = graphs.null_slot
        block[:, :rows] = staged.tokens.ids, staged.plan.relay, staged.plan.slots, staged.plan.starts
        return self._upload(block)

    def _place_media(self, staged: Staged) -> None:
        media, slots = self.state.media, staged.plan.slots.tolist()
        assert media is not None, f"step {staged.plan.step} brings images to a model that takes none"
        for slot, message in media.place(staged.plan.media).items():
            if slot not in slots:  # nobody would hear of it, and the item's pages have a name
                raise RuntimeError(f"slot {slot} has no row in step {staged.plan.step}, and {message}")
            staged.failed[slots.index(slot)] = message

    def _forward(self, staged: Staged) -> tuple[Tensor, Tensor | None]:
        """-> (hidden [T, D], bool [Q] of the relayed rows: the relay had no token)."""
        plan, tokens = staged.plan, staged.tokens
        rows, count = len(plan.slots), len(tokens.ids)
        block = self._upload(np.stack((tokens.ids, tokens.positions.astype(np.int32))))
        context = plan.starts + plan.counts
        by_row = np.zeros((3, rows + 1), dtype=np.int32)
        by_row[0, :rows], by_row[1, :rows], by_row[2] = plan.slots, context, tokens.offsets
        columns = self._upload(by_row)
        ids, missing = block[0], None
        relayed = np.flatnonzero(plan.relay)
        if relayed.size:
            where = self._upload(np.stack((plan.slots[relayed].astype(np.int64), tokens.offsets[relayed])))
            held = self.state.relay.index_select(0, where[0])
            missing = (held < 0) | (held >= self._input_vocab)
            ids = ids.index_copy(0, where[1], held.masked_fill(missing, 0))
        slots, counts, starts = columns[0, :rows], tuple(plan.counts.tolist()), tuple(plan.starts.tolist())
        media = self.state.media
        batch = StepBatch(
            ids=ids,
            positions=block[1, :count],
            row_offsets=columns[2],
            context=columns[1, :rows],
            tables=tuple(table.index_select(0, slots) for table in self.state.tables),
            kv=self._kv,
            states=self._states,
            max_context=int(context.max(initial=0)),
            host_counts=counts,
            host_starts=starts,
            cross=None if media is None else media.batch(plan.slots.tolist(), starts, counts),
        )
        hidden = None if self._pieces is None else self._pieces.forward(batch)
        return self._model.forward(self._ops, batch) if hidden is None else hidden, missing

    def _logits(self, staged: Staged, hidden: Tensor, part: slice) -> Tensor:
        at = staged.points.tokens[part]
        if len(at) != len(hidden):
            hidden = hidden.index_select(0, self._upload(at))
        return self._model.logits(self._ops, hidden)

    def _draw_free(self, staged: Staged, logits: Tensor, part: slice, sampling: _Sampling) -> None:
        """Draw the points of a part that wait for nothing; keep the logits of the others."""
        points = np.arange(part.start, part.stop)
        waits = np.isin(staged.points.rows[part], staged.plan.deferred)
        if not waits.any():
            sampling.drawn.append((points, self._draw(staged, logits, points)))
            return
        sampling.kept.append((points[waits], take_rows(logits, np.flatnonzero(waits), self._upload)))
        if not waits.all():
            free = take_rows(logits, np.flatnonzero(~waits), self._upload)
            sampling.drawn.append((points[~waits], self._draw(staged, free, points[~waits])))

    def _draw(self, staged: Staged, logits: Tensor, at: Int64s, masks: Masks | None = None) -> Drawn:
        points = staged.points
        slots: Int32s = staged.plan.slots[points.rows[at]]  # type: ignore[assignment]  # int64 by the stubs
        return self.sampler.draw(logits, slots, staged.tokens.positions[points.tokens[at]] + 1, masks)

    def _score_prompts(self, staged: Staged, hidden: Tensor) -> tuple[ScoredPrompt, ...]:
        scored = []
        for row, targets in staged.plan.prompt_logprobs.items():
            if row in staged.failed or not targets.size:
                continue
            if not 0 <= targets.min() <= targets.max() < self._model.vocab_size:
                staged.failed[row] = f"a prompt token id is outside the vocabulary of {self._model.vocab_size}"
                continue
            first, slot = int(staged.tokens.offsets[row]), int(staged.plan.slots[row])
            for part in _parts(len(targets), PROMPT_LOGIT_ROWS):
                logits = self._model.logits(self._ops, hidden[first + part.start : first + part.stop])
                scored.append(ScoredPrompt(row, self.sampler.score(logits, targets[part], slot)))
        return tuple(scored)

    # ---- what the sampled tokens change

    def _settle(self, staged: Staged, sampling: _Sampling) -> Outputs:
        points, plan, missing = staged.points, staged.plan, sampling.missing
        if not sampling.drawn:
            self._poison(staged)
            return Outputs(None, prompts=sampling.prompts)
        tokens, faults = self._in_order(sampling.drawn)
        if missing is not None:
            faults = self._with_missing(staged, faults, missing)
        if (plan.samples <= 1).all():
            rows, last, wrong = points.rows, tokens, faults
        else:
            rows, last, wrong = self._accepted(staged, tokens, faults)
        value = torch.where(wrong > SOUND, POISON, last).int()
        self.state.relay.index_copy_(0, self._upload(plan.slots[rows].astype(np.int64)), value)
        self._poison(staged)
        logprobs = [(at[some], tensors) for at, drawn in sampling.drawn for some, tensors in drawn.logprobs]
        return Outputs(torch.stack((tokens.int(), faults)), logprobs=tuple(logprobs), prompts=sampling.prompts)

    def _in_order(self, drawn: Sequence[tuple[Int64s, Drawn]]) -> tuple[Tensor, Tensor]:
        """(tokens, faults) of all points."""
        if len(drawn) == 1:
            return drawn[0][1].tokens, drawn[0][1].faults
        tokens, faults = (torch.cat(parts) for parts in zip(*((d.tokens, d.faults) for _, d in drawn), strict=True))
        points = np.concatenate([at for at, _ in drawn])
        if (points[1:] > points[:-1]).all():
            return tokens, faults
        order = self._upload(np.argsort(points))
        return tokens.index_select(0, order), faults.index_select(0, order)

    def _poison(self, staged: Staged) -> None:
        """Rows that the host knows to have failed have no last token."""
        if staged.failed:
            slots = staged.plan.slots[list(staged.failed)].astype(np.int64)
            self.state.relay.index_fill_(0, self._upload(slots), POISON)

    def _with_missing(self, staged: Staged, faults: Tensor, missing: Tensor) -> Tensor:
        """Points of rows for which the relay had no token are faulty."""
        relayed = np.flatnonzero(staged.plan.relay)
        if len(missing) == len(faults) and (len(relayed) != len(faults) or np.array_equal(relayed, staged.points.rows)):
            return torch.where(missing, NO_TOKEN, faults)
        by_row = torch.zeros(len(staged.plan.slots), dtype=torch.bool, device=faults.device)
        by_row.index_copy_(0, self._upload(relayed), missing)
        return torch.where(by_row.index_select(0, self._upload(staged.points.rows)), NO_TOKEN, faults)

    def _accepted(self, staged: Staged, tokens: Tensor, faults: Tensor) -> tuple[Int64s, Tensor, Tensor]:
        """(rows [n], last accepted token [n], worst fault [n]) where some rows brought drafts."""
        offsets, ids = staged.points.offsets, staged.tokens.ids
        sizes = np.diff(offsets)
        rows = np.flatnonzero(sizes)
        width = int(sizes.max())
        column = np.arange(width)
        inside = column < sizes[rows, None]
        at = np.where(inside, offsets[rows, None] + column, offsets[rows, None])
        own = staged.points.tokens[at]
        drafts = np.where(inside[:, 1:], ids[own[:, 1:]], -1)
        index = self._upload(at)
        sampled, wrong = tokens[index], faults[index].amax(1)
        same = (sampled[:, :-1] == self._upload(drafts)).long().cumprod(1).sum(1, keepdim=True)
        return rows, sampled.gather(1, same).squeeze(1), wrong


def _parts(count: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]
