"""The race harness's device as the CUDA runner over the fake device: separate streams, operations in random order.

Owns: `CudaEpisode`, a model whose one kernel is the simulated device's, the wrong runners that tests plant.
Does not know: the scheduler.
Invariants: tokens are derived from the KV that the kernel finds when it runs, through the tables and ids it is given.
"""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import torch

from aengine.runner.cuda.staging import CudaStaging, StagingSet
from aengine.runner.cuda.step import STAGING_SETS, CudaExecutor
from aengine.runner.cuda.stream import CudaStream
from aengine.runner.sim import _UNWRITTEN, SimExecutor
from aengine.types import Choices, Request, StepPlan, StepResult
from tests.races.harness import VOCAB, Episode, Setting, garbled, make_pool
from tests.races.toy_grammar import ToyMatcher
from tests.runner.cuda.fake import FakeCuda, FakeStream


class HashModel:
    """Next tokens by `SimExecutor`'s reading of the pages, as one kernel on the current stream: its attention. Ids and
    positions come to it through operations that can be recorded, which stand before and behind it."""

    vocab_size, max_context, attention, dtype = VOCAB, 1 << 20, (), torch.float32

    def forward(self, ops, batch):
        ids, positions = (ops.column(given) for given in (batch.ids, batch.positions))
        return ops.scale(ops.attention(ids, ids, positions, None, batch), 1.0)

    def logits(self, ops, hidden):
        return (torch.arange(VOCAB, device=hidden.device) - hidden - 0.25).abs().mul(-1e6)


class HashOps:
    name = "hash"
    capturable = True

    def __init__(self, sim: SimExecutor, device: FakeCuda) -> None:
        self._sim, self._device = sim, device

    def column(self, given):
        return (given + 1).float().view(-1, 1, 1)

    def scale(self, x, factor):
        return x * factor

    def attention(self, q, k, v, spec, batch, sinks=None, rope=None):
        out = torch.empty((len(q), 1), dtype=torch.float32)

        def kernel():
            sim = self._sim
            ids, positions = ((given.flatten() - 1).int().numpy() for given in (q, v))
            sim.tables = [table.numpy() for table in batch.tables]
            rows = np.searchsorted(batch.row_offsets.numpy()[1:], np.arange(len(ids)), "right")
            count = len(sim.tables[0])
            starts = batch.context.numpy() - np.diff(batch.row_offsets.numpy())
            plan = SimpleNamespace(slots=np.arange(count), starts=starts)
            inputs = [ids[rows == row] for row in range(count)]
            for group, states in sim._states.items():
                states.run(plan, sim.tables[group], inputs)
            for group, kv, table in zip(sim._groups, sim._kv, sim.tables, strict=True):
                if group.state:
                    continue
                pages = table[rows, positions // group.page_tokens]
                kv[pages, positions % group.page_tokens] = np.where(pages == 0, _UNWRITTEN, ids)
            out[:, 0] = torch.tensor(
                [next_of(row, at, at + 1 - starts[row]) for row, at in zip(rows, positions, strict=True)]
            )

        def next_of(row, position, computed):
            return self._sim._next(row, position, 0, [s.after(row, computed) for s in self._sim._states.values()])

        self._device.enqueue(kernel)
        return out


class CudaDevice:
    """Stands in for `harness.Device`."""

    def __init__(self, seed: int, setting: Setting, kind: dict[str, type], *, graphs: bool) -> None:
        self.rng = random.Random(seed)
        self.fake = kind.get("device", FakeCuda)(seed, eager=self.rng.choice([0.0, 0.3, 0.8]))
        stream = CudaStream(self.fake)
        _, groups = make_pool(setting)
        sim = SimExecutor(groups, max_seqs=setting.seqs, max_tokens=setting.max_tokens, vocab=VOCAB)
        self._kv = [torch.from_numpy(kv) for kv in sim._kv]
        columns = [2 if group.state else -(-setting.max_tokens // group.page_tokens) for group in groups]
        self._states = sim._states
        self.executor = kind.get("executor", CudaExecutor)(
            stream, HashModel(), HashOps(sim, self.fake), (), columns, setting.seqs, setting.max_tokens,
            move=self._move, staging=kind.get("staging", CudaStaging)(self.fake, STAGING_SETS),
        )  # fmt: skip
        self._stream = stream
        if graphs:
            self.executor.capture(tokens=setting.budget)
        self._results: dict[int, object] = {}

    def _move(self, moves):
        for move in moves:
            if move.group in self._states:
                self.fake.enqueue(partial(self._states[move.group].move, move.source, move.target))
                continue
            pages = self._kv[move.group]
            pages[move.target].copy_(pages[move.source])
            pages[move.source].fill_(_UNWRITTEN)

    def refuse(self, step: StepPlan) -> None:
        self._results[step.step] = lambda: None

    def launch(self, step: StepPlan, *, fails: bool, bad_rows: list[int]) -> None:
        bad = list(range(len(step.slots))) if fails else bad_rows
        staged, made = self.executor.stage(garbled(step, bad) if bad else step), []
        self._stream.launch(lambda: made.append(self.executor.run(staged)))
        self._last = made, fails, bad
        if not len(step.deferred):
            self._record(step, *self._last)

    def choose(self, step: StepPlan, choices: Choices) -> None:
        made = self._last[0]
        self._stream.launch(lambda: made.append(made.pop().decide(choices)))
        self._record(step, *self._last)

    def _record(self, step: StepPlan, made: list, fails: bool, bad: list[int]) -> None:
        point = self._stream.record()

        def result() -> StepResult | None:
            point.wait()
            told = made[0].collect()
            counts = told.counts.copy()
            counts[bad] = 0
            return None if fails else msgspec.structs.replace(told, counts=counts)

        self._results[step.step] = result

    def run_one(self) -> None:
        for _ in range(self.rng.randrange(12)):
            self.fake.run_one()

    def wait(self, step: int) -> StepResult | None:
        return self._results.pop(step)()


def nearest_allowed(token: int, grammar: ToyMatcher) -> int:
    """As `HashModel`'s logits have it."""
    return min(grammar.allowed(), key=lambda other: abs(other - token - 0.25))


class CudaEpisode(Episode):
    pick = staticmethod(nearest_allowed)

    def __init__(self, seed: int, setting: Setting, *, graphs: bool = False, **kind: type) -> None:
        super().__init__(seed, setting)
        self.device = CudaDevice(seed, setting, kind, graphs=graphs)

    def submit(self, request: Request) -> None:
        """Half of them random: their logits leave no choice, so the token is the greedy one, by the other path."""
        super().submit(msgspec.structs.replace(request, seed=0))


# ---- runners with a fault


class OneSetNoGuard(CudaStaging):
    """Writes pinned memory again while copies out of it may not have run."""

    def take(self, step: int) -> StagingSet:
        taken = self._free[0]
        taken.guard = None
        taken.begin()
        self.current = taken
        return taken

    def give(self, used: StagingSet) -> None:
        pass


class HastyCopies(FakeCuda):
    """The copy stream does not wait for the step whose results it brings."""

    def stream(self, name: str) -> FakeStream:
        made = super().stream(name)
        if name == "copy":
            made.wait = lambda event: None
        return made


class EarlyRelay(CudaExecutor):
    """Reads the relay when a step is staged, which steps in flight have yet to write."""

    def __init__(self, stream: CudaStream, *given, **more) -> None:
        super().__init__(stream, *given, **more)
        self._relay, self._device = self.state.relay, stream.api

    def stage(self, plan):
        self._early = self._relay.clone()
        self._device.know(self._early)
        return super().stage(plan)

    def _forward(self, staged):
        self.state.relay = self._early
        try:
            return super()._forward(staged)
        finally:
            self.state.relay = self._relay


class StalePieces(CudaExecutor):
    """Replays with the ids and positions that the pieces were recorded with."""

    def capture(self, *given, **more):
        line = super().capture(*given, **more)
        pieces = self._pieces
        pieces._inputs = pieces._inputs.clone()
        self._stream.api.know(pieces._inputs)
        return line


class FullCuts(CudaExecutor):
    """Launches attention for the tokens that fill a piece up, too: as if they were the last row's."""

    def capture(self, *given, **more):
        line = super().capture(*given, **more)
        for key, program in self._pieces._programs.items():
            cuts = tuple(partial(self._launch, cut) for cut in program.cuts)
            wrong = tuple(SimpleNamespace(launch=launch) for launch in cuts)
            self._pieces._programs[key] = dataclasses.replace(program, cuts=wrong)
        return line

    def _launch(self, cut, batch):
        full = torch.cat((batch.row_offsets[:-1], batch.row_offsets[-1:] * 0 + len(cut.out)))
        cut.out.copy_(cut.run(dataclasses.replace(batch, row_offsets=full), *cut.inputs))


class LatePieces(CudaExecutor):
    """Replays a piece before the attention whose output it reads."""

    def capture(self, *given, **more):
        line = super().capture(*given, **more)
        for key, program in self._pieces._programs.items():
            nothing = SimpleNamespace(replay=lambda: None)
            launches = [
                SimpleNamespace(launch=partial(self._launch, cut, graph))
                for cut, graph in zip(program.cuts, program.graphs[1:], strict=True)
            ]
            graphs = (program.graphs[0], *(nothing for _ in launches))
            self._pieces._programs[key] = dataclasses.replace(program, graphs=graphs, cuts=tuple(launches))
        return line

    def _launch(self, cut, graph, batch):
        graph.replay()
        cut.launch(batch)
