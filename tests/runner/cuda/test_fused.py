"""The fused kernel's columns, and an executor that chooses by it. The kernel itself is tested with its backend."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch

from aengine.runner.cuda.fused import SAMPLING, FusedChooser
from tests.runner.cuda.test_step import CudaBench, Row


@dataclass(frozen=True)
class Columns:
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    floor: torch.Tensor
    seed: torch.Tensor


def library(calls):
    def slot_parameters(slots, device):
        kinds = (torch.float32, torch.int32, torch.float64, torch.float32, torch.int64)
        return Columns(*(torch.zeros(slots, dtype=kind) for kind in kinds))

    def sample(logits, slots, positions, parameters, rules=None, faults=None):
        """The best token, of random slots the worst one; fault 6 in slot 3."""
        calls.append((slots, positions, parameters))
        faults.copy_(torch.where(slots == 3, 6, 0))
        greedy = parameters.temperature.index_select(0, slots) == 0.0
        return torch.where(greedy, logits.argmax(-1), logits.argmin(-1)).int()

    return SimpleNamespace(slot_parameters=slot_parameters, sample=sample, min_p_floor=lambda min_p: -2.0 * min_p)


def test_the_stand_in_has_the_signatures_of_the_backends_sampling():
    """Read from its source: importing it needs Triton."""
    tree = ast.parse(Path(find_spec(SAMPLING).origin).read_text(encoding="utf-8"))
    real = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stand_in = library([])
    for name in ("sample", "slot_parameters", "min_p_floor"):
        assert [one.arg for one in real[name].args.args] == list(inspect.signature(getattr(stand_in, name)).parameters)
    columns = [node.target.id for node in real["SlotParameters"].body if isinstance(node, ast.AnnAssign)]
    assert columns == [one.name for one in fields(Columns)]


def test_an_executor_chooses_by_the_kernel():
    calls = []
    bench = CudaBench(chooser=partial(FusedChooser, library=library(calls)))
    bench.admit(0, [1, 2, 3])
    bench.admit(2, [4], temperature=0.5, top_k=7, top_p=0.9, min_p=0.25, seed=-1)
    bench.admit(3, [5])
    result = bench.run(Row(0, 0, [1, 2, 3], 1), Row(2, 0, [4], 1), Row(3, 0, [5], 1))
    logits = bench.model.dense_logits([4])[-1]
    assert result.tokens[:, 0].tolist() == [*bench.model.dense_greedy([1, 2, 3], 1), int(logits.argmin()), 0]
    assert result.failed == {2: "all tokens are masked: the model's logits are minus infinity everywhere"}
    slots, positions, columns = calls[0]
    assert (slots.tolist(), positions.tolist()) == ([0, 2, 3], [3, 1, 1])
    assert [float(c[2]) for c in (columns.temperature, columns.top_k, columns.top_p, columns.floor)] == [
        0.5,
        7,
        0.9,
        -0.5,
    ]
    assert int(columns.seed[2]) == -1
