"""Packed matrix products against plain torch, and their packing."""

from __future__ import annotations

import gc

import pytest
import torch

from aengine.errors import NotSupported
from aengine.kernels.native import NativeOps
from aengine.kernels.ops import Linear

SHAPES = [(1, 1), (3, 17), (17, 3), (16, 16), (31, 33), (576, 576), (96, 1536), (49152, 64)]
DTYPES = [torch.float32, torch.bfloat16]


def expected_of(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    bias = None if linear.bias is None else linear.bias.double()
    return torch.nn.functional.linear(x.double(), linear.weight.double(), bias)


@pytest.mark.parametrize("out_in", SHAPES)
@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_torch(ops: NativeOps, out_in: tuple[int, int], w_dtype: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(sum(out_in))
    out_features, in_features = out_in
    linear = Linear(torch.randn(out_in).to(w_dtype), torch.randn(out_features))
    packed = ops.prepare(linear)
    for rows in (1, 2, 5, 6, 7, 13, 70) if out_features < 10000 else (1, 3):
        x = torch.randn(rows, in_features).to(dtype)
        y, z = ops.linear(x, packed), ops.logits(x, packed)
        assert (y.dtype, z.dtype) == (dtype, torch.float32)
        expected = expected_of(x, linear)
        scale = in_features**0.5
        torch.testing.assert_close(z.double(), expected, rtol=1e-5, atol=2e-6 * scale)
        assert torch.equal(y, z.to(dtype))


def test_no_rows(ops: NativeOps) -> None:
    packed = ops.prepare(Linear(torch.randn(40, 24)))
    assert ops.linear(torch.empty(0, 24), packed).shape == (0, 40)


def test_strided_input_rows(ops: NativeOps) -> None:
    linear = Linear(torch.randn(40, 24))
    x = torch.randn(9, 100)[::2, 30:54]
    torch.testing.assert_close(
        ops.linear(x, ops.prepare(linear)).double(), expected_of(x, linear), rtol=1e-5, atol=1e-5
    )


def test_transposed_and_half_weights_are_accepted(ops: NativeOps) -> None:
    weight = torch.randn(24, 40).to(torch.float16)
    x = torch.randn(4, 24)
    y = ops.linear(x, ops.prepare(Linear(weight.t())))
    torch.testing.assert_close(y.double(), x.double() @ weight.double(), rtol=1e-5, atol=1e-5)


def test_prepare_drops_the_weight_and_keeps_its_shape(ops: NativeOps) -> None:
    packed = ops.prepare(Linear(torch.randn(40, 24)))
    assert packed.weight.is_meta
    assert packed.out_features == 40
    assert ops.prepare(packed) is packed


def test_packed_memory_outlives_the_other_weights_of_its_chunk(ops: NativeOps) -> None:
    weight, x = torch.randn(576, 576), torch.randn(1, 576)
    kept = ops.prepare(Linear(weight))
    for _ in range(40):  # 53 MB: more than a chunk
        ops.prepare(Linear(torch.randn(576, 576)))
    gc.collect()
    torch.testing.assert_close(ops.linear(x, kept), x @ weight.t(), rtol=1e-4, atol=1e-4)


def test_unprepared_weight_is_refused(ops: NativeOps) -> None:
    with pytest.raises(TypeError, match="prepare"):
        ops.linear(torch.randn(1, 4), Linear(torch.randn(4, 4)))


def test_wrong_width_names_both(ops: NativeOps) -> None:
    packed = ops.prepare(Linear(torch.randn(4, 8)))
    with pytest.raises(ValueError, match=r"x has 9 features, the weight takes 8"):
        ops.linear(torch.randn(1, 9), packed)


def test_other_dtypes_are_refused(ops: NativeOps) -> None:
    packed = ops.prepare(Linear(torch.randn(4, 8)))
    with pytest.raises(NotSupported, match="float64"):
        ops.linear(torch.randn(1, 8, dtype=torch.float64), packed)


def test_nan_stays_in_its_row(ops: NativeOps) -> None:
    packed = ops.prepare(Linear(torch.randn(33, 8)))
    x = torch.randn(7, 8)
    x[3, 2] = float("nan")
    y = ops.linear(x, packed)
    assert y.isnan().any(1).tolist() == [row == 3 for row in range(7)]


@pytest.mark.parametrize("w_dtype", DTYPES)
def test_rows_of_a_packed_weight_are_its_embedding(ops: NativeOps, w_dtype: torch.dtype) -> None:
    weight = torch.randn(45, 24).to(w_dtype)
    ids = torch.tensor([0, 44, 7, 7, 16, 15, 31], dtype=torch.int32)
    assert torch.equal(ops.embed(ops.prepare(Linear(weight)), ids), weight[ids.long()])
