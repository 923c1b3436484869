"""Safetensors files whose linears are quantised, seen as a checkpoint of ordinary names.

Owns: the choice of a packing for each weight; its integer (or fp8) and its dense form.
Does not know: config.json, the bytes of a packing, backends.
Invariants: a weight without packing is read as it is, so modules that were left alone need no list. Integer and dense
form of a weight have the same values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.errors import ModelLoadError
from aengine.kernels.quantised import Quantised
from aengine.models.checkpoint import SafetensorsCheckpoint
from aengine.models.packings import Codes, Floats, Packing

_WEIGHT = ".weight"
_STORED = (".qweight", ".weight_packed")


class PackedCheckpoint:
    """Implements `Checkpoint`."""

    def __init__(self, inner: SafetensorsCheckpoint, packings: Sequence[Packing]) -> None:
        self._inner, self._packings = inner, packings

    def names(self) -> frozenset[str]:
        stored = self._inner.names()
        made = (name.removesuffix(end) + _WEIGHT for end in _STORED for name in stored if name.endswith(end))
        return stored.union(made)

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._packing(name)
        return self._inner.shape(name) if found is None else found[0].shape(self._inner, found[1])

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        read = self._read(name)
        if read is None:
            return self._inner.tensor(name, dtype)
        return (read if isinstance(read, Tensor) else read.dense()).to(dtype)

    def quantised(self, name: str) -> Quantised | None:
        read = self._read(name)
        return None if read is None or isinstance(read, Tensor) else read.quantised()

    def fitted(self, name: str, weight: Tensor) -> Quantised | None:
        return None

    def _packing(self, name: str) -> tuple[Packing, str] | None:
        """-> (packing, module)."""
        module = name.removesuffix(_WEIGHT)
        if module == name:
            return None
        return next(((packing, module) for packing in self._packings if packing.owns(self._inner, module)), None)

    def _read(self, name: str) -> Codes | Floats | Tensor | None:
        found = self._packing(name)
        if found is None:
            return None
        try:
            return found[0].read(self._inner, found[1])
        except (RuntimeError, ValueError, IndexError) as error:  # shapes that no checkpoint of the method has
            raise ModelLoadError(f"{found[1]}: its quantised weight cannot be unpacked: {error}") from error
