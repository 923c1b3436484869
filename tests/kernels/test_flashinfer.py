"""FlashInfer without a GPU: what its wrappers are told is right, and every call fits the package's signatures.

Owns: a stand-in for the package that attends in plain torch from what plans say; signatures read from its source.
Does not know: its kernels.
Invariants: the contract is checked against the installed source by parsing it: importing it needs CUDA libraries.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from aengine.config import DeviceConfig
from aengine.errors import ConfigError
from aengine.kernels import cuda_ops as choice
from aengine.kernels.cuda_ops import cuda_ops, importable
from aengine.kernels.flashinfer import FlashInferOps, rows_of
from aengine.kernels.ops import AttentionSpec, LayerKV, RopeTable, StepBatch
from aengine.kernels.reference import ReferenceOps

PAGE, COLUMNS, CPU = 4, 12, torch.device("cpu")


class Wrapper:
    """Attends over the pages that the plan names, row by row."""

    calls: ClassVar[list[tuple[str, str, dict]]] = []

    def __init__(self, **given):
        self._note("__init__", given)
        self.graph = given.get("use_cuda_graph", False)
        self.buffers = {name: given[name] for name in given if name.endswith("_buffer") and name.startswith("paged")}

    def _note(self, method, given):
        Wrapper.calls.append((type(self).__name__, method, given))

    def reset_workspace_buffer(self, **given):
        self._note("reset_workspace_buffer", given)

    def plan(self, **given):
        self._note("plan", given)
        self.told = dict(given)
        if self.graph:
            indptr, indices, last = (
                self.buffers[f"paged_kv_{n}_buffer"] for n in ("indptr", "indices", "last_page_len")
            )
            indptr.copy_(given["indptr"])
            last.copy_(given["last_page_len"])
            indices[: len(given["indices"])] = given["indices"]
            self.told |= {"indptr": indptr, "indices": indices, "last_page_len": last}

    def run(self, q, paged_kv_cache):
        self._note("run", {"q": q, "paged_kv_cache": paged_kv_cache})
        told = {name.removeprefix("paged_kv_"): value for name, value in self.told.items()}
        offsets = told.get("qo_indptr", torch.arange(len(q) + 1))
        page, out = told["page_size"], torch.empty_like(q)
        for row in range(len(told["last_page_len"])):
            used = told["indices"][told["indptr"][row] : told["indptr"][row + 1]].long()
            length = (len(used) - 1) * page + int(told["last_page_len"][row])
            k, v = (part[used].flatten(0, 1)[:length].float() for part in paged_kv_cache)
            span = slice(int(offsets[row]), int(offsets[row + 1]))
            count = span.stop - span.start
            at = torch.arange(length - count, length)[:, None]
            seen = torch.arange(length) <= at
            if told["window_left"] >= 0:
                seen &= torch.arange(length) >= at - told["window_left"]
            group = told["num_qo_heads"] // told["num_kv_heads"]
            scores = torch.einsum("qhd,khd->hqk", q[span].float(), k.repeat_interleave(group, 1)) * told["sm_scale"]
            if told["logits_soft_cap"]:
                scores = (scores / told["logits_soft_cap"]).tanh() * told["logits_soft_cap"]
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[span] = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).to(q.dtype)
        return out


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    pass


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    pass


class Library:
    BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper


def made(capturing=lambda: False):
    return FlashInferOps(ReferenceOps(), CPU, library=Library, capturing=capturing)


def world(starts, counts, spec, seed=0):
    """Two equal worlds: pages with gaps that hold NaN where nothing was written, shuffled tables."""
    g = torch.Generator().manual_seed(seed)
    rows, count = len(starts), sum(counts)
    order = (torch.randperm(rows * COLUMNS, generator=g) + 1).int().view(rows, COLUMNS)
    batches = []
    for _ in range(2):
        flat = torch.full((rows * COLUMNS + 1, 2 * PAGE * spec.kv_heads * spec.head_dim + 16), float("nan")).bfloat16()
        k, v = (
            flat[:, at : at + PAGE * spec.kv_heads * spec.head_dim].view(-1, PAGE, spec.kv_heads, spec.head_dim)
            for at in (0, PAGE * spec.kv_heads * spec.head_dim)
        )
        pg = torch.Generator().manual_seed(seed + 1)
        for row, start in enumerate(starts):
            for position in range(start):
                for part in (k, v):
                    value = torch.randn(spec.kv_heads, spec.head_dim, generator=pg)
                    if not spec.window or position // PAGE >= (start - spec.window + 1) // PAGE:  # whole pages
                        part[order[row, position // PAGE], position % PAGE] = value.bfloat16()
        offsets = torch.tensor([0, *counts]).cumsum(0).int()
        positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]).int()
        context = torch.tensor(starts) + torch.tensor(counts)
        batches.append(
            StepBatch(
                torch.zeros(count, dtype=torch.int32),
                positions,
                offsets,
                context.int(),
                (order,),
                (LayerKV(k, v),),
                int(context.max()),
                tuple(counts),
                tuple(starts),
            )
        )
    qkv = [
        torch.randn(count, h, spec.head_dim, generator=g).bfloat16() for h in (spec.heads, spec.kv_heads, spec.kv_heads)
    ]
    return batches, qkv


SHAPES = [((0, 5, 17), (1, 1, 1)), ((0, 3, 12, 30), (7, 1, 9, 2)), ((15, 16, 47), (1, 1, 1))]


@pytest.mark.parametrize(("starts", "counts"), SHAPES)
@pytest.mark.parametrize(("window", "softcap", "heads"), [(0, 0.0, 8), (6, 0.0, 2), (0, 5.0, 2)])
def test_what_plans_say_gives_the_references_attention(starts, counts, window, softcap, heads):
    spec = AttentionSpec(0, 0, heads, 2, 64, 0.125, window=window, softcap=softcap)
    (mine, theirs), (q, k, v) = world(starts, counts, spec)
    got, want = made().attention(q, k, v, spec, mine), ReferenceOps().attention(q, k, v, spec, theirs)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(mine.kv[0].k, theirs.kv[0].k, equal_nan=True)


def test_captured_plans_use_fixed_buffers_and_the_true_lengths():
    spec = AttentionSpec(0, 0, 4, 2, 64, 0.125)
    recording = [False]
    ops = made(lambda: recording[0])
    (mine, theirs), (q, k, v) = world((3, 9, 21), (1, 1, 1), spec)
    ops.attention(q, k, v, spec, mine)
    ops.plan_captured(mine)
    recording[0] = True
    got = ops.attention(q, k, v, spec, mine)
    torch.testing.assert_close(got, ReferenceOps().attention(q, k, v, spec, theirs), atol=2e-2, rtol=2e-2)
    wrapper = ops._captured[3, next(iter(ops._int_workspaces))]
    ops.plan_captured(mine)
    assert ops._captured[3, next(iter(ops._int_workspaces))] is wrapper
    assert wrapper.told["indptr"].tolist() == [0, 1, 4, 10]


def test_pages_of_fp8_and_rotation_within():
    """Over a backend that rotates and writes in one call, that call; over another its rotation and plain writes."""
    spec = AttentionSpec(0, 0, 4, 2, 64, 0.125)
    angles = torch.rand(64, 32) * 6
    rope, stored = RopeTable(angles.cos(), angles.sin()), []

    class Storing(ReferenceOps):
        def rotate_and_store(self, q, k, v, spec, batch, rope):
            stored.append(spec.layer)
            self.attention(q, k, v, spec, batch, rope=rope)
            return self.rope(q, batch.positions, rope)

    for base in (ReferenceOps(), Storing()):
        batches, (q, k, v) = world((3, 9), (1, 2), spec)
        mine, theirs = (
            replace(one, kv=(LayerKV(*(part.to(torch.float8_e4m3fn) for part in (one.kv[0].k, one.kv[0].v))),))
            for one in batches
        )
        ops = FlashInferOps(base, CPU, library=Library, capturing=lambda: False)
        got, want = ops.attention(q, k, v, spec, mine, rope=rope), base.attention(q, k, v, spec, theirs, rope=rope)
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
        told = next(given for _, method, given in reversed(Wrapper.calls) if method == "plan")
        assert (told["kv_data_type"], told["q_data_type"]) == (torch.float8_e4m3fn, torch.bfloat16)
        torch.testing.assert_close(mine.kv[0].k.float(), theirs.kv[0].k.float(), equal_nan=True)
    assert stored == [0]


def test_what_it_cannot_do_goes_to_the_other_backend():
    spec = AttentionSpec(0, 0, 4, 2, 64, 0.125, chunk=8)
    (mine, theirs), (q, k, v) = world((3, 9), (1, 2), spec)
    before = len(Wrapper.calls)
    got = made().attention(q, k, v, spec, mine)
    assert len(Wrapper.calls) == before
    assert torch.equal(got, ReferenceOps().attention(q, k, v, spec, theirs))


def test_rows_of_windows():
    rows = rows_of((0, 15, 36), (1, 1, 1), 16, 8, 3)
    assert rows.indptr.tolist() == [0, 1, 2, 4]
    assert rows.last_page_len.tolist() == [1, 16, 5]
    assert rows.first_page.tolist() == [0, 0, 1]
    assert rows_of((48,), (1,), 16, 0, 3).indptr.tolist() == [0, 3]  # never beyond the table


# ---- the contract


def signature(tree: ast.Module, owner: str, method: str) -> inspect.Signature:
    """Of the last definition of a method: those before it are typing overloads."""
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner).body
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == method][-1]
    given = found.args
    kinds = inspect.Parameter
    positional = [*given.posonlyargs, *given.args]
    first_default = len(positional) - len(given.defaults)
    parameters = [
        kinds(a.arg, kinds.POSITIONAL_OR_KEYWORD, default=None if i >= first_default else kinds.empty)
        for i, a in enumerate(positional)
    ]
    if given.vararg:
        parameters.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    parameters += [
        kinds(a.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
        for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        parameters.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


@pytest.fixture(scope="module")
def package() -> Path:
    spec = find_spec("flashinfer")
    assert spec is not None, "flashinfer-python is not installed (requirements-source.lock)"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def test_every_call_fits_the_packages_signatures(package):
    Wrapper.calls.clear()
    spec = AttentionSpec(0, 0, 4, 2, 64, 0.125)
    recording = [False]
    ops = made(lambda: recording[0])
    for starts, counts in SHAPES:
        (batch, _), (q, k, v) = world(starts, counts, spec)
        ops.attention(q, k, v, spec, batch)
    ops.plan_captured(batch)
    recording[0] = True
    ops.attention(q, k, v, spec, batch)
    made_calls = {(owner, method) for owner, method, _ in Wrapper.calls}
    assert len(made_calls) == 8  # four methods of two wrappers
    files = {"BatchDecodeWithPagedKVCacheWrapper": "decode.py", "BatchPrefillWithPagedKVCacheWrapper": "prefill.py"}
    trees = {owner: ast.parse((package / name).read_text(encoding="utf-8")) for owner, name in files.items()}
    for owner, method, given in Wrapper.calls:
        found = signature(trees[owner], owner, method)
        assert not any(p.kind is p.VAR_KEYWORD for p in found.parameters.values()), f"{owner}.{method} hides its names"
        found.bind(None, **given)
        with pytest.raises(TypeError):
            found.bind(None, **given, page_sise=4)
    for owner, tree in trees.items():
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert "_pin_memory_int_workspace_buffer" in names, f"{owner} keeps its pinned workspace elsewhere"


# ---- the choice


def test_auto_takes_the_best_there_is_and_says_so(monkeypatch):
    absent = {"triton": "no module t", "flashinfer": "no module f"}
    ops, line = cuda_ops("auto", CPU, absent.__getitem__)
    assert isinstance(ops, ReferenceOps)
    assert "no Triton (no module t), no FlashInfer (no module f)" in line
    assert cuda_ops("reference", CPU, lambda package: "")[1] == "kernels: plain torch, as asked"
    monkeypatch.setattr(choice, "_triton_ops", lambda device: "triton ops")
    ops, line = cuda_ops("auto", CPU, {"triton": "", "flashinfer": "no module f"}.__getitem__)
    assert (ops, line) == ("triton ops", "kernels: Triton; no FlashInfer (no module f)")
    assert cuda_ops("triton", CPU, lambda package: "") == ("triton ops", "kernels: Triton")
    monkeypatch.setattr(choice, "FlashInferOps", lambda base, device: base)
    told = cuda_ops("auto", CPU, lambda package: "")
    assert told == ("triton ops", "kernels: FlashInfer's attention, the others Triton")
    ops, line = cuda_ops("flashinfer", CPU, {"triton": "no module t", "flashinfer": ""}.__getitem__)
    assert line == "kernels: FlashInfer's attention, the others plain torch (no module t)"


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_a_backend_that_cannot_be_used_is_refused(backend):
    with pytest.raises(
        ConfigError, match=f"attention_backend is {backend}, but it cannot be used: ModuleNotFoundError"
    ):
        cuda_ops(backend, CPU, lambda package: importable("no_such_" + package))


def test_an_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="not one of auto, flashinfer, triton, reference"):
        DeviceConfig(attention_backend="magic")  # type: ignore[arg-type]
