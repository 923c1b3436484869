"""Sampling and log-probabilities by kernels against the noise's definition and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aengine.kernels.native import NativeOps
from aengine.kernels.native.sampling import NEUTRAL, SLOT, NativeSampling
from aengine.runner.logprobs import make_logprobs
from aengine.runner.noise import TokenNoise, make_keys

VOCABS = [1, 3, 17, 576, 49152]


@pytest.fixture
def sampling(ops: NativeOps) -> NativeSampling:
    return NativeSampling(ops.context)


def slots(count: int, **columns: object) -> np.ndarray:
    table = np.zeros(count, dtype=SLOT)
    for name, value in (NEUTRAL | columns).items():
        table[name] = value
    return table


def draw(
    sampling: NativeSampling, logits: torch.Tensor, table: np.ndarray, positions: object = 0
) -> tuple[list[int], list[int]]:
    rows = len(logits)
    at = np.broadcast_to(np.asarray(positions, dtype=np.int64), rows).copy()
    tokens, faults, _ = sampling.sample(logits, table, np.arange(rows, dtype=np.int32), at, -1)
    return tokens.tolist(), faults.tolist()


def test_the_first_of_equals_wins(sampling: NativeSampling) -> None:
    logits = torch.zeros(4, 100)
    logits[1, [40, 70]] = 3.0
    logits[2, [99, 97]] = 3.0
    logits[3] = float("-inf")
    logits[3, 5] = -1e30
    assert draw(sampling, logits, slots(4)) == ([0, 40, 97, 5], [0] * 4)


@pytest.mark.parametrize("at", [0, 3, 36])
def test_rows_without_a_best_token_tell_why(sampling: NativeSampling, at: int) -> None:
    logits = torch.randn(4, 37)
    logits[0, at] = float("nan")
    logits[1, at] = float("inf")
    logits[2] = float("-inf")
    tokens, faults = draw(sampling, logits, slots(4))
    assert faults == [4, 5, 6, 0]
    assert tokens == [0, 0, 0, int(logits[3].argmax())]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_draws_follow_the_definition(sampling: NativeSampling, vocab: int, temperature: float) -> None:
    rows = 20
    logits = torch.randn(rows, vocab + 5, generator=torch.Generator().manual_seed(vocab))[:, :vocab] * 3
    logits[:, vocab // 2 + 1 :: 5] = float("-inf")
    seeds, positions = np.arange(rows, dtype=np.uint64), np.arange(rows, dtype=np.int64) * 7
    keys = make_keys(seeds, positions)
    table = slots(rows, temperature=temperature, seed=seeds)
    tokens, _ = draw(sampling, logits, table, positions)
    noise = TokenNoise(vocab, torch.device("cpu"))
    best = logits.argmax(1)
    for row in range(rows):
        expected = noise.choose(logits[row], int(best[row]), temperature, keys.k0[row], keys.k1[row])
        assert tokens[row] == expected
        alone = slice(row, row + 1)
        assert draw(sampling, logits[alone], table[alone], positions[alone])[0] == [expected]


def test_draws_have_the_distribution_of_the_softmax(sampling: NativeSampling) -> None:
    rows, probabilities = 20000, torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log().expand(rows, 4).contiguous()
    tokens, _ = draw(sampling, logits, slots(rows, temperature=1.0, seed=np.arange(rows)))
    shares = torch.bincount(torch.tensor(tokens), minlength=4) / rows
    assert (shares - probabilities).abs().max() < 0.015  # 4 standard deviations


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("k", [0, 1, 20])
def test_logprobs_equal_log_softmax(sampling: NativeSampling, vocab: int, k: int) -> None:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(k)) * 8
    logits[1] = (logits[1] / 8).round()  # ties
    logits[2, ::2] = float("-inf")
    targets = np.array([0, vocab // 2, vocab - 1, 0, vocab // 3], dtype=np.int32)
    made = sampling.logprobs(logits, targets, k)
    want = make_logprobs(logits, torch.from_numpy(targets).long(), k)
    assert np.array_equal(made.ids, want.ids)
    assert np.array_equal(made.ranks, want.ranks)
    assert np.allclose(made.values, want.values, rtol=1e-6, atol=1e-5, equal_nan=True)
    for row in range(5):
        alone = sampling.logprobs(logits[row : row + 1], targets[row : row + 1], k)
        assert np.array_equal(alone.values[0], made.values[row], equal_nan=True)


def test_logprobs_of_a_row_with_nan_are_nan(sampling: NativeSampling) -> None:
    logits = torch.randn(2, 50)
    logits[1, 7] = float("nan")
    made = sampling.logprobs(logits, np.array([3, 4], dtype=np.int32), 2)
    assert not np.isnan(made.values[0]).any()
    assert np.isnan(made.values[1]).all()
    assert made.ids[1, 0] == 4


def test_wrong_logits_are_refused(sampling: NativeSampling) -> None:
    with pytest.raises(ValueError, match="float32"):
        sampling.logprobs(torch.randn(2, 3, dtype=torch.float64), np.zeros(2, np.int32), 0)
