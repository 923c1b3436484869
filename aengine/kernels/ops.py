"""The vocabulary in which models are described, and the tensors a step hands to it.

Owns: the `Ops` protocol every backend implements (reference torch, native CPU, Triton), the weight and batch records.
Does not know: requests, schedulers, checkpoints.
Invariants: a model's forward calls nothing but `Ops` on tensors it got from `Ops`, its weights and the batch, so that a
backend may run it eagerly or record it once and replay it. Shapes: T tokens of a step, R rows, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from aengine.kernels.quantised import Quantised


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x · weightᵀ + bias. `weight` [out, in] or a backend's packed form of it; `bias` [out] or None.

    `parts`: the weight as quantised row blocks of one order of columns, first rows first; `weight` is then a meta
    tensor that only tells shape and dtype of activations.
    `packed` is set by `Ops.prepare` and opaque to models.
    """

    weight: Tensor
    bias: Tensor | None = None
    parts: tuple[Quantised, ...] = ()
    packed: Any = field(default=None, compare=False)

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])

    @property
    def order(self) -> Tensor | None:
        """The input that each column of the parts' codes belongs to, int32 [in]; None: columns are inputs."""
        return self.parts[0].order if self.parts else None


@dataclass(frozen=True, slots=True)
class Experts:
    """The gated MLPs of a mixture, of which each token goes through the `top_k` that its router scores highest.

    gate_up[e] [2F, D], gates first; down[e] [D, F]. Weights of the chosen: "softmax" over their scores, or "sigmoid" of
    each. `weigh`: the weight multiplies the expert's "input" or its "output". Activation "silu": silu(gate) * up;
    "clamped": (up' + 1) * g * sigmoid(alpha * g) with g = min(gate, limit), up' = up within -limit .. limit.
    """

    gate_up: tuple[Linear, ...]
    down: tuple[Linear, ...]
    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    weigh: Literal["input", "output"]
    activation: Literal["silu", "clamped"] = "silu"
    alpha: float = 1.702
    limit: float = 7.0


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

    `cross`: it attends to media items instead of the sequence's own positions; its group's pages belong to items.

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
    cross: bool = False


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Strided views of the arena: k, v [pages, page_tokens, kv_heads, head_dim]; stride(0) may exceed the product.

    int8 k and v count in units of k_scale, v_scale: fp32 [pages, page_tokens, kv_heads], of equal strides.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def page_tokens(self) -> int:
        return int(self.k.shape[1])


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a recurrent state: `shape` per sequence, kept as `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One layer with recurrent state. `layer` numbers such layers, 0 up; `group` is its page group, after those of
    attention. tables[group] is int32 [R, 2]: each row's page read (0: the initial state, all zero) and page written."""

    layer: int
    group: int
    parts: tuple[StatePart, ...]


@dataclass(frozen=True, slots=True)
class LayerState:
    """Strided views of the arena, one per part of a layer's state: [pages, *shape]. Page 0 is zero for ever."""

    parts: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class CrossItem:
    """A media item in an item group. pages int64 [n]; entry i of `tokens` is in pages[i // page tokens]."""

    pages: Tensor
    tokens: int


@dataclass(frozen=True, slots=True)
class CrossSpan:
    """Tokens of one row that see the same items: entries first .. first + count - 1 of `CrossBatch.tokens`."""

    first: int
    count: int
    items: tuple[CrossItem, ...]


@dataclass(frozen=True, slots=True)
class CrossBatch:
    """The tokens of a step that see any item. tokens int64 [V]: their indices among the T tokens, rising."""

    tokens: Tensor
    spans: tuple[CrossSpan, ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step computes. Rows are ragged: row i owns tokens row_offsets[i] .. row_offsets[i + 1] - 1 of T.

    ids int32 [T]; positions int32 [T]; row_offsets int32 [R + 1]; context int32 [R] = last position of the row + 1;
    tables[g] int32 [R, columns]: block table of group g, entry c holds positions c * page .. (c + 1) * page - 1
    (entries a row does not use are 0); kv[l] the KV views of layer l; states[l] those of state layer l; max_context =
    max(context), a host int; host_counts / host_starts: per-row token count and first position as host ints, so that
    backends can pick strategies without reading the device.
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
    cross: CrossBatch | None = None  # None: no token sees a media item
    states: tuple[LayerState, ...] = ()


class Ops(Protocol):
    """Operations a model is made of. All take and return tensors on the backend's device.

    Activations have the compute dtype (fp32 or bf16); norms and softmax accumulate in fp32.
    """

    name: str

    def prepare(self, linear: Linear) -> Linear:
        """Repack a weight once at load; `linear`, `logits` and `embed` accept the result. May drop `weight`'s storage,
        keeps nothing of `parts`."""
        ...

    def embed(self, table: Tensor | Linear, ids: Tensor) -> Tensor:
        """table [V, D], ids int32 [T] -> [T, D].

        A `Linear` that was prepared gives its rows exactly as they were, rounded once to its weight's dtype, so that a
        tied embedding and output head are one weight.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x over the last dimension) * weight; x [..., D], weight [D]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor: ...

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """Element by element; x and y of one shape."""
        ...

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
        """Write k, v [T, kv_heads, head_dim] of this step into their pages, then attend causally over the pages.

        `sinks` fp32 [heads]: the score of one more key, whose value is zero, for every query of a head: what it draws
        is lost. `rope`: q and k come unrotated, and are rotated as by `rope` first (k before it is written), so that a
        backend may do it while it writes. q [T, heads, head_dim] -> [T, heads * head_dim].
        """
        ...

    def scale_positions(self, x: Tensor, positions: Tensor, factors: Tensor) -> Tensor:
        """x [T, heads, head_dim] times factors[positions]; factors fp32 [max positions]."""
        ...

    def mixture(self, x: Tensor, scores: Tensor, experts: Experts) -> Tensor:
        """x [T, D] through the experts that the router's `scores` [T, E] choose for each token -> [T, D]."""
        ...

    def short_conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: StateSpec, batch: StepBatch) -> Tensor:
        """Causal convolution over each row's tokens, channel by channel, going on from the row's state.

        x [T, D], weight fp32 [K, D] (the last row meets the newest token), bias fp32 [D] -> [T, D]. The state's one
        part is [K - 1, D]: the sequence's last inputs, oldest first. All rows read before any row writes; one that
        writes page 0 leaves no state. A token's result has the same bits however its sequence is cut into steps.
        """
        ...

    def cross_attention(self, q: Tensor, spec: AttentionSpec, batch: StepBatch) -> Tensor:
        """Attend to all entries of the items a token sees; q [V, heads, head_dim] of `batch.cross.tokens` ->
        [V, heads * head_dim]."""
        ...

    def write_items(self, k: Tensor, v: Tensor, kv: LayerKV, pages: Tensor) -> None:
        """Write an item's k, v [L, kv_heads, head_dim] into its pages int64 [ceil(L / page tokens)] of one layer."""
        ...

    def take(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x [T, D], tokens int64 [V] -> [V, D], new memory."""
        ...

    def put(self, x: Tensor, tokens: Tensor, y: Tensor) -> Tensor:
        """x [T, D] with the rows `tokens` replaced by y [V, D]; new memory."""
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


def state_specs(model: Model) -> tuple[StateSpec, ...]:
    """The layers with recurrent state, in order of `layer`: a model that has some declares them as `states`."""
    states: tuple[StateSpec, ...] = getattr(model, "states", ())
    return states


@runtime_checkable
class MediaModel(Model, Protocol):
    """A model with an item group: it computes media items once, and its cross layers read them."""

    input_vocab: int  # ids below it have embeddings; placeholders stand at vocab_size and above

    def encode_media(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """One preprocessed item -> its entries [tokens, D]."""
        ...

    def write_media(self, ops: Ops, entries: Tensor, kv: Sequence[LayerKV], pages: Tensor) -> None:
        """Write K and V of the entries into the item's pages int64 [n] in every cross layer; kv by layer."""
        ...
