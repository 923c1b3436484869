"""Short convolutions, mixtures and the small row operations against plain torch, alone and together."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from aengine.errors import NotSupported
from aengine.kernels.native import NativeOps
from aengine.kernels.ops import Experts, LayerState, Linear, StatePart, StateSpec, StepBatch
from aengine.kernels.reference import ReferenceOps

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_operations_equal_torch_bit_for_bit(ops: NativeOps, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference = ReferenceOps()
    wide = torch.randn(70, 3 * 43).to(dtype)
    first, _, third = wide.split(43, dim=-1)
    assert torch.equal(ops.mul(first, third), first * third)
    q, positions, factors = wide.unflatten(1, (3, 43)), torch.arange(70, dtype=torch.int32) * 2, torch.rand(140)
    assert torch.equal(ops.scale_positions(q, positions, factors), reference.scale_positions(q, positions, factors))
    index = torch.tensor([3, 1, 69])
    assert torch.equal(ops.take(third, index), third[index])
    assert torch.equal(ops.put(wide, index, wide[:3]), wide.index_copy(0, index, wide[:3]))


def conv_batch(rows: list[int], pages: Tensor, tables: Tensor) -> StepBatch:
    offsets = torch.tensor([0, *accumulate(rows)], dtype=torch.int32)
    empty = torch.zeros(sum(rows), dtype=torch.int32)
    return StepBatch(
        ids=empty, positions=empty, row_offsets=offsets, context=torch.zeros(len(rows), dtype=torch.int32),
        tables=(tables,), kv=(), max_context=0, host_counts=tuple(rows), host_starts=(0,) * len(rows),
        states=(LayerState((pages,)),),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("rows", [[1], [1] * 6, [3, 1, 5, 2], [40]], ids=str)
def test_short_convolutions_equal_the_reference_bit_for_bit(
    ops: NativeOps, dtype: torch.dtype, taps: int, rows: list[int]
) -> None:
    """Rows read pages that others write."""
    torch.manual_seed(taps)
    dim, spec = 150, StateSpec(0, 0, (StatePart("inputs", (taps - 1, 150), dtype),))
    pages = torch.randn(9, taps - 1, dim).to(dtype)
    other = pages.clone()
    order = torch.randperm(8, dtype=torch.int32)[: len(rows)] + 1
    tables = torch.stack((order.roll(1), order), 1).contiguous()
    x, weight = torch.randn(sum(rows), dim).to(dtype), torch.randn(taps, dim)
    for bias in (None, torch.randn(dim)):
        got = ops.short_conv(x, weight, bias, spec, conv_batch(rows, pages, tables))
        want = ReferenceOps().short_conv(x, weight, bias, spec, conv_batch(rows, other, tables))
        assert torch.equal(got, want)
        assert torch.equal(pages, other)


def make_experts(dtype: torch.dtype, bias: bool, **settings: object) -> Experts:
    def linears(out: int, size: int) -> tuple[Linear, ...]:
        made = [torch.randn(out, size).to(dtype) / size**0.5 for _ in range(5)]
        return tuple(Linear(weight, torch.randn(out).to(dtype) if bias else None) for weight in made)

    return Experts(linears(44, 30), linears(30, 22), **settings)  # type: ignore[arg-type]


def prepared(ops: NativeOps, experts: Experts) -> Experts:
    gate_up, down = (tuple(ops.prepare(w) for w in part) for part in (experts.gate_up, experts.down))
    names = ("top_k", "scoring", "weigh", "activation", "alpha", "limit")
    return Experts(gate_up, down, **{name: getattr(experts, name) for name in names})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "clamped"])
@pytest.mark.parametrize(
    ("scoring", "weigh", "top_k"), [("softmax", "output", 2), ("sigmoid", "input", 1), ("softmax", "input", 5)]
)
def test_mixtures_equal_the_reference_and_rows_are_alone(
    ops: NativeOps, dtype: torch.dtype, activation: str, scoring: str, weigh: str, top_k: int
) -> None:
    torch.manual_seed(top_k)
    for bias in (False, True):
        plain = make_experts(dtype, bias, top_k=top_k, scoring=scoring, weigh=weigh, activation=activation, limit=0.8)
        native = prepared(ops, plain)
        x = torch.randn(70, 30).to(dtype)
        scores = torch.stack([torch.randperm(5) for _ in range(70)]).to(dtype) * 0.7  # distinct: no ties to break
        got, want = ops.mixture(x, scores, native), ReferenceOps().mixture(x, scores, plain)
        assert got.dtype is dtype
        tolerance = 1e-4 if dtype is torch.float32 else 0.05
        torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)
        for row in (0, 7, 69):
            assert torch.equal(ops.mixture(x[row : row + 1], scores[row : row + 1], native)[0], got[row])
        assert torch.equal(ops.mixture(x[20:50], scores[20:50], native), got[20:50])


def test_of_equal_scores_the_lower_expert_is_chosen(ops: NativeOps) -> None:
    plain = make_experts(torch.float32, False, top_k=1, scoring="softmax", weigh="output")
    x = torch.randn(1, 30)
    native = prepared(ops, plain)
    tied = ops.mixture(x, torch.tensor([[0.0, 1.0, 0.5, 1.0, 1.0]]), native)
    assert torch.equal(tied, ops.mixture(x, torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]]), native))


def test_more_chosen_than_there_are_is_refused(ops: NativeOps) -> None:
    experts = prepared(ops, make_experts(torch.float32, False, top_k=6, scoring="softmax", weigh="output"))
    with pytest.raises(NotSupported, match="5 experts cannot choose 6"):
        ops.mixture(torch.randn(1, 30), torch.randn(1, 5), experts)
