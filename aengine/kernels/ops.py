"""The vocabulary in which models are described, and the tensors a step hands to it.

Owns: the `Ops` protocol every backend implements (reference torch, native CPU, Triton), the weight and batch records.
Does not know: requests, schedulers, checkpoints.
Invariants: a model's forward calls nothing but `Ops` on tensors it got from `Ops`, its weights and the batch, so that a
backend may run it eagerly or record it once and replay it. Shapes: T tokens of a step, R rows, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x · weightᵀ + bias. `weight` [out, in] or a backend's packed form of it; `bias` [out] or None.

    `packed` is set by `Ops.prepare` and opaque to models.
    """

    weight: Tensor
    bias: Tensor | None = None
    packed: Any = field(default=None, compare=False)

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary embedding, half-split (NeoX) form: cos, sin fp32 [max positions, rotary_dim / 2], already scaled."""

    cos: Tensor
    sin: Tensor

    @property
    def rotary_dim(self) -> int:
        return 2 * int(self.cos.shape[1])


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer. `window` W > 0: a query at position p sees keys p - W + 1 .. p. `chunk` C > 0: keys of its
    own chunk of C positions only (chunked local attention). `softcap` 0.0: none.

    `layer` numbers the layers that own KV, 0 up; `group` is the index of the KV group its pages belong to.
    """

    layer: int
    group: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Strided views of the arena: k, v [pages, page_tokens, kv_heads, head_dim]; stride(0) may exceed the product."""

    k: Tensor
    v: Tensor

    @property
    def page_tokens(self) -> int:
        return int(self.k.shape[1])


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step computes. Rows are ragged: row i owns tokens row_offsets[i] .. row_offsets[i + 1] - 1 of T.

    ids int32 [T]; positions int32 [T]; row_offsets int32 [R + 1]; context int32 [R] = last position of the row + 1;
    tables[g] int32 [R, columns]: block table of group g, entry c holds positions c * page .. (c + 1) * page - 1
    (entries a row does not use are 0); kv[l] the KV views of layer l; max_context = max(context), a host int;
    host_counts / host_starts: per-row token count and first position as host ints, so that backends can pick
    strategies without reading the device.
    """

    ids: Tensor
    positions: Tensor
    row_offsets: Tensor
    context: Tensor
    tables: tuple[Tensor, ...]
    kv: tuple[LayerKV, ...]
    max_context: int
    host_counts: tuple[int, ...]
    host_starts: tuple[int, ...]


class Ops(Protocol):
    """Operations a model is made of. All take and return tensors on the backend's device.

    Activations have the compute dtype (fp32 or bf16); norms and softmax accumulate in fp32.
    """

    name: str

    def prepare(self, linear: Linear) -> Linear:
        """Repack a weight once at load; `linear` accepts the result. May drop `weight`'s storage."""
        ...

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        """table [V, D], ids int32 [T] -> [T, D]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x over the last dimension) * weight; x [..., D], weight [D]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor: ...

    def scale(self, x: Tensor, factor: float) -> Tensor: ...

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        """x [T, in] -> [T, out]."""
        ...

    def logits(self, x: Tensor, w: Linear) -> Tensor:
        """As `linear`, but always fp32 out: [N, V]."""
        ...

    def rope(self, x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
        """x [T, heads, head_dim]; rotates the first rotary_dim elements of each head."""
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, batch: StepBatch) -> Tensor:
        """Write k, v [T, kv_heads, head_dim] of this step into their pages, then attend causally over the pages.

        q [T, heads, head_dim] -> [T, heads * head_dim].
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2F] -> silu(gate_up[:, :F]) * gate_up[:, F:]."""
        ...

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor: ...

    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Views of the last dimension."""
        ...


class Model(Protocol):
    """A loaded model: weights plus a description of its forward in Ops."""

    vocab_size: int
    max_context: int
    attention: tuple[AttentionSpec, ...]  # one per layer that owns KV, in layer order
    dtype: torch.dtype

    def forward(self, ops: Ops, batch: StepBatch) -> Tensor:
        """-> hidden states after the final norm [T, D]."""
        ...

    def logits(self, ops: Ops, hidden: Tensor) -> Tensor:
        """hidden [N, D] -> fp32 [N, V] (raw logits, final soft cap applied)."""
        ...
