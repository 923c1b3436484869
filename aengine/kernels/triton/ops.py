"""`Ops` on CUDA tensors: Triton kernels, and torch where a torch operation is as good.

Owns: which kernel or torch operation each op is, what `prepare` makes of a weight.
Does not know: models, requests, streams, graphs.
Invariants: nothing waits for the device or copies to the host. Outputs are new tensors. Kernels of attention, norms,
rotations, convolutions and sampling treat each row alone, whatever else is in the batch. Linears do not promise that:
cuBLAS and the packed kernels choose their blocks by the number of rows. A step's tokens cut otherwise give other bits
where a row moves between the decode and the prefill kernel.

Plain torch: add, mul, scale, scale_positions, take, put, dense embed and linear, write_items, the routing of mixtures.
Also runs on CPU tensors, in Triton's interpreter, which is how it is tested without a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.ops import AttentionSpec, Experts, LayerKV, Linear, RopeTable, StateSpec, StepBatch
from aengine.kernels.reference_cross import write_items
from aengine.kernels.triton import fp8, packed
from aengine.kernels.triton.attention import CrossAttention, attend_positions, write_kv
from aengine.kernels.triton.device.rows import glu_kernel, rms_norm_kernel, rope_kernel
from aengine.kernels.triton.device.state import gather_state_kernel, short_conv_kernel, store_state_kernel
from aengine.kernels.triton.experts import Mixture
from aengine.kernels.triton.launch import dense_last, power_of_two
from aengine.kernels.triton.packed import PackedWeight

_GLU_BLOCK = 1024
_CHANNELS = 256
_LOGITS_BLOCK = 8192  # vocabulary rows widened at a time where the device has no bf16 product with fp32 result


class TritonOps:
    """See `aengine.kernels.ops.Ops`. Compute dtype float32, float16 or bfloat16; KV any of them, or int8."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.holds_float8 = fp8.able(device)  # see `Quantised.floating`
        self._cross = CrossAttention()
        self._mixture = Mixture(device)

    # ---- linear ----

    def prepare(self, linear: Linear) -> Linear:
        """Dense weights move to the device as they are. Quantised ones are packed there (fp8 stays fp8), or
        dequantised where their groups are no multiple of 16 inputs. The result's `weight` is a meta tensor where it
        is packed."""
        if linear.packed is not None:
            return linear
        shape = torch.empty(linear.weight.shape, dtype=linear.weight.dtype, device="meta")
        bias = None if linear.bias is None else linear.bias.to(self.device)
        if not linear.parts and linear.weight.dtype is fp8.E4M3:
            scale = torch.ones(linear.out_features, device=self.device)
            kept = fp8.Fp8Weight(linear.weight.to(self.device), scale, bias)
            return Linear(shape.to(torch.bfloat16), bias, packed=kept)
        if not linear.parts:
            return Linear(linear.weight.to(self.device), bias)
        floating = [part.floating for part in linear.parts]
        if all(floating) and all(size % fp8.ALIGN == 0 for size in shape.shape):
            codes = torch.cat([part.codes.view(torch.uint8) for part in linear.parts]).view(fp8.E4M3).to(self.device)
            scale = torch.cat([part.scale[:, 0] for part in linear.parts]).to(self.device)
            return Linear(shape, bias, packed=fp8.Fp8Weight(codes, scale, bias))
        if not any(floating) and packed.packable(linear.parts):
            return Linear(shape, bias, packed=packed.pack(linear.parts, bias, self.device))
        weight = torch.cat([part.dequantise(linear.weight.dtype) for part in linear.parts])
        return Linear(weight.to(self.device), bias)

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        if isinstance(w.packed, PackedWeight):
            return packed.linear(x, w.packed, x.dtype)
        if isinstance(w.packed, fp8.Fp8Weight):
            return fp8.linear(x, w.packed, x.dtype)
        return F.linear(x, w.weight, w.bias)

    def logits(self, x: Tensor, w: Linear) -> Tensor:
        """fp32 sums, not rounded: bf16 would make ties common."""
        if isinstance(w.packed, PackedWeight):
            return packed.linear(x, w.packed, torch.float32)
        if isinstance(w.packed, fp8.Fp8Weight):
            return fp8.linear(x.float(), w.packed, torch.float32)
        out = self._dense_logits(x, w.weight)
        return out if w.bias is None else out.add_(w.bias.float())

    def _dense_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        if weight.dtype is torch.float32:
            return F.linear(x.float(), weight)
        if x.is_cuda and x.dtype is weight.dtype:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        wide = x.float()
        return torch.cat([F.linear(wide, block.float()) for block in torch.split(weight, _LOGITS_BLOCK)], dim=-1)

    def embed(self, table: Tensor | Linear, ids: Tensor) -> Tensor:
        if isinstance(table, Tensor):
            return F.embedding(ids, table)
        if isinstance(table.packed, PackedWeight):
            return packed.embed(table.packed, ids, table.weight.dtype)
        if isinstance(table.packed, fp8.Fp8Weight):
            rows = table.packed.codes.view(torch.uint8).index_select(0, ids.long()).view(fp8.E4M3)
            scale = table.packed.scale.index_select(0, ids.long())
            return fp8.Fp8Weight(rows, scale, None).dequantise(table.weight.dtype)
        return F.embedding(ids, table.weight)

    # ---- rows and elements ----

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dim() > 3:
            x = x.contiguous()
        x = dense_last(x)
        inner, stride, stride_inner = 1, x.stride(0) if x.dim() == 2 else x.shape[-1], x.shape[-1]
        if x.dim() == 3:
            inner, stride, stride_inner = x.shape[1], x.stride(0), x.stride(1)
        return self._rms_norm(x, None, weight, eps, inner, stride, stride_inner)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, residual, dim = x.contiguous(), residual.contiguous(), x.shape[-1]
        return self._rms_norm(x, residual, weight, eps, 1, dim, dim)

    def _rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, inner: int, stride: int, stride_inner: int
    ) -> tuple[Tensor, Tensor]:
        """-> (normed, the sum that was normed)."""
        dim = x.shape[-1]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = out if residual is None else torch.empty_like(out)
        if out.numel():
            block = power_of_two(dim)
            rms_norm_kernel[(out.numel() // dim,)](
                x, residual, weight.contiguous(), out, None if residual is None else total, eps,
                inner, stride, stride_inner, D=dim, BLOCK=block, num_warps=min(16, max(1, block // 512)),
            )  # fmt: skip
        return out, total

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, gelu=False)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, gelu=True)

    def _gated(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        gate_up = dense_last(gate_up)
        tokens, features = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((tokens, features))
        if tokens:
            block = min(_GLU_BLOCK, power_of_two(features))
            grid = (tokens, -(-features // block))
            glu_kernel[grid](gate_up, out, features, gate_up.stride(0), GELU=gelu, BLOCK=block)
        return out

    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.split(x, list(sizes), dim=-1))

    def take(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x.index_select(0, tokens)

    def put(self, x: Tensor, tokens: Tensor, y: Tensor) -> Tensor:
        return x.index_copy(0, tokens, y)

    # ---- attention ----

    def rope(self, x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
        x = dense_last(x)
        tokens, heads, dim = x.shape
        half = table.rotary_dim // 2
        out = x.new_empty((tokens, heads, dim))
        if tokens:
            rope_kernel[(tokens,)](
                x, out, positions, table.cos.contiguous(), table.sin.contiguous(), x.stride(0), x.stride(1),
                HEADS=heads, D=dim, HALF=half, BH=power_of_two(heads), BHALF=power_of_two(half),
                BREST=power_of_two(dim - 2 * half) if dim > 2 * half else 0,
            )  # fmt: skip
        return out

    def scale_positions(self, x: Tensor, positions: Tensor, factors: Tensor) -> Tensor:
        return (x.float() * factors[positions].view(-1, 1, 1)).to(x.dtype)

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
        """A row with context 0 is padding: nothing is written for it, and it gets zeros. Tokens behind the last row
        are padding too and get anything."""
        q = self.rotate_and_store(q, k, v, spec, batch, rope)
        return attend_positions(q, spec, batch, None if sinks is None else sinks.float().contiguous())

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, batch: StepBatch, rope: RopeTable | None
    ) -> Tensor:
        """Write k and v into their pages, k rotated -> q, rotated: one launch."""
        return write_kv(q, k, v, batch.kv[spec.layer], spec, batch, rope)

    def cross_attention(self, q: Tensor, spec: AttentionSpec, batch: StepBatch) -> Tensor:
        assert batch.cross is not None
        return self._cross(q, spec, batch.cross, batch.kv[spec.layer])

    def write_items(self, k: Tensor, v: Tensor, kv: LayerKV, pages: Tensor) -> None:
        """Once an item."""
        write_items(k, v, kv, pages)

    # ---- mixtures and states ----

    def mixture(self, x: Tensor, scores: Tensor, experts: Experts) -> Tensor:
        return self._mixture(x.contiguous(), scores, experts)

    def short_conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: StateSpec, batch: StepBatch) -> Tensor:
        """A row that writes page 0 leaves no state."""
        x = x.contiguous()
        (tokens, dim), taps, rows = x.shape, weight.shape[0], len(batch.context)
        pages, table = batch.states[spec.layer].parts[0], batch.tables[spec.group].contiguous()
        out, after = torch.empty_like(x), x.new_empty((rows, taps - 1, dim))
        block = min(_CHANNELS, power_of_two(dim))
        columns, size = -(-dim // block), (taps - 1) * dim
        shape = {"TAPS": taps, "D": dim, "BLOCK": block, "enable_fp_fusion": False}
        if tokens:
            short_conv_kernel[(tokens, columns)](
                x, weight, bias, out, pages, table, batch.row_offsets, rows, pages.stride(0), **shape
            )
        if rows and size:
            gather_state_kernel[(rows, columns)](x, after, pages, table, batch.row_offsets, pages.stride(0), **shape)
            store_state_kernel[(rows, -(-size // block))](after, pages, table, pages.stride(0), SIZE=size, BLOCK=block)
        return out
