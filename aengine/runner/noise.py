"""Counter-based Gumbel noise: the randomness of seeded sampling.

Owns: the hash from (seed, position, token) to noise, and the choice of a token by it.
Does not know: how logits were shaped, batches, slots.
Invariants: a token's noise is a pure function of the request's seed, the absolute position of the sampled token and the
token id. No generator, no state: the same request gives the same tokens in any batch, at any depth, after preemption.
Of equal scores the lowest token id wins.

The hash, in 32-bit words so that it vectorises (all sums and products modulo 2^32, >>> shifts zeros in):

    key(seed, position) = mix64(mix64(seed) + position * 0x9E3779B97F4A7C15)      64 bits: high = k0, low = k1
    mix64               = the finaliser of SplitMix64 (xor-shifts 30, 27, 31)
    spread[token]       = mix32(token + 0x9E3779B9), a table made once                mix32: xor-shifts 16, 15, 16
    x = (spread[token] ^ k0) * 0x7FEB352D;   x ^= x >>> 15
    x = (x + k1)             * 0x846CA68B;   x ^= x >>> 16
    v = ((x & 0x7FFFFFFF) + 1/2) / 2^31                                    uniform in (0, 1)
    noise = -log(-log(1 - v))                                              Gumbel

The likely winners have v near 0, where fp32 is fine: two of 49,152 tokens collide there about once in 40,000 draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GOLDEN64 = 0x9E3779B97F4A7C15
GOLDEN32 = 0x9E3779B9
_MIX_A = 0x7FEB352D
_MIX_B = 0x846CA68B
_MASK64 = 2**64 - 1

# fp32 has no smaller normal number. A logit less its row's greatest is at most 0, so dividing by this gives 0 or minus
# infinity, never NaN.
LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)

# Tokens with v at or above 1/64 have noise below 4.15. So a token can win only if its v is smaller, or its logit is
# within that of the best token's own score: logarithms are taken of about 2 % of the vocabulary.
_RARE = 2**31 // 64
_COMMON_NOISE = -math.log(-math.log1p(-_RARE / 2**31)) + 1e-3


@dataclass(frozen=True, slots=True)
class Keys:
    """Noise keys of N rows: k0, k1 uint32 [N]."""

    k0: NDArray[np.uint32]
    k1: NDArray[np.uint32]


def make_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> Keys:
    """seeds [N] (see `seed_word`), positions [N] of the tokens to be sampled."""
    with np.errstate(over="ignore"):
        key = _mix64(_mix64(seeds) + positions.astype(np.uint64) * np.uint64(GOLDEN64))
    return Keys((key >> np.uint64(32)).astype(np.uint32), key.astype(np.uint32))


def seed_word(seed: int) -> np.uint64:
    """A seed of any sign as an unsigned 64-bit word; -1 and 2^64 - 1 are the same seed."""
    return np.uint64(seed & _MASK64)


class TokenNoise:
    """Noise over a vocabulary of `vocab_size` tokens, for logits on `device`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._spread = _mix32(np.arange(vocab_size, dtype=np.uint32) + np.uint32(GOLDEN32))
        self._spread_on_device = torch.from_numpy(self._spread.view(np.int32)).to(device)
        self._words = np.empty_like(self._spread)
        self._scratch = np.empty_like(self._spread)
        self._z = np.empty(vocab_size, dtype=np.float32)

    def gumbel(self, ids: Tensor, owner: Tensor, keys: Keys) -> Tensor:
        """Noise fp32 [S] of tokens `ids` int64 [S], token s with the keys of row owner[s]."""
        k0 = torch.from_numpy(keys.k0.view(np.int32)).to(ids.device)[owner]
        k1 = torch.from_numpy(keys.k1.view(np.int32)).to(ids.device)[owner]
        return _to_gumbel(_hash(self._spread_on_device[ids], k0, k1))

    def gumbel_rows(self, k0: Tensor, k1: Tensor) -> Tensor:
        """Noise fp32 [N, V] of the whole vocabulary, row i with the key words k0[i], k1[i] int32."""
        spread = self._spread_on_device.expand(len(k0), -1).clone()
        return _to_gumbel(_hash(spread, k0.unsqueeze(1), k1.unsqueeze(1)))

    def choose(self, row: Tensor, best_id: int, temperature: float, k0: np.uint32, k1: np.uint32) -> int:
        """argmax of (row - max) / temperature + noise over one fp32 row [V] on the CPU, its maximum at best_id.

        NumPy, since its compares and its search for the few that are left are 5 times as fast as torch's, and since
        a row is too short to be worth waking a second thread, which torch does.
        """
        values = row.numpy()
        z = np.subtract(values, values[best_id], out=self._z)
        with np.errstate(over="ignore"):  # to minus infinity, which is meant
            np.divide(z, np.float32(max(temperature, LEAST_TEMPERATURE)), out=z)
        words = self._hash_all(k0, k1)
        own = float(_to_gumbel(_as_tensor(words[best_id : best_id + 1])))
        able = words < np.uint32(_RARE)
        able |= z >= np.float32(own - _COMMON_NOISE)
        ids = np.flatnonzero(able)
        return int(ids[int((torch.from_numpy(z[ids]) + _to_gumbel(_as_tensor(words[ids]))).argmax())])

    def _hash_all(self, k0: np.uint32, k1: np.uint32) -> NDArray[np.uint32]:
        """31-bit words of the whole vocabulary, valid until the next call."""
        x, shifted = self._words, self._scratch
        np.bitwise_xor(self._spread, k0, out=x)
        np.multiply(x, np.uint32(_MIX_A), out=x)
        np.bitwise_xor(x, np.right_shift(x, np.uint32(15), out=shifted), out=x)
        np.add(x, k1, out=x)
        np.multiply(x, np.uint32(_MIX_B), out=x)
        np.bitwise_xor(x, np.right_shift(x, np.uint32(16), out=shifted), out=x)
        return np.bitwise_and(x, np.uint32(0x7FFFFFFF), out=x)


def _hash(words: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
    """31-bit words int32 of spread tokens, which are used up."""
    words.bitwise_xor_(k0).mul_(_MIX_A)
    words.bitwise_xor_((words >> 15).bitwise_and_(0x1FFFF)).add_(k1).mul_(_MIX_B - 2**32)
    return words.bitwise_xor_((words >> 16).bitwise_and_(0xFFFF)).bitwise_and_(0x7FFFFFFF)


def _as_tensor(words: NDArray[np.uint32]) -> Tensor:
    return torch.from_numpy(words.view(np.int32))


def _to_gumbel(words: Tensor) -> Tensor:
    """31-bit words -> Gumbel noise. v is kept under 1, where fp32 would round it up and the noise be minus infinity."""
    v = words.float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(_MIX_A)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(_MIX_B)
    return x ^ (x >> np.uint32(16))
