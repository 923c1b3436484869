"""Norms, activations, rotary embedding, sums and gathers against plain torch in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.native import NativeOps
from aengine.kernels.ops import Linear, RopeTable

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 3, 8, 17, 64, 576, 1536]
ROWS = [1, 2, 7, 70]


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 2e-6 if actual.dtype is torch.float32 else 8e-3
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", DTYPES)
def test_rms_norm(ops: NativeOps, dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    for size in SIZES:
        weight = torch.randn(size).to(w_dtype)
        for rows in ROWS:
            x = torch.randn(rows, size).to(dtype)
            close(ops.rms_norm(x, weight, 1e-5), norm(x, weight, 1e-5))


def test_rms_norm_of_strided_heads(ops: NativeOps) -> None:
    qkv, weight = torch.randn(7, 5 * 24), torch.randn(24)
    heads = qkv[:, 24:96].unflatten(1, (3, 24))
    close(ops.rms_norm(heads, weight, 1e-6), norm(heads, weight, 1e-6))
    four = torch.randn(2, 3, 4, 24)
    close(ops.rms_norm(four, weight, 1e-6), norm(four, weight, 1e-6))
    one = torch.randn(24)
    close(ops.rms_norm(one, weight, 1e-6), norm(one, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_is_add_then_rms_norm(ops: NativeOps, dtype: torch.dtype) -> None:
    for size in SIZES:
        x, residual, weight = torch.randn(7, size).to(dtype), torch.randn(7, size).to(dtype), torch.randn(size)
        out, total = ops.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, x + residual)
        assert torch.equal(out, ops.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(ops: NativeOps, dtype: torch.dtype) -> None:
    for size in SIZES:
        for rows in ROWS:
            x = (torch.randn(rows, 2 * size) * 4).to(dtype)
            gate, up = x.double().chunk(2, dim=-1)
            close(ops.silu_mul(x) / 4, F.silu(gate) * up / 4)
            close(ops.gelu_tanh_mul(x) / 4, F.gelu(gate, approximate="tanh") * up / 4)


def test_activations_at_extremes(ops: NativeOps) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.5, -20.0, -1e-30, 0.0, 1e-30, 20.0, 200.0, 1e30, float("nan")])
    x = torch.cat([gate, torch.ones_like(gate)]).unsqueeze(0)
    for out, expected in (
        (ops.silu_mul(x), F.silu(gate.double())),
        (ops.gelu_tanh_mul(x), F.gelu(gate.double(), approximate="tanh")),
    ):
        torch.testing.assert_close(out[0].double(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_and_scale(ops: NativeOps, dtype: torch.dtype) -> None:
    for shape in ((1, 1), (3, 17), (70, 576)):
        x, y = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        assert torch.equal(ops.add(x, y), x + y)
        assert torch.equal(ops.scale(x, 0.37), (x.float() * torch.tensor(0.37)).to(dtype))
        assert torch.equal(ops.add(x.t(), y.t()), (x + y).t())


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(ops: NativeOps, dtype: torch.dtype) -> None:
    table = torch.randn(50, 17).to(dtype)
    ids = torch.tensor([0, 49, 3, 3], dtype=torch.int32)
    assert torch.equal(ops.embed(table, ids), table[ids.long()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (64, 32), (18, 18), (256, 256), (6, 2)])
def test_rope(ops: NativeOps, dtype: torch.dtype, head_dim: int, rotary: int) -> None:
    angles = torch.outer(torch.arange(100.0), 1e4 ** (-torch.arange(rotary // 2) / (rotary // 2)))
    table = RopeTable(angles.cos().contiguous(), angles.sin().contiguous())
    x = torch.randn(7, 5 * head_dim).to(dtype)[:, head_dim : 4 * head_dim].unflatten(1, (3, head_dim))
    positions = torch.tensor([0, 99, 5, 17, 17, 64, 1], dtype=torch.int32)
    cos, sin = (t[positions.long()].double().unsqueeze(1) for t in (table.cos, table.sin))
    a, b, rest = x.double().split([rotary // 2, rotary // 2, head_dim - rotary], dim=-1)
    close(ops.rope(x, positions, table), torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1))


def test_split_gives_views(ops: NativeOps) -> None:
    x = torch.randn(3, 10)
    parts = ops.split(x, (4, 6))
    assert [p.shape[1] for p in parts] == [4, 6]
    assert parts[1].data_ptr() == x[:, 4:].data_ptr()


def test_bfloat16_rounds_to_nearest_even(ops: NativeOps) -> None:
    bits = torch.arange(0, 2**31 - 1, 4097, dtype=torch.int64).to(torch.int32)
    wide = bits.view(torch.float32)
    wide = wide[torch.isfinite(wide)]
    # A 1 x 1 identity product stores fp32 sums as bf16 through the same path as every kernel.
    weight = ops.prepare(Linear(torch.ones(1, 1)))
    out = ops._project(wide.unsqueeze(1), weight, torch.bfloat16)
    assert torch.equal(out.squeeze(1), wide.to(torch.bfloat16))
