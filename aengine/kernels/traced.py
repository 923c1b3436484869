"""Ops through which torch.compile sees a model: plain torch where that can be fused, opaque calls where it cannot.

Owns: `TracedOps`, the custom operations behind its opaque calls, and what they are answered with.
Does not know: how a forward is compiled, streams, steps.
Invariants: a traced forward depends on `ids` and `positions` alone: everything else of a step (tables, pages, host
columns) is looked up when an opaque call runs, so no number of rows or length of a context is part of a program. Opaque
calls write KV and states behind the compiler's back; their order is kept, for each reads what the one before returned.

    compiled    embed norms linears gates | attention | linear norms gates | attention | ...
                plain torch, fused          opaque: the backend's kernels, with the step's own batch
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.ops import AttentionSpec, Experts, Linear, Model, Ops, RopeTable, StateSpec, StepBatch, state_specs
from aengine.kernels.reference import ReferenceOps


class Calls:
    """What answers the opaque calls of one model: its backend, and the batch of the step that runs.

    Without a batch (a rehearsal) they answer zeros of the right shape. Used by one stream, like the backend.
    """

    def __init__(self, model: Model, base: Ops) -> None:
        self.base = base
        self.batch: StepBatch | None = None
        self.specs = {spec.layer: spec for spec in model.attention}
        self.states = {spec.layer: spec for spec in state_specs(model)}
        self.held: list[Any] = []  # packed linears and mixtures, by number
        self.numbers: dict[int, int] = {}
        self._number(list(vars(model).values()))
        self.key = next(_KEYS)
        _CALLS[self.key] = self

    def _number(self, found: Iterable[Any]) -> None:
        for value in found:
            one = value.packed if isinstance(value, Linear) else value if isinstance(value, Experts) else None
            if one is not None and id(one) not in self.numbers:
                self.numbers[id(one)] = len(self.held)
                self.held.append(value)
            if isinstance(value, list | tuple):
                self._number(value)
            elif isinstance(value, dict):
                self._number(value.values())
            elif is_dataclass(value) and not isinstance(value, type | Linear):
                self._number([getattr(value, leaf.name) for leaf in fields(value)])


_KEYS = count()
_CALLS: WeakValueDictionary[int, Calls] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class TracedBatch:
    """The part of a `StepBatch` that a traced forward may look at."""

    ids: Tensor
    positions: Tensor
    cross: None = None


class TracedOps(ReferenceOps):
    """`Ops` for tracing. `rotate`: q and k are rotated in plain torch, not by the backend's attention."""

    name = "traced"

    def __init__(self, calls: Calls, *, rotate: bool) -> None:
        super().__init__()
        self._key, self._numbers, self._rotate = calls.key, calls.numbers, rotate

    def embed(self, table: Tensor | Linear, ids: Tensor) -> Tensor:
        if isinstance(table, Tensor):
            return F.embedding(ids, table)
        if table.packed is None:
            return F.embedding(ids, table.weight)
        number, shape = self._numbers[id(table.packed)], table.weight
        made: Tensor = _embed(ids, self._key, number, shape.shape[1], shape.dtype)
        return made

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        if w.packed is None:
            return F.linear(x, w.weight, w.bias)
        made: Tensor = _linear(x, self._key, self._numbers[id(w.packed)], w.weight.shape[0])
        return made

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec,
        batch: StepBatch,
        sinks: Tensor | None = None,
        rope: RopeTable | None = None,
    ) -> Tensor:
        if rope is not None and self._rotate:
            q, k = self.rope(q, batch.positions, rope), self.rope(k, batch.positions, rope)
            rope = None
        cos, sin = (None, None) if rope is None else (rope.cos, rope.sin)
        made: Tensor = _attention(q, k, v, sinks, cos, sin, self._key, spec.layer)
        return made

    def mixture(self, x: Tensor, scores: Tensor, experts: Experts) -> Tensor:
        made: Tensor = _mixture(x, scores, self._key, self._numbers[id(experts)])
        return made

    def short_conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: StateSpec, batch: StepBatch) -> Tensor:
        made: Tensor = _short_conv(x, weight, bias, self._key, spec.layer)
        return made


# ---- the opaque calls. Each is declared twice: what runs, and the shape of its result.


@torch.library.custom_op("aengine::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cos: Tensor | None, sin: Tensor | None, key: int, layer: int
) -> Tensor:
    calls = _CALLS[key]
    if calls.batch is None:
        return q.new_zeros((q.shape[0], q.shape[1] * q.shape[2]))
    rope = None if cos is None or sin is None else RopeTable(cos, sin)
    return calls.base.attention(q, k, v, calls.specs[layer], calls.batch, sinks, rope)


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cos: Tensor | None, sin: Tensor | None, key: int, layer: int
) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))


@torch.library.custom_op("aengine::short_conv", mutates_args=())
def _short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, key: int, layer: int) -> Tensor:
    calls = _CALLS[key]
    if calls.batch is None:
        return x.new_zeros(x.shape)
    return calls.base.short_conv(x, weight, bias, calls.states[layer], calls.batch)


@_short_conv.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, key: int, layer: int) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("aengine::mixture", mutates_args=())
def _mixture(x: Tensor, scores: Tensor, key: int, number: int) -> Tensor:
    return _CALLS[key].base.mixture(x, scores, _CALLS[key].held[number])


@_mixture.register_fake
def _(x: Tensor, scores: Tensor, key: int, number: int) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("aengine::linear", mutates_args=())
def _linear(x: Tensor, key: int, number: int, outputs: int) -> Tensor:
    return _CALLS[key].base.linear(x, _CALLS[key].held[number])


@_linear.register_fake
def _(x: Tensor, key: int, number: int, outputs: int) -> Tensor:
    return x.new_empty((x.shape[0], outputs))


@torch.library.custom_op("aengine::embed", mutates_args=())
def _embed(ids: Tensor, key: int, number: int, size: int, dtype: torch.dtype) -> Tensor:
    return _CALLS[key].base.embed(_CALLS[key].held[number], ids)


@_embed.register_fake
def _(ids: Tensor, key: int, number: int, size: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty((ids.shape[0], size), dtype=dtype)
