"""Weights on a device other than the host.

Owns: moving them there as they are read, and what a model made on the host beside them (rotary tables).
Does not know: files, backends, families.
Invariants: a tensor keeps its bits. Integer weights stay where they are: the backend packs them where it wants them.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aengine.kernels.ops import Model
from aengine.kernels.quantised import Quantised
from aengine.models.checkpoint import Checkpoint


class PlacedCheckpoint:
    """A checkpoint whose tensors are on `device`. Implements `Checkpoint`."""

    def __init__(self, inner: Checkpoint, device: torch.device) -> None:
        self._inner, self._device = inner, device

    def names(self) -> frozenset[str]:
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._inner.tensor(name, dtype).to(self._device)

    def quantised(self, name: str) -> Quantised | None:
        return self._inner.quantised(name)

    def fitted(self, name: str, weight: Tensor) -> Quantised | None:
        return self._inner.fitted(name, weight)


def place(model: Model, device: torch.device) -> None:
    """Move every tensor that `model` holds to `device`; what is there already stays as it is."""
    for name, value in vars(model).items():
        moved = _moved(value, device)
        if moved is not value:
            setattr(model, name, moved)


def _moved(value: Any, device: torch.device) -> Any:
    """`value` itself when nothing in it had to move."""
    if isinstance(value, Tensor):
        return value if value.device == device or value.is_meta else value.to(device)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        moved = [_moved(one, device) for one in value]
        same = all(a is b for a, b in zip(moved, value, strict=True))
        return value if same else type(value)(moved)
    if isinstance(value, dict):
        entries = {key: _moved(one, device) for key, one in value.items()}
        return value if all(entries[key] is value[key] for key in value) else entries
    if is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith("aengine."):
        parts = {leaf.name: getattr(value, leaf.name) for leaf in fields(value) if leaf.init}
        changed = {name: new for name, old in parts.items() if (new := _moved(old, device)) is not old}
        return replace(value, **changed) if changed else value
    return value
