"""`Ops` by native kernels, on torch CPU tensors.

Owns: the mapping from tensors to argument structs, packed linear weights.
Does not know: how kernels compute, the life of a step, models.
Invariants: bitwise batch-invariant: an output row depends on its own inputs and the instruction set, never on the other
rows, chunk sizes, page numbers or thread count. Outputs are new contiguous tensors. An `Ops` call costs 3 to 20 us of
Python (allocation of the output, addresses, one foreign call with the GIL released).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.errors import NotSupported
from aengine.kernels.native.library import (
    ADD_ARGS,
    ATTENTION_ARGS,
    EMBED_ARGS,
    GLU_ARGS,
    LINEAR_ARGS,
    OPERATIONS,
    PACK_ARGS,
    RMS_NORM_ARGS,
    ROPE_ARGS,
    Block,
    Context,
    WeightMemory,
    check,
)
from aengine.kernels.ops import AttentionSpec, Experts, LayerKV, Linear, RopeTable, StateSpec, StepBatch
from aengine.kernels.reference_cross import cross_attention, write_items
from aengine.kernels.reference_mixture import mixture
from aengine.kernels.reference_state import ShortConv

_CODES = {torch.float32: 0, torch.bfloat16: 1}
_SILU, _GELU_TANH = 0, 1


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in panels of its instruction set; `bias` fp32 [out] or None; `bias_address` 0 for none."""

    block: Block
    dtype: int
    in_features: int
    out_features: int
    bias: Tensor | None
    bias_address: int


def _code(tensor: Tensor) -> int:
    try:
        return _CODES[tensor.dtype]
    except KeyError:
        raise NotSupported(f"native kernels take float32 or bfloat16 tensors, not {tensor.dtype}") from None


def _dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _int32(x: Tensor) -> Tensor:
    return x if x.dtype is torch.int32 and x.is_contiguous() else x.to(torch.int32).contiguous()


class NativeOps:
    """See `aengine.kernels.ops.Ops`. Compute dtype float32 or bfloat16; weights and KV each of either."""

    def __init__(self, context: Context) -> None:
        self.name = f"native-{context.isa}"
        self.context = context
        self._memory = WeightMemory(context.library)
        self._pack = context.operation("pack")
        self._operations = {name: context.operation(name) for name in OPERATIONS}
        self._short_conv = ShortConv()

    def set_threads(self, threads: int) -> None:
        """Takes effect before the next operation; changes no bit of any result."""
        self.context.set_threads(threads)

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for an output."""
        return torch.empty(tuple(shape), dtype=dtype)

    def _run(self, name: str, args: bytes) -> None:
        """One operation over its packed argument struct."""
        check(self._operations[name](args), name)

    # ---- linear ----

    def prepare(self, linear: Linear) -> Linear:
        """Copy the weight into panels; the result's `weight` is a meta tensor that keeps only shape and dtype."""
        if isinstance(linear.packed, PackedLinear):
            return linear
        weight = linear.weight
        if linear.parts:
            weight = torch.cat([part.dequantise(weight.dtype) for part in linear.parts])
        if weight.dtype not in _CODES:
            weight = weight.to(torch.float32)
        weight = _dense_last(weight)
        out_features, in_features = weight.shape
        code = _code(weight)
        block = self._memory.take(self.context.packed_bytes(code, in_features, out_features))
        args = PACK_ARGS.pack(weight.data_ptr(), code, weight.stride(0), block.address, in_features, out_features)
        check(self._pack(args), "pack")
        bias = None if linear.bias is None else linear.bias.to(torch.float32).contiguous()
        packed = PackedLinear(block, code, in_features, out_features, bias, 0 if bias is None else bias.data_ptr())
        shape_only = torch.empty_like(weight, device="meta")
        return Linear(weight=shape_only, bias=linear.bias, packed=packed)

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        return self._project(x, w, x.dtype)

    def logits(self, x: Tensor, w: Linear) -> Tensor:
        return self._project(x, w, torch.float32)

    def _project(self, x: Tensor, w: Linear, dtype: torch.dtype) -> Tensor:
        packed = w.packed
        if not isinstance(packed, PackedLinear):
            raise TypeError("this weight was not prepared by NativeOps.prepare")
        x = _dense_last(x)
        rows, in_features = x.shape
        if in_features != packed.in_features:
            raise ValueError(f"x has {in_features} features, the weight takes {packed.in_features}")
        y = self._new((rows, packed.out_features), dtype)
        args = LINEAR_ARGS.pack(
            x.data_ptr(),
            _code(x),
            x.stride(0),
            packed.block.address,
            packed.dtype,
            packed.bias_address,
            y.data_ptr(),
            _CODES[dtype],
            packed.out_features,
            rows,
            in_features,
            packed.out_features,
        )
        self._run("linear", args)
        return y

    # ---- rows and elements ----

    def embed(self, table: Tensor | Linear, ids: Tensor) -> Tensor:
        if isinstance(table, Linear):
            return self._rows(table, ids)
        table, ids = table.contiguous(), _int32(ids)
        rows, dim = ids.shape[0], table.shape[1]
        out = self._new((rows, dim), table.dtype)
        args = EMBED_ARGS.pack(table.data_ptr(), _code(table), ids.data_ptr(), out.data_ptr(), rows, dim)
        self._run("embed", args)
        return out

    def _rows(self, linear: Linear, ids: Tensor) -> Tensor:
        """Rows of a packed weight, picked out of its panels."""
        packed, dtype = linear.packed, linear.weight.dtype
        assert isinstance(packed, PackedLinear)
        lanes = self.context.packed_bytes(packed.dtype, 1, 1) // dtype.itemsize
        memory = (ctypes.c_char * packed.block.size).from_address(packed.block.address)
        panels = torch.frombuffer(memory, dtype=dtype).view(-1, packed.in_features, lanes)
        panel, lane = ids.long() // lanes, ids.long() % lanes
        if dtype is torch.bfloat16:  # columns i and i + lanes / 2 share a word
            lane = lane % (lanes // 2) * 2 + lane // (lanes // 2)
        return panels[panel, :, lane]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dim() > 3:
            x = x.contiguous()
        x = _dense_last(x)
        dim = x.shape[-1]
        if x.dim() == 3:
            inner, stride0, stride1 = x.shape[1], x.stride(0), x.stride(1)
        else:
            inner, stride0, stride1 = 1, x.stride(0) if x.dim() == 2 else dim, dim
        out = self._new(x.shape, x.dtype)
        rows = out.numel() // dim
        args = RMS_NORM_ARGS.pack(
            x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0,
            _code(x), _code(weight), rows, inner, stride0, stride1, dim, eps,
        )  # fmt: skip
        self._run("rms_norm", args)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        dim = x.shape[-1]
        out, total = self._new(x.shape, x.dtype), self._new(x.shape, x.dtype)
        args = RMS_NORM_ARGS.pack(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            total.data_ptr(),
            _code(x),
            _code(weight),
            x.numel() // dim,
            1,
            dim,
            dim,
            dim,
            eps,
        )
        self._run("rms_norm", args)
        return out, total

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.contiguous(), y.contiguous()
        out = self._new(x.shape, x.dtype)
        self._run("add", ADD_ARGS.pack(x.data_ptr(), y.data_ptr(), out.data_ptr(), _code(x), x.numel(), 0.0))
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        x = x.contiguous()
        out = self._new(x.shape, x.dtype)
        self._run("add", ADD_ARGS.pack(x.data_ptr(), 0, out.data_ptr(), _code(x), x.numel(), factor))
        return out

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """Plain torch: one multiplication per element, so bitwise batch-invariant as it is."""
        return x * y

    def short_conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: StateSpec, batch: StepBatch) -> Tensor:
        """Plain torch, element by element in a fixed order, so bitwise batch-invariant as it is."""
        return self._short_conv(x, weight, bias, spec, batch)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, _SILU)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, _GELU_TANH)

    def _gated(self, gate_up: Tensor, act: int) -> Tensor:
        gate_up = _dense_last(gate_up)
        rows, features = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._new((rows, features), gate_up.dtype)
        args = GLU_ARGS.pack(gate_up.data_ptr(), out.data_ptr(), _code(gate_up), act, rows, features, gate_up.stride(0))
        self._run("glu", args)
        return out

    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.split(x, list(sizes), dim=-1))

    # ---- attention ----

    def rope(self, x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
        x, positions = _dense_last(x), _int32(positions)
        rows, heads, head_dim = x.shape
        out = self._new((rows, heads, head_dim), x.dtype)
        args = ROPE_ARGS.pack(
            x.data_ptr(),
            out.data_ptr(),
            positions.data_ptr(),
            table.cos.data_ptr(),
            table.sin.data_ptr(),
            _code(x),
            rows,
            heads,
            head_dim,
            table.cos.shape[1],
            x.stride(0),
            x.stride(1),
        )
        self._run("rope", args)
        return out

    def scale_positions(self, x: Tensor, positions: Tensor, factors: Tensor) -> Tensor:
        """Plain torch: one multiplication per query element, in few layers of few models."""
        return (x.float() * factors[positions].view(-1, 1, 1)).to(x.dtype)

    def mixture(self, x: Tensor, scores: Tensor, experts: Experts) -> Tensor:
        """The experts' linears run natively; choosing, activation and sum are plain torch."""
        return mixture(self, x, scores, experts)

    def cross_attention(self, q: Tensor, spec: AttentionSpec, batch: StepBatch) -> Tensor:
        """Plain torch, one token at a time: its shape, and so its bits, then depend on no other token of the step."""
        assert batch.cross is not None
        return cross_attention(q, batch.kv[spec.layer], spec, batch.cross, 1)

    def write_items(self, k: Tensor, v: Tensor, kv: LayerKV, pages: Tensor) -> None:
        """Plain torch: once an item."""
        write_items(k, v, kv, pages)

    def take(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x.index_select(0, tokens)

    def put(self, x: Tensor, tokens: Tensor, y: Tensor) -> Tensor:
        return x.index_copy(0, tokens, y)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, batch: StepBatch, sinks: Tensor | None = None
    ) -> Tensor:
        sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        q, k, v = _dense_last(q), _dense_last(k), _dense_last(v)
        if k.dtype is not q.dtype or v.dtype is not q.dtype:
            raise NotSupported(f"q, k, v must have one dtype, not {q.dtype}, {k.dtype}, {v.dtype}")
        kv, tables = batch.kv[spec.layer], batch.tables[spec.group]
        k_page, k_token, k_head, _ = kv.k.stride()
        v_page, v_token, v_head, _ = kv.v.stride()
        out = self._new((q.shape[0], spec.heads * spec.head_dim), q.dtype)
        args = ATTENTION_ARGS.pack(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
            _code(q), q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            kv.k.data_ptr(), kv.v.data_ptr(),
            _code(kv.k), k_page, k_token, k_head, v_page, v_token, v_head, kv.k.shape[1],
            tables.data_ptr(), tables.stride(0), batch.row_offsets.data_ptr(), batch.context.data_ptr(),
            batch.context.shape[0], spec.heads, spec.kv_heads, spec.head_dim, spec.window, spec.chunk,
            spec.scale, spec.softcap, 0 if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
        self._run("attention", args)
        return out
