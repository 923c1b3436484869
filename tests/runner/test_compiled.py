"""A compiled forward: the tokens of the plain one, no program for each batch, clear refusals.

Owns: a model as a user would register it.
Does not know: what compilers make of a program; one test takes the real one.
Invariants: fp32 on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.utils import counters

from aengine.errors import ConfigError
from aengine.kernels.ops import AttentionSpec, Linear
from aengine.kernels.reference import ReferenceOps
from aengine.runner.compiled import compile_forward
from aengine.runner.torch_step import TorchExecutor
from tests.kernels.native.paged import Pages, make_batch
from tests.runner.conftest import MAX_LEN, PAGES, SLOTS, Bench, Row, make_prompt

CPU = torch.device("cpu")
COLUMNS = [-(-MAX_LEN // page) for page in PAGES]


class PackingOps(ReferenceOps):
    """Some linears are packed in a form that only this backend can read; it notes which calls it got."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque = 0

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        self.opaque += w.packed is not None
        return super().linear(x, w if w.packed is None else w.packed.inner)


@dataclass(frozen=True)
class Box:
    inner: Linear


def bench_of(backend, ops=None, model=lambda bench: None):
    bench = Bench()
    model(bench.model)
    ops = ops or ReferenceOps()
    line = compile_forward(bench.model, ops, CPU, backend=backend)
    bench.executor = TorchExecutor(bench.model, ops, bench.kv, COLUMNS, SLOTS, MAX_LEN, move=bench.move)
    return bench, line


def tokens_of(bench):
    """Two prompts in one step, then decode steps of 1, 2 and 3 rows beside a chunk."""
    prompts = [make_prompt(5 + 6 * slot, slot) for slot in range(3)]
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def step(*rows):
        result = bench.run(*rows)
        assert not result.failed
        for at, row in enumerate(rows):
            got[row.slot].append(int(result.tokens[at, 0]))

    for slot in range(3):
        bench.admit(slot, prompts[slot], seed=slot, temperature=0.7 * (slot == 1))
    step(Row(0, 0, prompts[0], 1), Row(1, 0, prompts[1], 1))
    step(Row(0, len(prompts[0]), None, 1))
    step(Row(0, len(prompts[0]) + 1, None, 1), Row(2, 0, prompts[2], 1))
    for at in range(3):
        step(*(Row(slot, len(prompts[slot]) + at + 2 * (slot == 0), None, 1) for slot in range(3)))
    return got


@pytest.fixture(scope="module")
def plain():
    return tokens_of(Bench())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_tokens_stay_and_two_programs_serve_every_step(plain, backend):
    torch._dynamo.reset()
    counters.clear()
    bench, line = bench_of(backend)
    assert f"torch.compile ({backend})" in line
    assert counters["stats"]["unique_graphs"] == 2
    assert tokens_of(bench) == plain
    assert counters["stats"]["unique_graphs"] == 2


def test_packed_weights_and_another_model_have_programs_of_their_own(plain):
    def pack(model):
        model.gate_up = [replace(w, packed=Box(w)) for w in model.gate_up]

    ops = PackingOps()
    for bench in (bench_of("eager", ops, pack)[0], bench_of("eager")[0]):
        assert tokens_of(bench) == plain
    assert ops.opaque == 2 * 6 + 2 * 2  # two layers, in every step and in both rehearsals


def test_no_compiler_is_told():
    missing = torch._inductor.config.patch("cpp.cxx", (None, "no-such-compiler"))
    with missing, pytest.raises(ConfigError, match="no C\\+\\+ compiler"):
        compile_forward(Registered(), ReferenceOps(), CPU)


class Registered:
    """A user's model: one layer, and whatever `odd` does to its batch."""

    vocab_size, max_context, dtype = 32, 64, torch.float32
    attention = (AttentionSpec(0, 0, 2, 1, 8, 0.35),)

    def __init__(self, odd=lambda batch: None):
        g = torch.Generator().manual_seed(0)
        self.table, self.qkv = torch.randn(32, 16, generator=g), Linear(torch.randn(32, 16, generator=g))
        self.odd = odd

    def forward(self, ops, batch):
        self.odd(batch)
        x = ops.embed(self.table, batch.ids)
        q, k, v = (part.view(len(x), -1, 8) for part in ops.split(ops.linear(x, self.qkv), (16, 8, 8)))
        return ops.add(ops.attention(q, k, v, self.attention[0], batch), x)

    def logits(self, ops, hidden):
        return ops.logits(hidden, Linear(self.table))


@pytest.mark.parametrize(
    ("odd", "reason"),
    [(lambda batch: batch.host_counts[0], "host_counts"), (lambda batch: 1 if batch.ids.sum() > 3 else 2, "branching")],
    ids=["host columns", "values"],
)
def test_a_forward_that_cannot_be_compiled_is_refused_and_left_as_it_was(odd, reason):
    model = Registered(odd)
    with pytest.raises(ConfigError, match=rf"cannot be compiled: .*{reason}"):
        compile_forward(model, ReferenceOps(), CPU, backend="eager")
    assert "forward" not in vars(model)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_users_model_is_compiled_as_it_stands(backend):
    model = Registered()
    plain, _ = model.forward, compile_forward(model, ops := ReferenceOps(), CPU, backend=backend)
    for rows in ([(0, 0, 5)], [(0, 0, 1)], [(0, 0, 3), (1, 0, 4)]):
        batches = [make_batch(Pages([6, 6], model.attention[0], torch.float32, page_tokens=4, seed=0), rows)] * 2
        torch.testing.assert_close(model.forward(ops, batches[0]), plain(ReferenceOps(), batches[1]))
