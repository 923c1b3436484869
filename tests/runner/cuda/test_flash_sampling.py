"""FlashInfer draws only what it may; the others keep their tokens; its calls fit the package's signatures."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aengine.runner.cuda.flash_sampling import FlashInferChooser
from aengine.runner.cuda.sampler import INFINITE, NAN, TorchChooser
from aengine.runner.slots import SlotTable
from aengine.runner.upload import plain_upload
from aengine.types import SamplingParams, SlotSetup, TokenRules

CPU, VOCAB = torch.device("cpu"), 40
KINDS = [
    {"temperature": 0.7}, {"temperature": 0.7, "seed": 5}, {"temperature": 0.0}, {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 2.0, "top_k": 7, "top_p": 0.8}, {"temperature": 1e-9},
]  # fmt: skip


def package(calls):
    """The worst token of each row, so that it shows who drew it."""

    def sampling_from_logits(**given):
        calls.append(("sampling_from_logits", given))
        return given["logits"].argmin(-1).int()

    def top_k_top_p_sampling_from_logits(**given):
        calls.append(("top_k_top_p_sampling_from_logits", given))
        return given["logits"].argmin(-1).int()

    return SimpleNamespace(**{f.__name__: f for f in (sampling_from_logits, top_k_top_p_sampling_from_logits)})


@pytest.fixture
def world():
    """(chooser, the other one alone, calls)"""
    calls, upload = [], plain_upload(CPU)
    table = SlotTable(len(KINDS), VOCAB, 64, CPU)
    other = TorchChooser(table, VOCAB, CPU, upload)
    chooser = FlashInferChooser(len(KINDS), other, upload, package(calls))
    for slot, kind in enumerate(KINDS):
        setup = SlotSetup(slot, slot, 3, SamplingParams(**kind), TokenRules(), slot - 2, np.zeros(0, np.int32))
        table.setup(setup)
        chooser.setup(setup)
    return chooser, other, calls


def test_rows_without_seed_go_to_the_package_and_the_others_stay(world):
    chooser, other, calls = world
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    slots, positions = np.arange(6, dtype=np.int32)[::-1].copy(), np.arange(10, 16)
    tokens, faults = chooser.choose(logits.clone(), slots, positions)
    kept = np.array([2, 3, 4])  # slots 3, 2, 1
    alone, _ = other.choose(logits[kept], slots[kept], positions[kept])
    assert tokens[kept].tolist() == alone.tolist()
    drawn = [0, 1, 5]
    assert tokens[drawn].tolist()[1:] == logits[drawn].argmin(-1).tolist()[1:]
    assert not faults.any()
    name, given = calls[0]
    assert name == "top_k_top_p_sampling_from_logits"
    assert given["top_k"].tolist() == [VOCAB, 7, VOCAB]
    assert given["top_p"].tolist() == pytest.approx([1.0, 0.8, 1.0])
    assert given["seed"].tolist() == [3, 2, -2]
    assert given["offset"].tolist() == [10, 11, 15]
    assert given["logits"][1].tolist() == pytest.approx(((logits[1] - logits[1].max()) / 2.0).tolist())


def test_plain_rows_take_the_plain_kernel_and_faults_are_told(world):
    chooser, _, calls = world
    logits = torch.zeros(3, VOCAB)
    logits[0, 3], logits[1, 4] = float("nan"), float("inf")
    slots = np.array([0, 0, 0], np.int32)
    tokens, faults = chooser.choose(logits, slots, np.arange(3))
    assert [name for name, _ in calls] == ["sampling_from_logits"]
    assert faults.tolist() == [NAN, INFINITE, 0]
    assert tokens.dtype is torch.int64


def test_its_calls_fit_the_packages_signatures(world):
    chooser, _, calls = world
    for slots in ([0], [4]):
        chooser.choose(torch.zeros(1, VOCAB), np.array(slots, np.int32), np.array([3]))
    found = find_spec("flashinfer")
    assert found is not None, "flashinfer-python is not installed (requirements-source.lock)"
    tree = ast.parse((Path(found.submodule_search_locations[0]) / "sampling.py").read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, given in calls:
        names = [one.arg for one in functions[name].args.args]
        assert set(given) <= set(names), name
    assert {name for name, _ in calls} == {"sampling_from_logits", "top_k_top_p_sampling_from_logits"}
    validate = ast.unparse(functions["_validate_and_convert_seed_offset"])
    assert "[1, batch_size]" in validate, "seeds by row are not taken any more"
