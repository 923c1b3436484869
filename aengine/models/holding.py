"""What a model's linears are held as: the numbers of the file, its integers, or integers fitted at load.

Owns: that choice, and the account of it.
Does not know: files, packings, backends.
Invariants: the file's own integers are never fitted anew. The embedding and the output head never have fewer than 8
bits unless the file has them so. What is told is counted, not assumed.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import torch
from torch import Tensor

from aengine.kernels.quantised import Quantised
from aengine.models.checkpoint import Checkpoint
from aengine.models.fitting import fit, fits

Hold = Literal["plain", "stored", "int8", "int4"]
"""plain: every weight dense. stored: integers where the file has integers. int8, int4: integers everywhere."""

_EIGHT_BITS = ("embed_tokens.weight", "lm_head.weight")


class HeldCheckpoint:
    """A checkpoint whose `quantised` follows `hold`; `float8`: the file's fp8 weights stay such. Implements
    `Checkpoint`."""

    def __init__(self, inner: Checkpoint, hold: Hold, *, float8: bool = False) -> None:
        self._inner, self._hold, self._float8 = inner, hold, float8
        self._counts: Counter[str] = Counter()  # weights by what they are held as

    def names(self) -> frozenset[str]:
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._inner.tensor(name, dtype)

    def quantised(self, name: str) -> Quantised | None:
        if self._hold == "plain":
            return None
        part = self._inner.quantised(name)
        if part is not None and part.floating and not self._float8:
            part = None
        if part is None and self._hold != "stored" and name in self._inner.names() and fits(self._inner.shape(name)):
            part = fit(self._inner.tensor(name, torch.float32), self._bits(name))
        return self._counted(part)

    def fitted(self, name: str, weight: Tensor) -> Quantised | None:
        if self._hold not in ("int8", "int4") or not fits(tuple(weight.shape)):
            return None
        return self._counted(fit(weight, self._bits(name)))

    def _bits(self, name: str) -> int:
        return 4 if self._hold == "int4" and not name.endswith(_EIGHT_BITS) else 8

    def _counted(self, part: Quantised | None) -> Quantised | None:
        if part is not None:
            kind = "float8" if part.floating else f"{part.bits}-bit groups of {part.group}"
            self._counts[kind] += part.codes.numel()
        return part

    def summary(self, dtype: str) -> str:
        """One line: how many weights are integers or fp8, of which kind; the others are of `dtype`."""
        held = ", ".join(f"{count / 1e6:.1f} M in {kind}" for kind, count in self._counts.most_common())
        return f"weights: {held}, the others {dtype}" if held else f"weights: {dtype}"
