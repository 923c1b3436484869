"""Argmax, log-sum-exp and Gumbel draws against torch and the engine's definition of the noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aengine.kernels.native import NativeOps
from aengine.kernels.native.sampling import NativeSampling
from aengine.runner.noise import TokenNoise, make_keys

VOCABS = [1, 3, 17, 576, 49152]


@pytest.fixture
def sampling(ops: NativeOps) -> NativeSampling:
    return NativeSampling(ops.context)


@pytest.mark.parametrize("vocab", VOCABS)
def test_argmax_and_log_sum_exp(sampling: NativeSampling, vocab: int) -> None:
    logits = torch.randn(9, vocab + 5)[:, :vocab] * 8
    best, lse = sampling.log_sum_exp(logits)
    assert best.tolist() == logits.argmax(1).tolist()
    assert sampling.argmax(logits).tolist() == best.tolist()
    torch.testing.assert_close(lse.double(), logits.double().logsumexp(1), rtol=2e-6, atol=2e-6)
    for row in range(9):
        assert torch.equal(sampling.log_sum_exp(logits[row : row + 1])[1], lse[row : row + 1])


def test_argmax_takes_the_first_of_equals(sampling: NativeSampling) -> None:
    logits = torch.zeros(4, 100)
    logits[1, [40, 70]] = 3.0
    logits[2, [99, 97]] = 3.0
    logits[3] = float("-inf")
    logits[3, 5] = -1e30
    assert sampling.argmax(logits).tolist() == [0, 40, 97, 5]


def test_masked_and_nan_rows(sampling: NativeSampling) -> None:
    logits = torch.randn(2, 50)
    logits[0, ::2] = float("-inf")
    logits[1, 7] = float("nan")
    lse = sampling.log_sum_exp(logits)[1]
    torch.testing.assert_close(lse[0], logits[0].logsumexp(0))
    assert lse[1].isnan()


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 5.0])
def test_draws_follow_the_definition(sampling: NativeSampling, vocab: int, temperature: float) -> None:
    rows = 40
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits[:, vocab // 2 + 1 :: 5] = float("-inf")
    keys = make_keys(np.arange(rows, dtype=np.uint64), np.arange(rows, dtype=np.int64) * 7)
    best = sampling.argmax(logits)
    tokens = sampling.choose(logits, best, np.full(rows, temperature, np.float32), keys.k0, keys.k1)
    noise = TokenNoise(vocab, torch.device("cpu"))
    for row in range(rows):
        expected = noise.choose(logits[row], int(best[row]), temperature, keys.k0[row], keys.k1[row])
        assert int(tokens[row]) == expected
        alone = slice(row, row + 1)
        again = sampling.choose(
            logits[alone], best[alone], np.full(1, temperature, np.float32), keys.k0[alone], keys.k1[alone]
        )
        assert int(again[0]) == expected


def test_draws_have_the_distribution_of_the_softmax(sampling: NativeSampling) -> None:
    rows, probabilities = 20000, torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log().expand(rows, 4).contiguous()
    keys = make_keys(np.arange(rows, dtype=np.uint64), np.zeros(rows, dtype=np.int64))
    tokens = sampling.choose(logits, sampling.argmax(logits), np.ones(rows, np.float32), keys.k0, keys.k1)
    shares = torch.bincount(tokens.long(), minlength=4) / rows
    assert (shares - probabilities).abs().max() < 0.015  # 4 standard deviations


def test_wrong_logits_are_refused(sampling: NativeSampling) -> None:
    with pytest.raises(ValueError, match="float32"):
        sampling.argmax(torch.randn(2, 3, dtype=torch.float64))
