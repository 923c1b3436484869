"""A model's weights, read from a checkpoint and prepared for a backend.

Owns: the checks of names and shapes, the fusing of linears, the loop over layers, tied embeddings.
Does not know: files and their formats, how a backend lays weights out, any family's layers.
Invariants: a linear stays integer when every part of it is, and all have one order of inputs; then no dense copy of it
is ever made. Loading holds at most the weights plus one layer. A tied embedding is the head: it exists once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from aengine.errors import ModelLoadError
from aengine.kernels.ops import Linear, Ops
from aengine.kernels.quantised import Quantised, one_order
from aengine.models.checkpoint import Checkpoint
from aengine.models.config import ModelConfig

L = TypeVar("L")
Progress = Callable[[str, int, int], None]
Rows = Callable[[Tensor], Tensor]
PHASE = "load weights"


class Weights:
    """Reads checked tensors of one model from a checkpoint, fused and prepared for a backend."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype) -> None:
        self._checkpoint, self._ops, self._dtype = checkpoint, ops, dtype

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Raises ModelLoadError when the checkpoint's tensor is missing or has another shape."""
        value = self._checkpoint.tensor(name, dtype or self._dtype)
        self._check(name, tuple(value.shape), shape)
        return value

    def _check(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            raise ModelLoadError(f"tensor {name!r} has shape {found}, the configuration says {wanted}")

    def norm(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        """A norm's weight [size], with `offset` added in fp32."""
        return self.tensor(name + ".weight", (size,), torch.float32).add_(offset).to(self._dtype)

    def linear(
        self,
        names: tuple[str, ...],
        outs: tuple[int, ...],
        size_in: int,
        bias: bool,
        rows: tuple[Rows | None, ...] = (),
    ) -> Linear:
        """The linears `names` of `outs` rows each, as one, prepared by the backend.

        `rows`: for each of them, a new order of the rows of its weight and bias, or None. Integer when all are.
        """
        orders = rows or (None,) * len(names)
        whole = None
        if bias:
            found = [self.tensor(name + ".bias", (out,)) for name, out in zip(names, outs, strict=True)]
            whole = _joined([value if to is None else to(value) for value, to in zip(found, orders, strict=True)])
        parts: list[Quantised] = []
        for name, out, order in zip(names, outs, orders, strict=True):
            part = self._checkpoint.quantised(name + ".weight")
            if part is None:
                break
            self._check(name + ".weight", part.shape, (out, size_in))
            parts.append(part if order is None else part.with_rows(order))
        if len(parts) == len(names) and one_order(parts):
            return self._packed(tuple(parts), whole)
        dense = [part.dequantise(self._dtype) for part in parts]
        for name, out, order in list(zip(names, outs, orders, strict=True))[len(parts) :]:
            value = self.tensor(name + ".weight", (out, size_in))
            dense.append(value if order is None else order(value))
        return self._ops.prepare(Linear(_joined(dense), whole))

    def plain(self, name: str, out: int, size_in: int, bias: bool) -> Linear:
        """A linear that is never integer: small, and what depends on it jumps (the router of a mixture)."""
        weight = self.tensor(name + ".weight", (out, size_in))
        return self._ops.prepare(Linear(weight, self.tensor(name + ".bias", (out,)) if bias else None))

    def made(self, name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        """A linear whose weight [out, in] was cut out of the checkpoint's tensor `name`."""
        part = self._checkpoint.fitted(name, weight)
        return self._ops.prepare(Linear(weight, bias)) if part is None else self._packed((part,), bias)

    def table(self, name: str, shape: tuple[int, int]) -> Tensor | Linear:
        """What `Ops.embed` reads: a Linear when the tensor is integer."""
        part = self._checkpoint.quantised(name)
        if part is None or part.order is not None:  # a row of the table is read as it is
            return self.tensor(name, shape)
        self._check(name, part.shape, shape)
        return self._packed((part,), None)

    def _packed(self, parts: tuple[Quantised, ...], bias: Tensor | None) -> Linear:
        shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        return self._ops.prepare(Linear(torch.empty(shape, dtype=self._dtype, device="meta"), bias, parts))

    def prepare(self, linear: Linear) -> Linear:
        return self._ops.prepare(linear)

    def rope_factors(self) -> Tensor | None:
        name = "rope_freqs.weight"
        return self._checkpoint.tensor(name, torch.float32) if name in self._checkpoint.names() else None


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def load_layers(count: int, load: Callable[[int], L], progress: Progress | None) -> tuple[L, ...]:
    """`load(0)` .. `load(count - 1)`; `progress(phase, layers done, layers)` after each."""
    layers: list[L] = []
    for index in range(count):
        layers.append(load(index))
        if progress:
            progress(PHASE, index + 1, count)
    return tuple(layers)


def load_embedding(config: ModelConfig, weights: Weights) -> tuple[Tensor | Linear, Linear]:
    """-> (embedding [V, D] for `Ops.embed`, output head). Tied: both are the head."""
    shape = (config.vocab_size, config.hidden)
    table = weights.table("model.embed_tokens.weight", shape)
    if config.tied_embeddings:
        head = table if isinstance(table, Linear) else weights.prepare(Linear(table))
        return head, head
    return table, weights.linear(("lm_head",), shape[:1], shape[1], bias=False)
