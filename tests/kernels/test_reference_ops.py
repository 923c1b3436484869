"""The reference backend's ops against their formulas in fp64.

Owns: every op but attention.
Does not know: models.
Invariants: fp32 results are within rounding of fp64, bf16 results within one rounding of the fp32 ones.
"""

from __future__ import annotations

import math

import pytest
import torch

from aengine.kernels.ops import Linear, Ops, RopeTable
from aengine.kernels.reference import ReferenceOps

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def ops() -> Ops:
    return ReferenceOps()


def values(*shape, seed=0, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def near(actual, expected, dtype):
    assert actual.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


def test_embed_takes_rows_by_int32_ids(ops):
    table = values(11, 4)
    assert torch.equal(ops.embed(table, torch.tensor([3, 0, 10], dtype=torch.int32)), table[[3, 0, 10]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(ops, dtype):
    x, weight = values(5, 16, dtype=dtype, scale=3.0), values(16, seed=1, dtype=dtype)
    wide = x.double()
    expected = wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    near(ops.rms_norm(x, weight, 1e-5), expected, dtype)


def test_rms_norm_of_each_head(ops):
    x, weight = values(5, 3, 8), values(8, seed=1)
    whole = ops.rms_norm(x, weight, 1e-6)
    assert torch.equal(whole[2, 1], ops.rms_norm(x[2, 1], weight, 1e-6))


def test_rms_norm_squares_in_fp32(ops):
    """1e18 squared is 1e36: fine in fp32 and bf16, far beyond fp16."""
    x = torch.full((1, 8), 1e18, dtype=torch.bfloat16)
    near(ops.rms_norm(x, torch.ones(8, dtype=torch.bfloat16), 1e-6), torch.ones(1, 8), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_returns_the_sum_it_normed(ops, dtype):
    x, residual, weight = (
        values(5, 16, dtype=dtype),
        values(5, 16, seed=2, dtype=dtype),
        values(16, seed=1, dtype=dtype),
    )
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-5))


def test_add_and_scale(ops):
    x, y = values(3, 4), values(3, 4, seed=1)
    assert torch.equal(ops.add(x, y), x + y)
    assert torch.equal(ops.scale(x, 0.5), x * 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(ops, dtype, biased):
    x, weight = values(5, 16, dtype=dtype), values(7, 16, seed=1, dtype=dtype, scale=0.2)
    bias = values(7, seed=2, dtype=dtype) if biased else None
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    prepared = ops.prepare(Linear(weight, bias))
    assert prepared.out_features == 7
    near(ops.linear(x, prepared), expected, dtype)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("vocab", [7, 2048, 5000])
def test_logits_of_bf16_are_not_rounded_to_bf16(ops, vocab, biased):
    x, weight = values(3, 32, dtype=torch.bfloat16), values(vocab, 32, seed=1, dtype=torch.bfloat16)
    bias = values(vocab, seed=2, dtype=torch.bfloat16) if biased else None
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    near(ops.logits(x, Linear(weight, bias)), expected, torch.float32)


def test_logits_of_fp32_are_the_linear(ops):
    x, weight = values(3, 32), Linear(values(40, 32, seed=1), values(40, seed=2))
    assert torch.equal(ops.logits(x, weight), ops.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [8, 4])
def test_rope_turns_pairs_half_a_head_apart(ops, dtype, rotary):
    x, positions = values(3, 2, 8, dtype=dtype), torch.tensor([0, 5, 19], dtype=torch.int32)
    frequency = 100.0 ** -(torch.arange(rotary // 2) / (rotary / 2))
    angle = torch.arange(20)[:, None] * frequency
    out = ops.rope(x, positions, RopeTable(angle.cos(), angle.sin()))
    expected = x.double().clone()
    for token, position in enumerate(positions.tolist()):
        for i in range(rotary // 2):
            turn = complex(math.cos(position * frequency[i]), math.sin(position * frequency[i]))
            for head in range(2):
                pair = complex(x[token, head, i], x[token, head, i + rotary // 2]) * turn
                expected[token, head, i], expected[token, head, i + rotary // 2] = pair.real, pair.imag
    near(out, expected, dtype)
    assert torch.equal(out[0], x[0]), "position 0 is not turned"
    assert torch.equal(out[..., rotary:], x[..., rotary:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_units(ops, dtype):
    x = values(4, 12, dtype=dtype, scale=2.0)
    gate, up = x[:, :6].double(), x[:, 6:].double()
    near(ops.silu_mul(x), gate / (1 + torch.exp(-gate)) * up, dtype)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    near(ops.gelu_tanh_mul(x), 0.5 * gate * (1 + torch.tanh(inner)) * up, dtype)


def test_split_gives_views(ops):
    x = values(3, 10)
    parts = ops.split(x, (4, 1, 5))
    assert [part.shape[1] for part in parts] == [4, 1, 5]
    parts[1].zero_()
    assert (x[:, 4] == 0).all()
