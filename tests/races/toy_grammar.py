"""A grammar that needs no text: which tokens may follow is a hash of what was said.

Owns: `ToyMatcher`, a `Matcher` of the scheduler that also makes masks.
Does not know: the scheduler.
Invariants: the same seed and tokens give the same answers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from aengine.types import Int32s


class ToyMatcher:
    """`vocab` tokens, of which `eos` may come in between and ends the output too."""

    def __init__(self, seed: int, vocab: int, eos: int) -> None:
        self._seed, self._vocab, self._eos = seed, vocab, eos
        self._said: list[int] = []
        self._length = 1 + seed % 23
        self.error: str | None = None

    def allowed(self, more: Sequence[int] = ()) -> list[int]:
        said = (*self._said, *more)
        rng = random.Random(f"{self._seed} {said}")
        few = rng.choice([1, 1, 2, 5, 40])
        return sorted(rng.sample(range(self._vocab), few) + [self._eos] * (few > 1 and rng.random() < 0.1))

    @property
    def ended(self) -> bool:
        return len(self._said) >= self._length or self._eos in self._said

    def accept(self, token: int) -> bool:
        if token not in self.allowed():
            self.error = f"token {token} is not allowed after {self._said}"
        self._said.append(token)
        return self.error is None and not self.ended

    def forced(self) -> list[int]:
        found: list[int] = []
        while len(self._said) + len(found) < self._length and self._eos not in found:
            allowed = self.allowed(found)
            if len(allowed) > 1:
                break
            found += allowed
        return found

    def mask(self) -> Int32s:
        bits = np.zeros(-(-self._vocab // 32) * 32, np.uint8)
        bits[self.allowed()] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)
