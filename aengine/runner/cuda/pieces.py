"""Steps of any shape as graphs of what lies between the operations whose launch depends on the shape.

Owns: the numbers of tokens that are recorded, where a forward is cut, the pieces' inputs, their replay.
Does not know: plans, sampling, what is in between for any family of models.
Invariants: a piece computes tokens one by one, so that it depends on their number alone; pieces change speed, never
tokens. An operation that plans by rows, lengths or tables (attention, convolutions over rows, attention to items) is a
cut: it is launched for each step, with the step's own batch and true number of tokens, so tokens that fill a piece up
write no KV and no state. Where they stand their values are whatever an earlier step left, which nobody reads.
Recording happens at start-up only.

    graph    embed norm linear |           | linear norm gate linear norm linear |           | ... norm
    cut                        | attention |                                     | attention |
    tokens   0 .. T - 1 of the step, T .. size - 1 left over                     inputs, cuts' outputs: fixed addresses
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from aengine.kernels.ops import AttentionSpec, CrossBatch, MediaModel, Model, Ops, RopeTable, StateSpec, StepBatch
from aengine.runner.cuda.api import DeviceApi, Graph, Stream

ALIGN = 16  # tokens: what products of matrices like, and as many steps cost as one
STEPS = 8  # sizes between one power of two and the next

Run = Callable[..., Tensor]
Advance = Callable[[], None]


def piece_tokens(most: int) -> tuple[int, ...]:
    """Numbers of tokens that are recorded: multiples of 16 to 128, then eight steps from one power of two to the next,
    and `most`, rounded up to a multiple of 16. A step of more than 128 tokens is filled up by less than an eighth."""
    last, size, sizes = -(-most // ALIGN) * ALIGN, ALIGN, []
    while size < last:
        sizes.append(size)
        size += max(ALIGN, 2 ** (size.bit_length() - 1) // STEPS)
    return (*sizes, last)


@dataclass(frozen=True, slots=True)
class PieceBatch:
    """The part of a `StepBatch` that a piece may look at: fixed addresses."""

    ids: Tensor
    positions: Tensor
    cross: CrossBatch | None


@dataclass(frozen=True, slots=True)
class Cut:
    """An operation between two pieces, from and to fixed addresses. `items`: it has the tokens that see an item."""

    run: Run
    inputs: tuple[Tensor, ...]
    out: Tensor
    items: bool

    def launch(self, batch: StepBatch) -> None:
        if self.items:
            assert batch.cross is not None
        count = len(batch.cross.tokens) if self.items and batch.cross is not None else len(batch.ids)
        self.out[:count].copy_(self.run(batch, *(given[:count] for given in self.inputs)))


class CuttingOps:
    """`ops` in whose place a forward is recorded: `advance` is called at every cut, which is noted, not run."""

    def __init__(self, ops: Ops, api: DeviceApi, advance: Advance) -> None:
        self._ops, self._api, self._advance = ops, api, advance
        self.cuts: list[Cut] = []

    def __getattr__(self, name: str) -> Any:
        """Every op that is no cut."""
        return getattr(self._ops, name)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        batch: StepBatch,
        sinks: Tensor | None = None,
        rope: RopeTable | None = None,
    ) -> Tensor:
        def run(step: StepBatch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._ops.attention(q, k, v, spec, step, sinks, rope)

        return self._cut(run, (q, k, v), q.shape[1] * q.shape[2])

    def cross_attention(self, q: Tensor, spec: AttentionSpec, batch: StepBatch) -> Tensor:
        def run(step: StepBatch, q: Tensor) -> Tensor:
            return self._ops.cross_attention(q, spec, step)

        return self._cut(run, (q,), q.shape[1] * q.shape[2], items=True)

    def short_conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: StateSpec, batch: StepBatch) -> Tensor:
        def run(step: StepBatch, x: Tensor) -> Tensor:
            return self._ops.short_conv(x, weight, bias, spec, step)

        return self._cut(run, (x,), x.shape[1])

    def _cut(self, run: Run, given: tuple[Tensor, ...], width: int, *, items: bool = False) -> Tensor:
        """The caller holds what it gave until it has the output, so the output gets other memory than that."""
        inputs = tuple(self._api.alias(one) for one in given)
        self._advance()
        out = given[0].new_empty((len(given[0]), width))
        self.cuts.append(Cut(run, inputs, self._api.alias(out), items))
        return out


@dataclass(frozen=True, slots=True)
class _Program:
    """A whole forward: cuts[i] lies between graphs[i] and graphs[i + 1]."""

    graphs: tuple[Graph, ...]
    cuts: tuple[Cut, ...]
    hidden: Tensor

    def replay(self, batch: StepBatch) -> None:
        first, *others = self.graphs
        first.replay()
        for cut, graph in zip(self.cuts, others, strict=True):
            cut.launch(batch)
            graph.replay()


class Pieces:
    """The forward of `model` for steps of up to `tokens` tokens, and for those of a model of images in which at least
    half of the tokens see one: layers that attend to images are then computed for all."""

    def __init__(self, api: DeviceApi, model: Model, ops: Ops, *, tokens: int) -> None:
        self._api, self._model, self._ops = api, model, ops
        self._ladders = {False: piece_tokens(tokens)}
        if isinstance(model, MediaModel):  # one token more: where rows that see nothing are put
            self._ladders[True] = piece_tokens(tokens + 1)
        self.most = max(ladder[-1] for ladder in self._ladders.values())
        self._inputs = torch.zeros((2, self.most), dtype=torch.int32, device=api.device)
        self._seeing = torch.zeros(self.most, dtype=torch.int64, device=api.device)
        self._programs: dict[tuple[int, bool], _Program] = {}

    @property
    def wanted(self) -> int:
        return sum(len(ladder) for ladder in self._ladders.values())

    @property
    def recorded(self) -> int:
        return len(self._programs)

    def capture(self, stream: Stream, room_bytes: int) -> Iterator[int]:
        """Record size by size, as long as less than `room_bytes` of the device have gone -> how many there are so far.

        The largest comes first: what it leaves in the graphs' memory, the others use again. Then the smallest, which
        gain most.
        """
        order = sorted((size, sees) for sees, ladder in self._ladders.items() for size in ladder)
        before, _ = self._api.memory()
        for size, sees in (order[-1], *order[:-1]):
            if before - self._api.memory()[0] >= room_bytes:
                return
            self._programs[size, sees] = self._record(stream, size, sees)
            yield self.recorded

    def _record(self, stream: Stream, size: int, sees: bool) -> _Program:
        cross = CrossBatch(self._seeing[:size], ()) if sees else None
        batch = cast(StepBatch, PieceBatch(self._inputs[0, :size], self._inputs[1, :size], cross))

        def forward(advance: Advance) -> tuple[Tensor, list[Cut]]:
            ops = CuttingOps(self._ops, self._api, advance)
            return self._api.alias(self._model.forward(cast(Ops, ops), batch)), ops.cuts

        with self._api.on(stream), torch.inference_mode():
            forward(lambda: None)  # compiles kernels and fills caches, which a recording must not
        stream.record().wait()
        with torch.inference_mode():
            graphs, (hidden, cuts) = self._api.capture_pieces(stream, forward)
        return _Program(graphs, tuple(cuts), hidden)

    def forward(self, batch: StepBatch) -> Tensor | None:
        """Hidden states [T, D], overwritten by the next replay of any graph; None, and nothing was enqueued: the step
        is none that was recorded."""
        tokens = len(batch.ids)
        seeing = 0 if batch.cross is None else len(batch.cross.tokens)
        program = None if 0 < 2 * seeing < tokens else self._program(tokens, seeing > 0)
        if program is None:
            return None
        size = len(program.hidden)
        self._inputs[0, :tokens].copy_(batch.ids)
        self._inputs[1, :tokens].copy_(batch.positions)
        if batch.cross is not None:  # the others are put where no token of the step stands
            self._seeing[:seeing].copy_(batch.cross.tokens)
            self._seeing[seeing:size].fill_(size - 1)
        program.replay(batch)
        return program.hidden[:tokens]

    def _program(self, tokens: int, sees: bool) -> _Program | None:
        ladder = self._ladders[sees]
        at = bisect_left(ladder, tokens + sees)
        return None if at == len(ladder) else self._programs.get((ladder[at], sees))
