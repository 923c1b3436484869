"""Counter-based noise: fixed values, uniformity, independence of seeds, positions and tokens.

Owns: the hash and the choice by it.
Does not know: filters, slots.
Invariants: all draws are functions of fixed seeds, so a statistical test gives the same verdict every time. Limits are
set at about one in a million for true randomness.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from aengine.runner.noise import Keys, TokenNoise, _to_gumbel, make_keys, seed_word

CPU = torch.device("cpu")


def plain_hash(seed, position, token):
    """The documented formula, in Python's whole numbers."""
    mask64, mask32 = 2**64 - 1, 2**32 - 1

    def mix64(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask64
        return x ^ (x >> 31)

    def mix32(x):
        x = (x ^ (x >> 16)) * 0x7FEB352D & mask32
        x = (x ^ (x >> 15)) * 0x846CA68B & mask32
        return x ^ (x >> 16)

    key = mix64((mix64(seed & mask64) + position * 0x9E3779B97F4A7C15) & mask64)
    x = (mix32((token + 0x9E3779B9) & mask32) ^ (key >> 32)) * 0x7FEB352D & mask32
    x ^= x >> 15
    x = (x + (key & mask32)) * 0x846CA68B & mask32
    x ^= x >> 16
    return x & 0x7FFFFFFF


def keys_of(seeds, positions):
    return make_keys(np.array([seed_word(seed) for seed in seeds], dtype=np.uint64), np.array(positions))


def noise_of(vocab, seeds, positions):
    """[rows, vocab]"""
    noise = TokenNoise(vocab, CPU)
    rows = len(seeds)
    ids = torch.arange(vocab).repeat(rows)
    owner = torch.arange(rows).repeat_interleave(vocab)
    return noise.gumbel(ids, owner, keys_of(seeds, positions)).view(rows, vocab)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, -(2**63), 123456789012345])
@pytest.mark.parametrize("position", [0, 1, 4095, 2**31 - 1])
def test_the_hash_is_the_documented_one(seed, position):
    keys = keys_of([seed], [position])
    words = TokenNoise(1000, CPU)._hash_all(keys.k0[0], keys.k1[0])
    tokens = [0, 1, 2, 499, 999]
    assert words[tokens].tolist() == [plain_hash(seed, position, token) for token in tokens]


def test_the_hash_never_changes():
    """Seeded output is part of the contract: these values may not move between versions."""
    assert [plain_hash(0, 0, 0), plain_hash(42, 7, 12345)] == [1943608783, 753218492]
    row = noise_of(3, [42], [7])[0].tolist()
    expected = [-math.log(-math.log1p(-(plain_hash(42, 7, token) + 0.5) / 2**31)) for token in range(3)]
    assert row == pytest.approx(expected, abs=1e-5)


def test_seeds_that_are_the_same_word_are_the_same():
    assert torch.equal(noise_of(50, [-1], [3]), noise_of(50, [2**64 - 1], [3]))
    assert not torch.equal(noise_of(50, [0], [3]), noise_of(50, [2**64 - 1], [3]))


def test_both_forms_of_the_noise_agree_exactly():
    """Ragged (torch) and whole-row (NumPy): the token chosen among all must be the best of the ragged scores."""
    noise = TokenNoise(3001, CPU)
    rows = torch.randn(40, 3001, generator=torch.Generator().manual_seed(0)) * 3
    keys = keys_of(range(40), range(40))
    for i, row in enumerate(rows):
        best = int(row.argmax())
        scores = (row - row[best]).div(0.8) + noise.gumbel(
            torch.arange(3001), torch.zeros(3001, dtype=torch.int64), Keys(keys.k0[i : i + 1], keys.k1[i : i + 1])
        )
        assert noise.choose(row, best, 0.8, keys.k0[i], keys.k1[i]) == int(scores.argmax())


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 30.0])
def test_leaving_out_hopeless_tokens_never_changes_the_choice(scale):
    noise = TokenNoise(500, CPU)
    generator = torch.Generator().manual_seed(1)
    keys = keys_of([9] * 300, range(300))
    for i in range(300):
        row = torch.randn(500, generator=generator) * scale
        if i % 3 == 0:
            row[torch.rand(500, generator=generator) < 0.9] = -math.inf
        if torch.isneginf(row).all():
            continue
        best = int(row.argmax())
        one = Keys(keys.k0[i : i + 1], keys.k1[i : i + 1])
        scores = row - row[best] + noise.gumbel(torch.arange(500), torch.zeros(500, dtype=torch.int64), one)
        assert noise.choose(row, best, 1.0, keys.k0[i], keys.k1[i]) == int(scores.argmax())


def chi_square(observed, expected):
    """Standardised: about a standard normal for many degrees of freedom."""
    observed, expected = np.asarray(observed, float), np.asarray(expected, float)
    freedom = len(observed) - 1
    return (((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def uniforms(vocab, seeds, positions):
    gumbel = noise_of(vocab, seeds, positions).double().numpy()
    return np.exp(-np.exp(-gumbel))  # 1 - v


@pytest.mark.parametrize("axis", ["tokens", "seeds", "positions"])
def test_noise_is_uniform_along_each_axis(axis):
    if axis == "tokens":
        sample = uniforms(200_000, [3], [5])
    elif axis == "seeds":
        sample = uniforms(1, range(100_000), [5] * 100_000)
    else:
        sample = uniforms(1, [3] * 100_000, range(100_000))
    counts, _ = np.histogram(sample, bins=256, range=(0, 1))
    assert abs(chi_square(counts, np.full(256, sample.size / 256))) < 5


@pytest.mark.parametrize("pair", ["tokens", "seeds", "positions", "seed against position"])
def test_neighbours_are_independent(pair):
    """A 16 x 16 histogram of neighbours' noise; a weak hash of counters shows here first."""
    n = 60_000
    if pair == "tokens":
        row = uniforms(n + 1, [3], [5])[0]
        first, second = row[:-1], row[1:]
    elif pair == "seeds":
        column = uniforms(1, range(n + 1), [5] * (n + 1))[:, 0]
        first, second = column[:-1], column[1:]
    elif pair == "positions":
        column = uniforms(1, [3] * (n + 1), range(n + 1))[:, 0]
        first, second = column[:-1], column[1:]
    else:
        first = uniforms(1, range(n), [5] * n)[:, 0]
        second = uniforms(1, [5] * n, range(n))[:, 0]
    counts, _, _ = np.histogram2d(first, second, bins=16, range=((0, 1), (0, 1)))
    assert abs(chi_square(counts.ravel(), np.full(256, n / 256))) < 5
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(n)


def test_the_rare_large_noise_has_the_right_frequency():
    """The tail decides between many unlikely tokens: v under 2^-16 once in 65,536 draws."""
    tail = 0
    noise = TokenNoise(49_152, CPU)
    keys = keys_of([7] * 400, range(400))
    for i in range(400):
        tail += int((noise._hash_all(keys.k0[i], keys.k1[i]) < 2**15).sum())
    expected = 400 * 49_152 / 2**16
    assert abs(tail - expected) < 5 * math.sqrt(expected)


def test_noise_is_always_finite():
    noise = TokenNoise(4, CPU)
    extreme = torch.tensor([0, 1, 2**31 - 2, 2**31 - 1], dtype=torch.int32)
    made = _to_gumbel(extreme)
    assert torch.isfinite(made).all()
    assert made.tolist() == sorted(made.tolist(), reverse=True)
    assert noise.choose(torch.zeros(4), 0, 1.0, np.uint32(0), np.uint32(0)) in range(4)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_in_proportion(temperature):
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -math.inf])
    n = 40_000
    drawn = (logits / temperature + noise_of(7, [1] * n, range(n))).argmax(-1)
    counts = np.bincount(drawn.numpy(), minlength=7)
    assert counts[6] == 0
    expected = (logits / temperature).softmax(-1).numpy()[:6] * n
    assert abs(chi_square(counts[:6], expected)) < 5
