"""Attention by FlashInfer; every other op by the backend it is put over.

Owns: block tables as FlashInfer wants them, wrappers and their plans, the workspaces of plans in flight.
Does not know: models, steps' lives, which package version is installed beyond the calls it makes.
Invariants: lengths come from the host's columns, so that planning reads nothing back. A plan's pinned workspace is not
written again before its copy to the device has run. Layers that differ in nothing a plan knows share one. What
FlashInfer cannot do (chunks, sinks, int8 pages, other sizes of heads) goes to the other backend, layer by layer.

Sampling is none of this: see `runner.cuda.flash_sampling`.

    row of 37 tokens, page 16, window 8      positions 29 .. 36 are seen: pages 1 and 2 of the table
    indptr .. +2    indices table[row, 1:3]    last_page_len 5
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.ops import AttentionSpec, Ops, RopeTable, StepBatch
from aengine.kernels.reference_attention import stored_as

WORKSPACE_BYTES = 128 * 2**20
INT_WORKSPACE_BYTES = 8 * 2**20
# Plans whose copy may not have run yet: those of depth + 2 steps, for each kind of layer.
PLANS_IN_FLIGHT = 4
HEAD_DIMS = (64, 128, 256)  # that its kernels are made for
TENSOR_CORE_GROUP = 4  # query heads per KV head from which its decode kernel on tensor cores is the faster one


@runtime_checkable
class StoringOps(Protocol):
    """Ops that rotate and write apart from attending."""

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, batch: StepBatch, rope: RopeTable | None
    ) -> Tensor:
        """Write k and v into their pages, k rotated -> q, rotated."""
        ...


@dataclass(frozen=True, slots=True)
class _Kind:
    """All that a plan depends on besides lengths: layers of one kind share plans."""

    group: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float
    page: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Rows:
    """On the host, int32: indptr [R + 1], last_page_len [R], first_page [R]: pages before it are not seen."""

    indptr: NDArray[np.int32]
    last_page_len: NDArray[np.int32]
    first_page: NDArray[np.int32]


def rows_of(starts: tuple[int, ...], counts: tuple[int, ...], page: int, window: int, columns: int) -> _Rows:
    """What rows read of their block tables of `columns` pages when `counts` tokens from `starts` on are computed."""
    start = np.array(starts, np.int64)
    end = np.minimum(start + np.array(counts, np.int64), columns * page)
    first = np.maximum(start - window + 1, 0) // page if window else np.zeros_like(start)
    indptr = np.zeros(len(start) + 1, np.int32)
    np.cumsum(-(-end // page) - first, out=indptr[1:])
    return _Rows(indptr, ((end - 1) % page + 1).astype(np.int32), first.astype(np.int32))


class _PinnedRing:
    """Pinned workspaces in turn, each guarded by an event behind the copy that reads it."""

    def __init__(self, pin: bool) -> None:
        self._pin, self._turn = pin, 0
        self._ring: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def grow(self) -> None:
        for _ in range(PLANS_IN_FLIGHT):
            self._ring.append((torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=self._pin), None))

    def plan(self, wrapper: Any, plan: Callable[[], None]) -> None:
        at, self._turn = self._turn, (self._turn + 1) % len(self._ring)
        memory, guard = self._ring[at]
        if guard is not None:
            guard.synchronize()
        wrapper._pin_memory_int_workspace_buffer = memory
        plan()
        if self._pin:
            guard = torch.cuda.Event()  # type: ignore[no-untyped-call]
            guard.record()
            self._ring[at] = memory, guard


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What captured plans of one kind keep their indices in: fixed addresses, shared by all numbers of rows."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


class FlashInferOps:
    """`Ops` whose attention is FlashInfer's. `capturing()`: whether the current stream records a graph."""

    name = "flashinfer"
    capturable = True

    def __init__(
        self,
        base: Ops,
        device: torch.device,
        *,
        library: Any = None,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        self._base, self._device, self._capturing = base, device, capturing
        self._library = library or import_module("flashinfer")
        self._pin = device.type == "cuda"
        self._workspace = torch.zeros(WORKSPACE_BYTES if self._pin else 0, dtype=torch.uint8, device=device)
        self._ring = _PinnedRing(self._pin)
        self._int_workspaces: dict[_Kind, Tensor] = {}
        self._eager: dict[tuple[str, _Kind], Any] = {}
        self._captured: dict[tuple[int, _Kind], Any] = {}
        self._buffers: dict[_Kind, _Buffers] = {}
        self._batch: StepBatch | None = None
        self._planned: dict[_Kind, Any] = {}
        self._places: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        """Every op but attention."""
        return getattr(self._base, name)

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
        kv = batch.kv[spec.layer]
        odd = spec.chunk or spec.head_dim not in HEAD_DIMS or kv.k_scale is not None or q.dtype is torch.float32
        if sinks is not None or odd:
            return self._base.attention(q, k, v, spec, batch, sinks, rope)
        if batch is not self._batch:
            self._batch, self._planned, self._places = batch, {}, {}
        page = kv.page_tokens
        kind = _Kind(
            spec.group, spec.heads, spec.kv_heads, spec.head_dim, spec.scale, spec.window, spec.softcap, page,
            q.dtype, kv.k.dtype,
        )  # fmt: skip
        q = self._store(q, k, v, spec, batch, rope)
        if self._capturing():
            wrapper = self._captured[len(batch.host_counts), kind]
        else:
            wrapper = self._planned.get(kind)
            if wrapper is None:
                wrapper = self._planned[kind] = self._plan(kind, batch)
        out: Tensor = wrapper.run(q, (kv.k, kv.v))
        return out.flatten(1)

    def _store(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, batch: StepBatch, rope: RopeTable | None
    ) -> Tensor:
        """Write K and V, k rotated -> q, rotated. By the other backend's one kernel, where it has it."""
        if isinstance(self._base, StoringOps):
            return self._base.rotate_and_store(q, k, v, spec, batch, rope)
        if rope is not None:
            q, k = self._base.rope(q, batch.positions, rope), self._base.rope(k, batch.positions, rope)
        kv = batch.kv[spec.layer]
        at = self._place(spec.group, kv.page_tokens, batch)
        kv.k.index_put_(at, stored_as(k, kv.k.dtype))
        kv.v.index_put_(at, stored_as(v, kv.v.dtype))
        return q

    def _place(self, group: int, page: int, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """(page, place in it) of each of the step's tokens; once for all layers of a group."""
        found = self._places.get((group, page))
        if found is None:
            tokens = torch.arange(len(batch.positions), device=self._device)
            rows = torch.searchsorted(batch.row_offsets[1:], tokens, right=True)
            positions = batch.positions.long()
            table = batch.tables[group]
            columns = (positions // page).clamp_(max=table.shape[1] - 1)
            found = table[rows, columns].long(), positions % page
            self._places[group, page] = found
        return found

    # ---- plans

    def plan_captured(self, batch: StepBatch) -> None:
        """Plan decode steps of these rows for the graphs of their number, for each kind of layer seen so far."""
        for kind in self._int_workspaces:
            key = len(batch.host_counts), kind
            if key not in self._captured:
                self._captured[key] = self._captured_wrapper(kind, batch)
            self._plan_decode(self._captured[key], kind, batch)

    def _plan(self, kind: _Kind, batch: StepBatch) -> Any:
        decode = all(count == 1 for count in batch.host_counts)
        key = ("decode" if decode else "prefill", kind)
        if key not in self._eager:
            self._eager[key] = self._decode_wrapper(kind) if decode else self._prefill_wrapper(kind)
        wrapper = self._eager[key]
        if decode:
            self._plan_decode(wrapper, kind, batch)
        else:
            self._plan_prefill(wrapper, kind, batch)
        return wrapper

    def _plan_decode(self, wrapper: Any, kind: _Kind, batch: StepBatch) -> None:
        rows, indices = self._pages(kind, batch)
        self._ring.plan(
            wrapper,
            lambda: wrapper.plan(
                indptr=self._host(rows.indptr),
                indices=indices,
                last_page_len=self._host(rows.last_page_len),
                num_qo_heads=kind.heads,
                num_kv_heads=kind.kv_heads,
                head_dim=kind.head_dim,
                page_size=kind.page,
                pos_encoding_mode="NONE",
                window_left=kind.window - 1,
                logits_soft_cap=kind.softcap,
                q_data_type=kind.q_dtype,
                kv_data_type=kind.kv_dtype,
                sm_scale=kind.scale,
                non_blocking=True,
            ),
        )

    def _plan_prefill(self, wrapper: Any, kind: _Kind, batch: StepBatch) -> None:
        rows, indices = self._pages(kind, batch)
        offsets = np.zeros(len(batch.host_counts) + 1, np.int32)
        np.cumsum(batch.host_counts, out=offsets[1:])
        self._ring.plan(
            wrapper,
            lambda: wrapper.plan(
                qo_indptr=self._host(offsets),
                paged_kv_indptr=self._host(rows.indptr),
                paged_kv_indices=indices,
                paged_kv_last_page_len=self._host(rows.last_page_len),
                num_qo_heads=kind.heads,
                num_kv_heads=kind.kv_heads,
                head_dim_qk=kind.head_dim,
                page_size=kind.page,
                causal=True,
                pos_encoding_mode="NONE",
                sm_scale=kind.scale,
                window_left=kind.window - 1,
                logits_soft_cap=kind.softcap,
                q_data_type=kind.q_dtype,
                kv_data_type=kind.kv_dtype,
                non_blocking=True,
            ),
        )

    def _pages(self, kind: _Kind, batch: StepBatch) -> tuple[_Rows, Tensor]:
        """-> (rows, their pages one after another, int32 on the device)."""
        table = batch.tables[kind.group]
        rows = rows_of(batch.host_starts, batch.host_counts, kind.page, kind.window, table.shape[1])
        total, count = int(rows.indptr[-1]), len(rows.first_page)
        columns = np.zeros((3, count), np.int32)
        columns[0], columns[1], columns[2] = np.diff(rows.indptr), rows.first_page, rows.indptr[:-1]
        sizes, first, offsets = self._host(columns).to(self._device, non_blocking=True).long()
        numbers = torch.arange(count, device=self._device)
        row = torch.repeat_interleave(numbers, sizes, output_size=total)
        column = torch.arange(total, device=self._device) + (first - offsets)[row]
        return rows, table[row, column]

    def _host(self, values: NDArray[np.int32]) -> Tensor:
        made = torch.from_numpy(values)
        return made.pin_memory() if self._pin else made

    # ---- wrappers

    def _decode_wrapper(self, kind: _Kind, **more: Any) -> Any:
        made = self._library.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=self._workspace,
            kv_layout="NHD",
            use_tensor_cores=kind.heads // kind.kv_heads >= TENSOR_CORE_GROUP,
            **more,
        )
        return self._with_workspace(made, kind)

    def _prefill_wrapper(self, kind: _Kind) -> Any:
        made = self._library.BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer=self._workspace, kv_layout="NHD"
        )
        return self._with_workspace(made, kind)

    def _captured_wrapper(self, kind: _Kind, batch: StepBatch) -> Any:
        rows, columns = len(batch.host_counts), batch.tables[kind.group].shape[1]
        held = self._buffers.get(kind)
        if held is None or len(held.last_page_len) < rows:
            held = self._buffers[kind] = _Buffers(*(self._ints(n) for n in (rows + 1, rows * columns, rows)))
        return self._decode_wrapper(
            kind,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=held.indptr[: rows + 1],
            paged_kv_indices_buffer=held.indices,
            paged_kv_last_page_len_buffer=held.last_page_len[:rows],
        )

    def _ints(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)

    def _with_workspace(self, wrapper: Any, kind: _Kind) -> Any:
        """Wrappers of one kind are never in use at once, so they share what their plans are copied to."""
        if kind not in self._int_workspaces:
            size = INT_WORKSPACE_BYTES if self._pin else 0
            self._int_workspaces[kind] = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._ring.grow()
        wrapper.reset_workspace_buffer(
            float_workspace_buffer=self._workspace, int_workspace_buffer=self._int_workspaces[kind]
        )
        return wrapper
