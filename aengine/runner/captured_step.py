"""A step replayed: the model's forward, logits and sampling as one program over fixed buffers.

Owns: the buffers, the recording of one model, the arguments that change from step to step.
Does not know: scheduling, what the kernels compute.
Invariants: a step's results have the bits of the same step run operation by operation, for both run the same kernels
on the same values. One recording for the largest step serves all. A decode step is one foreign call without the GIL;
more points than logits fit, or prompt log-probabilities, take one call per part. Steps in which a row sees a media
item are run by the eager executor, on the same state.

    columns of the plan -> lay_out | forward .. final norm | take, logits | sample | settle -> columns of the result
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.native import NativeOps
from aengine.kernels.native.capture import HostOnly, Program, RecordingOps, Sizes, record
from aengine.kernels.native.library import LAY_OUT_ARGS, SAMPLE_ARGS, SETTLE_ARGS, TABLE
from aengine.kernels.native.sampling import ALL_ROWS, NO_LOGPROBS, LogprobArrays
from aengine.kernels.ops import LayerKV, LayerState, MediaModel, Model, StepBatch
from aengine.runner.logprobs import join_logprobs
from aengine.runner.native_sampler import NativeSampler, fault_message
from aengine.runner.slot_state import SlotState
from aengine.runner.step import Undecided
from aengine.runner.torch_step import LOGIT_ROWS, TorchExecutor, score_prompt
from aengine.types import Choices, Int32s, Logprobs, StepPlan, StepResult

# Faults of a row, by the numbers of api.h.
_NO_RELAY, _BAD_ID, _UNSAMPLED = 1, 2, 3


class _Columns:
    """Arrays at fixed addresses, for steps of up to `limits`: inputs of a step and what its parts hand on."""

    def __init__(self, limits: Sizes, table_columns: Sequence[int]) -> None:
        rows, tokens = limits.rows, limits.tokens
        self.plan = np.zeros((5, rows), dtype=np.int32)  # slots, starts, counts, samples, relayed
        self.slots, self.starts, self.counts, self.samples, self.relayed = self.plan
        self.given = np.zeros(tokens, dtype=np.int32)
        self.faults = np.zeros(rows, dtype=np.int32)
        self.fault_ids = np.zeros(rows, dtype=np.int32)
        self.point_positions = np.zeros(tokens, dtype=np.int64)
        self.point_slots = np.zeros(tokens, dtype=np.int32)
        self.sampled = np.zeros(tokens, dtype=np.int32)
        self.point_faults = np.zeros(tokens, dtype=np.int32)
        self.point_waits = np.zeros(tokens, dtype=np.uint8)
        self.ids, self.positions = _zeros(tokens), _zeros(tokens)
        self.row_offsets, self.context = _zeros(rows + 1), _zeros(rows)
        self.point_tokens = torch.zeros(tokens, dtype=torch.int64)
        self.tables = tuple(_zeros(rows, columns) for columns in table_columns)


class CapturedStep:
    """`limits`: the largest step; its points are as many as there are tokens, and LOGIT_ROWS at a time at most.

    Raises NotCapturable when the model's forward cannot be replayed.
    """

    def __init__(
        self,
        model: Model,
        ops: NativeOps,
        sampler: NativeSampler,
        state: SlotState,
        kv: Sequence[LayerKV],
        states: Sequence[LayerState],
        limits: Sizes,
        *,
        logit_rows: int = LOGIT_ROWS,
    ) -> None:
        limits = replace(limits, points=min(logit_rows, limits.tokens))
        self._model, self._ops, self._sampler, self._state = model, ops, sampler, state
        self._input_vocab = model.input_vocab if isinstance(model, MediaModel) else model.vocab_size
        self._limits = limits
        self._columns = at = _Columns(limits, [table.shape[1] for table in state.tables])

        def forward(recorder: RecordingOps, sizes: Sizes) -> tuple[Tensor, Tensor]:
            batch = StepBatch(
                ids=at.ids[: sizes.tokens],
                positions=at.positions[: sizes.tokens],
                row_offsets=at.row_offsets[: sizes.rows + 1],
                context=at.context[: sizes.rows],
                tables=tuple(table[: sizes.rows] for table in at.tables),
                kv=tuple(kv),
                states=tuple(states),
                max_context=sizes.context,
                host_counts=HostOnly(),
                host_starts=HostOnly(),
            )
            hidden = model.forward(recorder, batch)
            recorder.cut()
            return hidden, model.logits(recorder, recorder.take(hidden, at.point_tokens[: sizes.points]))

        self._recording = record(ops, forward, limits)
        self._hidden, self._logits = self._recording.outputs
        self._lay_out = np.zeros(LAY_OUT_ARGS.size // 8, dtype=np.int64)
        self._sample = np.zeros(SAMPLE_ARGS.size // 8, dtype=np.int64)
        self._settle = np.zeros(SETTLE_ARGS.size // 8, dtype=np.int64)
        self._fill_arguments(_page_tokens(model, kv))
        calls = [
            ("lay_out", self._lay_out.ctypes.data),
            *self._recording.calls,
            ("sample", self._sample.ctypes.data),
            ("settle", self._settle.ctypes.data),
        ]
        self._program = Program(ops.context, calls)
        self._head, self._end = 1 + self._recording.cuts[0], len(calls) - 1  # where logits begin, where rows settle

    def describe(self) -> str:
        """One line for the start-up report."""
        return (
            f"steps are captured: {self._end + 1} operations in one call, up to {self._limits.tokens} tokens, "
            f"{self._recording.bytes / 2**20:.0f} MiB of buffers"
            + ("; those in which a row sees an image run one by one" if self._state.media else "")
        )

    def hidden(self, tokens: int) -> Tensor:
        """The last step's hidden states after the final norm [tokens, D]; the next step writes over them."""
        states: Tensor = self._hidden[:tokens]
        return states

    def _fill_arguments(self, page_tokens: dict[int, int]) -> None:
        """Addresses that never change; what does is set by `_set_rows` and `_set_points`."""
        at, state = self._columns, self._state
        tables = b"".join(
            TABLE.pack(by_slot.data_ptr(), by_row.data_ptr(), by_row.shape[1], page_tokens.get(group, 0))
            for group, (by_slot, by_row) in enumerate(zip(state.tables, at.tables, strict=True))
        )
        self._tables = np.frombuffer(tables, dtype=np.int64).copy()
        plan = [column.ctypes.data for column in at.plan]
        faults = (at.faults.ctypes.data, at.fault_ids.ctypes.data)
        points = (at.point_tokens.data_ptr(), at.point_positions.ctypes.data, at.point_slots.ctypes.data)
        relay = state.relay.data_ptr()
        LAY_OUT_ARGS.pack_into(
            self._lay_out.data, 0, *plan, at.given.ctypes.data, relay, self._tables.ctypes.data,
            0, len(at.tables), self._input_vocab, at.ids.data_ptr(), at.positions.data_ptr(),
            at.row_offsets.data_ptr(), at.context.data_ptr(), *faults, *points,
        )  # fmt: skip
        SAMPLE_ARGS.pack_into(
            self._sample.data, 0, self._logits.data_ptr(), 0, *self._logits.shape[1:], self._logits.stride(0),
            self._sampler.table.ctypes.data, points[2], points[1],
            at.sampled.ctypes.data, at.point_faults.ctypes.data, *NO_LOGPROBS, *ALL_ROWS,
        )  # fmt: skip
        SETTLE_ARGS.pack_into(
            self._settle.data, 0, plan[0], plan[3], at.ids.data_ptr(), points[0], at.point_faults.ctypes.data,
            at.sampled.ctypes.data, 0, 0, *faults, 0, 0, relay,
        )  # fmt: skip

    def run(self, plan: StepPlan) -> StepResult | Undecided:
        """The step, once the slots' state is up to date."""
        rows = len(plan.slots)
        if plan.decodes == rows:
            tokens, points, width = rows, rows, 1
        else:
            tokens, points, width = plan.n_tokens, int(plan.samples.sum()), max(1, int(plan.samples.max(initial=0)))
        self._take_in(plan, rows, tokens)
        out = np.empty((rows, width), dtype=np.int32)
        accepted = np.empty(rows, dtype=np.int32)
        self._lay_out[8] = rows
        self._settle[6], self._settle[7] = rows, width
        self._settle[10], self._settle[11] = out.ctypes.data, accepted.ctypes.data
        context = int((plan.starts + plan.counts).max(initial=1))
        sizes = Sizes(tokens, rows, min(max(points, 1), self._limits.points), context)
        self._recording.resize(sizes)
        alternatives = self._sampler.alternatives(plan.slots)
        self._sample[13:15] = 0  # all rows
        messages: dict[int, str] = {}
        prompt_logprobs: dict[int, Logprobs] = {}
        logprobs: dict[int, Logprobs] = {}
        if len(plan.deferred):
            return self._run_deferred(plan, (out, accepted), alternatives, sizes)
        if not plan.prompt_logprobs and 0 < points <= self._limits.points:
            made = self._set_points(points, alternatives)
            self._program.run()
            logprobs = self._pick(made, points)
        else:
            self._program.run(0, self._head)
            for row, targets in plan.prompt_logprobs.items():
                self._score(row, targets, prompt_logprobs, messages)
            logprobs = self._sample_parts(points, alternatives, sizes)
            self._program.run(self._end)
        return self._result(plan, (out, accepted), logprobs, prompt_logprobs, messages)

    def _result(
        self,
        plan: StepPlan,
        made: tuple[Int32s, Int32s],
        logprobs: dict[int, Logprobs],
        prompt_logprobs: dict[int, Logprobs],
        messages: dict[int, str],
    ) -> StepResult:
        out, accepted = made
        return StepResult(
            step=plan.step,
            tokens=out,
            counts=accepted,
            logprobs=_by_row(logprobs, plan.samples, accepted) if logprobs else {},
            prompt_logprobs=prompt_logprobs,
            failed=self._failures(len(plan.slots), messages),
        )

    def _run_deferred(self, plan: StepPlan, made: tuple[Int32s, Int32s], alternatives: int, sizes: Sizes) -> Undecided:
        """The forward and the rows that do not wait. Where logits of all points do not fit at once, or prompts are
        scored, the head of the model runs when the step is decided, for all rows."""
        points = int(plan.samples.sum())
        whole = points <= self._limits.points and not plan.prompt_logprobs
        messages: dict[int, str] = {}
        prompt_logprobs: dict[int, Logprobs] = {}
        arrays: LogprobArrays | None = None
        if whole:
            waits = self._columns.point_waits
            waits[:points] = np.isin(np.repeat(np.arange(len(plan.slots)), plan.samples), plan.deferred)
            arrays = self._set_points(points, alternatives)
            self._sample[13:15] = waits.ctypes.data, 0
            self._program.run(0, self._end)
        else:
            self._program.run(0, self._head)
            for row, targets in plan.prompt_logprobs.items():
                self._score(row, targets, prompt_logprobs, messages)

        def decide(choices: Choices) -> StepResult:
            with self._sampler.masked(plan.slots[choices.rows], choices.masks):
                if whole:
                    self._sample[14] = 1
                    self._program.run(self._end - 1)
                    logprobs = self._pick(arrays, points)
                else:
                    logprobs = self._sample_parts(points, alternatives, sizes)
                    self._program.run(self._end)
            return self._result(plan, made, logprobs, prompt_logprobs, messages)

        return Undecided(decide)

    def _take_in(self, plan: StepPlan, rows: int, tokens: int) -> None:
        if rows > self._limits.rows or tokens > self._limits.tokens:
            raise ValueError(f"step {plan.step} has {rows} rows, {tokens} tokens; captured for {self._limits}")
        at = self._columns
        at.slots[:rows] = plan.slots
        at.starts[:rows] = plan.starts
        at.counts[:rows] = plan.counts
        at.samples[:rows] = plan.samples
        at.relayed[:rows] = plan.relay
        given = tokens - int(at.counts[:rows] @ at.relayed[:rows])
        if len(plan.ids) != given:
            raise ValueError(f"step {plan.step} has {len(plan.ids)} ids for {given} tokens")
        at.given[:given] = plan.ids

    def _set_points(self, points: int, alternatives: int) -> LogprobArrays | None:
        self._sample[1] = points
        made = LogprobArrays(points, alternatives) if alternatives >= 0 else None
        self._sample[9:13] = 0 if made is None else made.addresses()
        return made

    def _pick(self, made: LogprobArrays | None, points: int) -> dict[int, Logprobs]:
        at = self._columns
        failed = np.flatnonzero(at.point_faults[:points]).tolist() if made is not None else ()
        return self._sampler.pick_logprobs(made, at.point_slots[:points], failed)

    @torch.inference_mode()
    def _score(self, row: int, targets: Int32s, scores: dict[int, Logprobs], messages: dict[int, str]) -> None:
        at = self._columns
        if at.faults[row]:
            return
        first = int(at.row_offsets[row])
        hidden = self.hidden(first + len(targets))[first:]
        made = score_prompt(self._model, self._ops, self._sampler, hidden, targets, int(at.slots[row]))
        if isinstance(made, str):
            messages[row] = made
            at.faults[row] = _UNSAMPLED
        elif made is not None:
            scores[row] = made

    def _sample_parts(self, points: int, alternatives: int, sizes: Sizes) -> dict[int, Logprobs]:
        """All points, as many at a time as logits fit: each part's inputs move to the front of the buffers."""
        at, most = self._columns, self._limits.points
        inputs: tuple[NDArray[Any], ...] = (at.point_tokens.numpy(), at.point_positions, at.point_slots)
        kept = [column[:points].copy() for column in inputs]
        results: tuple[NDArray[Any], ...] = (at.sampled, at.point_faults)
        made = [np.zeros(points, dtype=np.int32) for _ in results]
        logprobs: dict[int, Logprobs] = {}
        for first in range(0, points, most):
            count = min(most, points - first)
            for column, values in zip(inputs, kept, strict=True):
                column[:count] = values[first : first + count]
            self._recording.resize(Sizes(sizes.tokens, sizes.rows, count, sizes.context))
            arrays = self._set_points(count, alternatives)
            self._program.run(self._head, self._end)
            logprobs |= {first + point: value for point, value in self._pick(arrays, count).items()}
            for column, values in zip(results, made, strict=True):
                values[first : first + count] = column[:count]
        for column, values in zip((*inputs, *results), (*kept, *made), strict=True):
            column[:points] = values
        return logprobs

    def _failures(self, rows: int, messages: dict[int, str]) -> dict[int, str]:
        at = self._columns
        failed = {}
        for row in at.faults[:rows].nonzero()[0].tolist():
            fault, detail = int(at.faults[row]), int(at.fault_ids[row])
            if row in messages:
                failed[row] = messages[row]
            elif fault == _NO_RELAY:
                failed[row] = f"slot {at.slots[row]} has no sampled token to go on from"
            elif fault == _BAD_ID:
                failed[row] = f"token id {detail} is outside the vocabulary of {self._input_vocab}"
            else:
                failed[row] = fault_message(int(at.point_faults[detail]))
        return failed


class CapturedExecutor:
    """`Executor` that replays `captured`; steps that see media items are left to `eager`, whose state both share."""

    def __init__(self, eager: TorchExecutor, captured: CapturedStep) -> None:
        self._eager, self._captured = eager, captured

    def stage(self, plan: StepPlan) -> StepPlan:
        return self._eager.stage(plan)

    def run(self, plan: StepPlan) -> StepResult | Undecided:
        state = self._eager.state
        state.apply(plan)
        sees_media = plan.media or (state.media is not None and state.media.seen_by(plan.slots.tolist()))
        return self._eager.compute(plan) if sees_media or not len(plan.slots) else self._captured.run(plan)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _page_tokens(model: Model, kv: Sequence[LayerKV]) -> dict[int, int]:
    """Tokens a page, by attention group."""
    return {spec.group: kv[spec.layer].page_tokens for spec in model.attention}


def _by_row(points: dict[int, Logprobs], samples: Int32s, accepted: NDArray[np.int32]) -> dict[int, Logprobs]:
    """Those of the accepted points of each row that has any."""
    offsets, result = np.cumsum(samples) - samples, {}
    for row in np.flatnonzero(accepted).tolist():
        first = int(offsets[row])
        if first in points:
            result[row] = join_logprobs([points[point] for point in range(first, first + int(accepted[row]))])
    return result
