"""`Ops` by native kernels, on torch CPU tensors.

Owns: the mapping from tensors to argument structs.
Does not know: how kernels compute, how weights are packed, the life of a step, models.
Invariants: bitwise batch-invariant: an output row depends on its own inputs and the instruction set, never on the other
rows, chunk sizes, page numbers or thread count. Outputs are new contiguous tensors. An `Ops` call costs 3 to 20 us of
Python (allocation of the output, addresses, one foreign call with the GIL released).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.errors import NotSupported
from aengine.kernels.native.arguments import code, dense_int32, dense_last, kv_code, linear_args, packed_linear
from aengine.kernels.native.cross import SeenItems
from aengine.kernels.native.experts import PackedExperts
from aengine.kernels.native.library import (
    ADD_ARGS,
    ATTENTION_ARGS,
    COLUMNS_ARGS,
    EMBED_ARGS,
    EMBED_PACKED_ARGS,
    GLU_ARGS,
    MUL_ARGS,
    OPERATIONS,
    PUT_ARGS,
    RMS_NORM_ARGS,
    ROPE_ARGS,
    SCALE_POSITIONS_ARGS,
    SHORT_CONV_ARGS,
    TAKE_ARGS,
    Context,
    check,
)
from aengine.kernels.native.packed import CODES, PackedLinear, Packer
from aengine.kernels.native.unpack import Unpacker
from aengine.kernels.ops import AttentionSpec, Experts, LayerKV, Linear, RopeTable, StateSpec, StepBatch
from aengine.kernels.reference_cross import write_items

_SILU, _GELU_TANH = 0, 1


class NativeOps:
    """See `aengine.kernels.ops.Ops`. Compute dtype float32 or bfloat16; weights and KV each of either; KV also int8."""

    def __init__(self, context: Context) -> None:
        self.name = f"native-{context.isa}"
        self.context = context
        self._packer = Packer(context)
        self.unpack_blocks = Unpacker(context).unpack  # asked for by whoever loads a model
        self._operations = {name: context.operation(name) for name in OPERATIONS}
        self._experts: dict[int, PackedExperts] = {}
        self._seen: SeenItems | None = None  # of the last step: its cross layers have one

    def set_threads(self, threads: int) -> None:
        """Takes effect before the next operation; changes no bit of any result."""
        self.context.set_threads(threads)

    def touch(self, memory: Tensor) -> None:
        """Has the system give the bytes of a contiguous tensor, which it else does at the first write to each page;
        changes none of them. Holds neither the interpreter nor the context: other threads may write there."""
        self.context.library.ae_touch(memory.data_ptr(), memory.nbytes)

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for an output."""
        return torch.empty(tuple(shape), dtype=dtype)

    def _run(self, name: str, args: bytes) -> None:
        """One operation over its packed argument struct."""
        check(self._operations[name](args), name)

    # ---- linear ----

    def prepare(self, linear: Linear) -> Linear:
        """Copy the weight into panels; the result's `weight` is a meta tensor that keeps only shape and dtype.

        A quantised weight multiplies activations rounded to int8, one scale per row and 32 inputs, with a second code
        for inputs of scales that stand out; to int16 with one scale per row where its codes have 8 bits.
        """
        return linear if isinstance(linear.packed, PackedLinear) else self._packer.pack(linear)

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        return self._project(x, w, x.dtype)

    def logits(self, x: Tensor, w: Linear) -> Tensor:
        return self._project(x, w, torch.float32)

    def _project(self, x: Tensor, w: Linear, dtype: torch.dtype) -> Tensor:
        x = dense_last(x)
        rows, in_features = x.shape
        if in_features != packed_linear(w).in_features:
            raise ValueError(f"x has {in_features} features, the weight takes {packed_linear(w).in_features}")
        order = packed_linear(w).order
        if order is not None:
            x = self._columns(x, order)
        y = self._new((rows, w.out_features), dtype)
        self._run("linear", linear_args(w, x.data_ptr(), x.dtype, x.stride(0), y.data_ptr(), dtype, rows))
        return y

    def _columns(self, x: Tensor, order: Tensor) -> Tensor:
        """The columns of x [T, in] in the order of a weight's codes."""
        out = self._new(x.shape, x.dtype)
        args = COLUMNS_ARGS.pack(
            x.data_ptr(), order.data_ptr(), out.data_ptr(), *x.shape, x.stride(0), x.element_size()
        )  # fmt: skip
        self._run("columns", args)
        return out

    # ---- rows and elements ----

    def embed(self, table: Tensor | Linear, ids: Tensor) -> Tensor:
        ids = dense_int32(ids)
        if isinstance(table, Linear):
            return self._embed_packed(packed_linear(table), ids, table.weight.dtype)
        table = table.contiguous()
        rows, dim = ids.shape[0], table.shape[1]
        out = self._new((rows, dim), table.dtype)
        args = EMBED_ARGS.pack(table.data_ptr(), code(table), ids.data_ptr(), out.data_ptr(), rows, dim)
        self._run("embed", args)
        return out

    def _embed_packed(self, packed: PackedLinear, ids: Tensor, dtype: torch.dtype) -> Tensor:
        dtype = dtype if dtype in CODES else torch.float32
        out = self._new((ids.shape[0], packed.in_features), dtype)
        args = EMBED_PACKED_ARGS.pack(
            packed.block.address, packed.dtype, ids.data_ptr(), out.data_ptr(), CODES[dtype],
            ids.shape[0], packed.in_features, packed.out_features,
        )  # fmt: skip
        self._run("embed_packed", args)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dim() > 3:
            x = x.contiguous()
        x = dense_last(x)
        dim = x.shape[-1]
        if x.dim() == 3:
            inner, stride0, stride1 = x.shape[1], x.stride(0), x.stride(1)
        else:
            inner, stride0, stride1 = 1, x.stride(0) if x.dim() == 2 else dim, dim
        out = self._new(x.shape, x.dtype)
        rows = out.numel() // dim
        args = RMS_NORM_ARGS.pack(
            x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0,
            code(x), code(weight), rows, inner, stride0, stride1, dim, eps,
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
            code(x),
            code(weight),
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
        self._run("add", ADD_ARGS.pack(x.data_ptr(), y.data_ptr(), out.data_ptr(), code(x), x.numel(), 0.0))
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        x = x.contiguous()
        out = self._new(x.shape, x.dtype)
        self._run("add", ADD_ARGS.pack(x.data_ptr(), 0, out.data_ptr(), code(x), x.numel(), factor))
        return out

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = dense_last(x), dense_last(y)
        out = self._new(x.shape, x.dtype)
        args = MUL_ARGS.pack(
            x.data_ptr(), y.data_ptr(), out.data_ptr(), code(x), *x.shape, x.stride(0), y.stride(0)
        )  # fmt: skip
        self._run("mul", args)
        return out

    def short_conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: StateSpec, batch: StepBatch) -> Tensor:
        x = x.contiguous()
        taps, dim = weight.shape
        pages, tables = batch.states[spec.layer].parts[0], batch.tables[spec.group]
        rows = batch.context.shape[0]
        out, before = self._new(x.shape, x.dtype), self._new((rows, taps - 1, dim), x.dtype)
        args = SHORT_CONV_ARGS.pack(
            x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), before.data_ptr(),
            pages.data_ptr(), tables.data_ptr(), batch.row_offsets.data_ptr(),
            code(x), code(pages), pages.stride(0), tables.stride(0), rows, dim, taps,
        )  # fmt: skip
        self._run("short_conv", args)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, _SILU)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, _GELU_TANH)

    def _gated(self, gate_up: Tensor, act: int) -> Tensor:
        gate_up = dense_last(gate_up)
        rows, features = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._new((rows, features), gate_up.dtype)
        args = GLU_ARGS.pack(gate_up.data_ptr(), out.data_ptr(), code(gate_up), act, rows, features, gate_up.stride(0))
        self._run("glu", args)
        return out

    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.split(x, list(sizes), dim=-1))

    # ---- attention ----

    def rope(self, x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
        x, positions = dense_last(x), dense_int32(positions)
        rows, heads, head_dim = x.shape
        out = self._new((rows, heads, head_dim), x.dtype)
        args = ROPE_ARGS.pack(
            x.data_ptr(),
            out.data_ptr(),
            positions.data_ptr(),
            table.cos.data_ptr(),
            table.sin.data_ptr(),
            code(x),
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
        x, positions = dense_last(x), dense_int32(positions)
        rows, heads, head_dim = x.shape
        out = self._new(x.shape, x.dtype)
        args = SCALE_POSITIONS_ARGS.pack(
            x.data_ptr(), out.data_ptr(), positions.data_ptr(), factors.data_ptr(),
            code(x), rows, heads, head_dim, x.stride(0), x.stride(1),
        )  # fmt: skip
        self._run("scale_positions", args)
        return out

    def mixture(self, x: Tensor, scores: Tensor, experts: Experts) -> Tensor:
        x, scores = x.contiguous(), scores.contiguous()
        packed = self._experts.get(id(experts))
        if packed is None or packed.experts is not experts or packed.dtype is not x.dtype:
            tables = (self._pack_experts(linears, x.dtype) for linears in (experts.gate_up, experts.down))
            packed = self._experts[id(experts)] = PackedExperts(experts, x.dtype, *tables)
        workspaces = [self._new((len(x), *shape), dtype) for shape, dtype in packed.workspaces]
        out = self._new(x.shape, x.dtype)
        args = packed.args(x.data_ptr(), scores.data_ptr(), out.data_ptr(), code(x), len(x), workspaces)
        self._run("mixture", args)
        return out

    def _pack_experts(self, linears: Sequence[Linear], dtype: torch.dtype) -> bytes:
        if any(packed_linear(w).order is not None for w in linears):
            raise NotSupported("an expert's inputs cannot be reordered in a native mixture")
        return b"".join(linear_args(w, 0, dtype, packed_linear(w).in_features, 0, dtype, 0) for w in linears)

    def cross_attention(self, q: Tensor, spec: AttentionSpec, batch: StepBatch) -> Tensor:
        assert batch.cross is not None
        kv, seen = batch.kv[spec.layer], self._seen
        if seen is None or seen.cross is not batch.cross or seen.page_tokens != kv.page_tokens:
            seen = self._seen = SeenItems.of(batch.cross, kv.page_tokens)
        return self._attend(dense_last(q), None, None, spec, kv, seen.rows, None, seen.items)

    def write_items(self, k: Tensor, v: Tensor, kv: LayerKV, pages: Tensor) -> None:
        write_items(k, v, kv, pages)

    def take(self, x: Tensor, tokens: Tensor) -> Tensor:
        x, tokens = dense_last(x), tokens.contiguous()
        out = self._new((len(tokens), x.shape[1]), x.dtype)
        size = x.element_size()
        args = TAKE_ARGS.pack(
            x.data_ptr(), tokens.data_ptr(), out.data_ptr(), len(tokens), x.shape[1] * size, x.stride(0) * size
        )  # fmt: skip
        self._run("take", args)
        return out

    def put(self, x: Tensor, tokens: Tensor, y: Tensor) -> Tensor:
        x, tokens, y = x.contiguous(), tokens.contiguous(), y.contiguous()
        out = self._new(x.shape, x.dtype)
        args = PUT_ARGS.pack(
            x.data_ptr(), tokens.data_ptr(), y.data_ptr(), out.data_ptr(),
            len(x), len(tokens), x.shape[1] * x.element_size(),
        )  # fmt: skip
        self._run("put", args)
        return out

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
        if rope is not None:
            q, k = self.rope(q, batch.positions, rope), self.rope(k, batch.positions, rope)
        sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        q, k, v = dense_last(q), dense_last(k), dense_last(v)
        if k.dtype is not q.dtype or v.dtype is not q.dtype:
            raise NotSupported(f"q, k, v must have one dtype, not {q.dtype}, {k.dtype}, {v.dtype}")
        tables = batch.tables[spec.group]
        rows = (
            tables.data_ptr(), tables.stride(0), batch.row_offsets.data_ptr(), batch.context.data_ptr(),
            len(batch.context),
        )  # fmt: skip
        return self._attend(q, k, v, spec, batch.kv[spec.layer], rows, sinks, (0, 0))

    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        spec: AttentionSpec,
        kv: LayerKV,
        rows: tuple[int, int, int, int, int],
        sinks: Tensor | None,
        items: tuple[int, int],
    ) -> Tensor:
        """Without k and v nothing is written. rows: table, its stride, row_offsets, context, number of rows."""
        k_scale, v_scale = kv.k_scale, kv.v_scale
        new = (x.stride()[:2] if x is not None else (0, 0) for x in (k, v))
        out = self._new((q.shape[0], spec.heads * spec.head_dim), q.dtype)
        args = ATTENTION_ARGS.pack(
            q.data_ptr(), 0 if k is None else k.data_ptr(), 0 if v is None else v.data_ptr(), out.data_ptr(),
            code(q), q.stride(0), q.stride(1), *next(new), *next(new), kv.k.data_ptr(), kv.v.data_ptr(),
            kv_code(kv), *kv.k.stride()[:3], *kv.v.stride()[:3], kv.k.shape[1], *rows,
            spec.heads, spec.kv_heads, spec.head_dim, spec.window, spec.chunk,
            spec.scale, spec.softcap, 0 if sinks is None else sinks.data_ptr(),
            0 if k_scale is None else k_scale.data_ptr(), 0 if v_scale is None else v_scale.data_ptr(),
            *((0, 0, 0) if k_scale is None else k_scale.stride()), *items,
        )  # fmt: skip
        self._run("attention", args)
        return out
