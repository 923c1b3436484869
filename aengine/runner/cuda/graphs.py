"""Decode steps recorded once per number of rows and replayed.

Owns: the sizes, the fixed inputs, the recording.
Does not know: plans, sampling, which steps are replayed.
Invariants: a replay computes what the same operations compute one by one; graphs change speed, never tokens. A step of
R rows is replayed by the smallest graph of at least R: the rows behind R name the null slot, whose tables name the null
pages, so they write where nobody reads (to page 0 of states, which must stay zero, ops write nothing). Recording
happens at start-up only.

    inputs int32 [4, most]    given id | from relay? | slot | position      written before each replay
    outputs                   logits fp32 [rows, V], missing bool [rows]    overwritten by the next replay
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from aengine.kernels.ops import LayerKV, LayerState, Model, Ops, StepBatch
from aengine.runner.cuda.api import DeviceApi, Graph, Stream
from aengine.runner.slot_state import SlotState

Progress = Callable[[str, int, int], None]
PHASE = "capture graphs"


@runtime_checkable
class PlannedOps(Protocol):
    """Ops that prepare on the host what a captured step will run with."""

    def plan_captured(self, batch: StepBatch) -> None:
        """Called before a decode step of these rows is captured or replayed, on the compute stream. `batch` has the
        step's true lengths on the host; its device tensors are not the captured ones."""
        ...


def capturable(ops: Ops) -> bool:
    """Whether steps by these kernels can be recorded: they never look at the device."""
    return bool(getattr(ops, "capturable", ops.name == "triton"))


def graph_rows(most: int) -> tuple[int, ...]:
    """Numbers of rows that are captured: powers of two to 16, then two steps between powers of two, and `most`."""
    sizes = {1, 2, 4, 8, most}
    power = 16
    while power < most:
        sizes |= {power, power * 3 // 2}
        power *= 2
    return tuple(sorted(size for size in sizes if size <= most))


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    logits: Tensor
    missing: Tensor


class DecodeGraphs:
    """Graphs of `model` for up to `most` decode rows; the last slot of `state` is the null slot."""

    def __init__(
        self,
        api: DeviceApi,
        model: Model,
        ops: Ops,
        state: SlotState,
        kv: Sequence[LayerKV],
        *,
        most: int,
        context: int,
        input_vocab: int,
        states: Sequence[LayerState] = (),
    ) -> None:
        self._api, self._model, self._ops, self._state = api, model, ops, state
        self._kv, self._states, self._context, self._input_vocab = tuple(kv), tuple(states), context, input_vocab
        self.sizes = graph_rows(most)
        self.null_slot = len(state.relay) - 1
        self._inputs = torch.zeros((4, most), dtype=torch.int32, device=api.device)
        self._inputs[2].fill_(self.null_slot)
        self._offsets = torch.arange(most + 1, dtype=torch.int32, device=api.device)
        self._graphs: dict[int, _Captured] = {}

    def capture(self, stream: Stream) -> Iterator[int]:
        """Record all sizes, largest first: the smaller ones then fit into the memory of the pool. -> how many there are
        so far."""
        for done, rows in enumerate(reversed(self.sizes), 1):
            with self._api.on(stream), torch.inference_mode():
                self._forward(rows)  # compiles kernels and fills caches, which a recording must not
                self._plan(rows, (self._context - 1,) * rows)
            stream.record().wait()
            with torch.inference_mode():
                graph, (logits, missing) = self._api.capture(stream, lambda rows=rows: self._forward(rows))  # type: ignore[misc]
            self._graphs[rows] = _Captured(graph, logits, missing)
            yield done

    def fits(self, rows: int) -> bool:
        return bool(self._graphs) and rows <= self.sizes[-1]

    def size_for(self, rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, rows)]

    def replay(self, block: Tensor, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """block int32 [4, n] as `inputs`, n one of `sizes`; `starts` of the true rows.
        -> (logits [n, V], missing [n]: the relay had no token)."""
        rows = block.shape[1]
        self._inputs[:, :rows].copy_(block)
        self._plan(rows, (*starts, *(0,) * (rows - len(starts))))
        captured = self._graphs[rows]
        captured.graph.replay()
        return captured.logits, captured.missing

    def _plan(self, rows: int, starts: tuple[int, ...]) -> None:
        if isinstance(self._ops, PlannedOps):
            self._ops.plan_captured(self._batch(rows, self._inputs[0, :rows], starts))

    def _forward(self, rows: int) -> tuple[Tensor, Tensor]:
        given, relayed, slots, _ = self._inputs[:, :rows]
        ids = torch.where(relayed > 0, self._state.relay.index_select(0, slots), given)
        missing = (ids < 0) | (ids >= self._input_vocab)
        # Kernels choose how to split work by the longest context there may be: a graph serves all lengths.
        batch = self._batch(rows, ids.masked_fill(missing, 0), (self._context - 1,) * rows)
        return self._model.logits(self._ops, self._model.forward(self._ops, batch)), missing

    def _batch(self, rows: int, ids: Tensor, starts: tuple[int, ...]) -> StepBatch:
        _, _, slots, positions = self._inputs[:, :rows]
        return StepBatch(
            ids=ids,
            positions=positions,
            row_offsets=self._offsets[: rows + 1],
            context=positions + 1,
            tables=tuple(table.index_select(0, slots) for table in self._state.tables),
            kv=self._kv,
            states=self._states,
            max_context=max(starts) + 1,
            host_counts=(1,) * rows,
            host_starts=starts,
        )
