"""Attention over paged KV in plain torch.

Owns: writing a step's K and V into their pages, and causal attention of ragged rows through block tables.
Does not know: models, requests, how pages are allocated.
Invariants: all of a step's K and V are written before any is read (rows of one step may share pages). Bytes of a page
outside a row's visible positions never reach the result, whatever they hold: NaN times a zero weight is NaN, so such K
and V are zeroed, not only masked. Scores, softmax and sums are fp32.

    positions    0        lo                 p          context
    pages        |--------|--|---------------|----------|
    read         .........[ whole pages from here to the query ]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.ops import AttentionSpec, LayerKV, StepBatch
from aengine.kernels.uploads import uploaded

# Queries of one prefill row scored together: 9 heads x 128 x 8,192 keys x 4 B = 36 MiB of scores at most.
QUERY_BLOCK = 128
# Decode rows share a bucket while padding stays under a quarter of the shortest context plus this many tokens.
BUCKET_SLACK_TOKENS = 64
# Context tokens gathered at once: 8,192 x 3 KV heads x 64 x 4 B = 6 MiB for K, as much for V; more only costs memory.
BUCKET_TOKENS = 8192
FP8_MOST = 448.0  # the greatest e4m3


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Decode rows of similar context.

    tokens [B]: which of the step's; pages [B, n]: read for each, L = n * page tokens; seen bool [B, 1, 1, L];
    unseen: (row, token) indices of the others.
    """

    tokens: Tensor
    pages: Tensor
    seen: Tensor
    unseen: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A row of several tokens: tokens first_token .. first_token + count of the step, from position `start`."""

    row: int
    first_token: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a step's tokens go, and what each row reads, for all layers of one group, window and chunk."""

    pages: Tensor  # [T]
    offsets: Tensor  # [T]
    buckets: tuple[_Bucket, ...]
    prefills: tuple[_Prefill, ...]


class PagedAttention:
    """Callable attention. Keeps the layouts of the latest batch, so that 30 layers build them once."""

    def __init__(self) -> None:
        self._batch: StepBatch | None = None
        self._layouts: dict[tuple[int, int, int, int], _Layout] = {}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, batch: StepBatch, sinks: Tensor | None = None
    ) -> Tensor:
        kv = batch.kv[spec.layer]
        layout = self._layout(spec, kv.page_tokens, batch)
        _write(kv.k, kv.k_scale, layout, k)
        _write(kv.v, kv.v_scale, layout, v)
        out = torch.empty_like(q)
        for bucket in layout.buckets:
            out[bucket.tokens] = _decode(q[bucket.tokens], kv, spec, bucket, sinks).to(q.dtype)
        for prefill in layout.prefills:
            _prefill(out, q, kv, spec, batch.tables[spec.group][prefill.row], prefill, sinks)
        return out.flatten(1)

    def _layout(self, spec: AttentionSpec, page: int, batch: StepBatch) -> _Layout:
        if batch is not self._batch:
            self._batch, self._layouts = batch, {}
        key = (spec.group, page, spec.window, spec.chunk)
        if key not in self._layouts:
            self._layouts[key] = _make_layout(spec, page, batch)
        return self._layouts[key]


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> (int8 [..., D], fp32 scale [...]): round(x * (127 / m)), ties to even, and m / 127, where m is the
    largest |x| over D. A row under 1e-30 becomes 0."""
    x = x.float()
    most = x.abs().amax(-1)
    factor = torch.where(most > 1e-30, torch.full_like(most, 127.0) / most, 0.0)
    return (x * factor.unsqueeze(-1)).round().to(torch.int8), most / 127.0


def stored_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as pages of `dtype` hold it: what is beyond fp8's range becomes its greatest value."""
    if dtype is not torch.float8_e4m3fn:
        return x.to(dtype)
    return x.float().clamp(-FP8_MOST, FP8_MOST).to(dtype)


def _write(pages: Tensor, scale: Tensor | None, layout: _Layout, x: Tensor) -> None:
    at = layout.pages, layout.offsets
    if scale is None:
        pages[at] = stored_as(x, pages.dtype)
    else:
        pages[at], scale[at] = quantise(x)


def _select(pages: Tensor, scale: Tensor | None, used: Tensor) -> Tensor:
    """Pages `used` as fp32. index_select takes a third of the time of indexing."""
    taken = pages.index_select(0, used).float()
    return taken if scale is None else taken.mul_(scale.index_select(0, used).unsqueeze(-1))


def first_visible(position: int, spec: AttentionSpec) -> int:
    """The earliest key position that a query at `position` sees."""
    low = position - spec.window + 1 if spec.window else 0
    if spec.chunk:
        low = max(low, position - position % spec.chunk)
    return max(low, 0)


def _make_layout(spec: AttentionSpec, page: int, batch: StepBatch) -> _Layout:
    table = batch.tables[spec.group]
    counts = torch.tensor(batch.host_counts, dtype=torch.int64)
    rows = uploaded(torch.arange(len(counts)).repeat_interleave(counts), table.device)
    pages = table[rows, batch.positions // page].long()
    decode: list[tuple[int, int, int]] = []
    prefills: list[_Prefill] = []
    token = 0
    for row, (count, start) in enumerate(zip(batch.host_counts, batch.host_starts, strict=True)):
        if count == 1:
            decode.append((row, token, start))
        else:
            prefills.append(_Prefill(row, token, start, count))
        token += count
    buckets = tuple(_make_bucket(group, spec, page, table) for group in _group_by_length(decode, spec, page))
    return _Layout(pages, (batch.positions % page).long(), buckets, tuple(prefills))


def _group_by_length(
    decode: list[tuple[int, int, int]], spec: AttentionSpec, page: int
) -> list[list[tuple[int, int, int]]]:
    """Decode rows (row, token, position), shortest first, in runs that waste little when padded to their longest."""
    groups: list[list[tuple[int, int, int]]] = []
    limit = 0
    for item in sorted(decode, key=lambda item: (_pages_read(item[2], spec, page), item[0])):
        length = _pages_read(item[2], spec, page) * page
        if not groups or length > limit or (len(groups[-1]) + 1) * length > BUCKET_TOKENS:
            groups.append([])
            limit = length + length // 4 + BUCKET_SLACK_TOKENS
        groups[-1].append(item)
    return groups


def _pages_read(position: int, spec: AttentionSpec, page: int) -> int:
    return position // page - first_visible(position, spec) // page + 1


def _make_bucket(group: list[tuple[int, int, int]], spec: AttentionSpec, page: int, table: Tensor) -> _Bucket:
    """Worked out on the host, where all of it is known: looking for what is unseen would wait for a device."""
    width = max(_pages_read(position, spec, page) for _, _, position in group)
    rows, tokens, positions = torch.tensor(group).unbind(1)
    low = torch.tensor([first_visible(position, spec) for _, _, position in group]).unsqueeze(1)
    first_page = low // page
    columns = (first_page + torch.arange(width)).clamp_(max=table.shape[1] - 1)
    keys = first_page * page + torch.arange(width * page)
    seen = (keys >= low) & (keys <= positions.unsqueeze(1))
    row, token = (uploaded(at, table.device) for at in (~seen).nonzero(as_tuple=True))
    return _Bucket(
        tokens=uploaded(tokens.contiguous(), table.device),
        pages=table[uploaded(rows.unsqueeze(1).contiguous(), table.device), uploaded(columns, table.device)],
        seen=uploaded(seen, table.device)[:, None, None, :],
        unseen=(row, token),
    )


def _decode(q: Tensor, kv: LayerKV, spec: AttentionSpec, bucket: _Bucket, sinks: Tensor | None) -> Tensor:
    """q [B, heads, D] -> fp32 [B, heads, D]. The query heads of one KV head are scored as if they were queries."""
    grouped = q.float().view(len(q), spec.kv_heads, -1, spec.head_dim)
    k, v = _gather(kv.k, kv.k_scale, bucket), _gather(kv.v, kv.v_scale, bucket)
    sink = None if sinks is None else sinks.view(1, spec.kv_heads, -1, 1)
    return _attend(grouped, k, v, bucket.seen, spec, sink).reshape(len(q), spec.heads, spec.head_dim)


def _gather(pages: Tensor, scale: Tensor | None, bucket: _Bucket) -> Tensor:
    """-> fp32 [B, kv_heads, L, D], zero where no query looks."""
    rows, width = bucket.pages.shape
    tokens = _select(pages, scale, bucket.pages.flatten()).view(rows, width * pages.shape[1], *pages.shape[2:])
    tokens[bucket.unseen] = 0.0
    return tokens.transpose(1, 2)


def _prefill(
    out: Tensor,
    q: Tensor,
    kv: LayerKV,
    spec: AttentionSpec,
    table: Tensor,
    row: _Prefill,
    sinks: Tensor | None,
) -> None:
    """Attend one row, a block of queries at a time; every key read was written by this or an earlier step."""
    low = first_visible(row.start, spec)
    end = row.start + row.count
    k, v = _gather_span(kv.k, kv.k_scale, table, low, end), _gather_span(kv.v, kv.v_scale, table, low, end)
    for first in range(row.start, end, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, end) - 1
        span = slice(row.first_token + first - row.start, row.first_token + last - row.start + 1)
        block = q[span].float().view(last + 1 - first, spec.kv_heads, -1, spec.head_dim)
        group = block.shape[2]
        block = block.permute(1, 2, 0, 3).reshape(1, spec.kv_heads, -1, spec.head_dim)  # [1, kv_heads, G * M, D]
        seen_from = first_visible(first, spec)
        keys = slice(seen_from - low, last + 1 - low)
        seen = _seen(first, last, seen_from, spec, q.device).repeat(group, 1)
        sink = None if sinks is None else sinks.view(1, spec.kv_heads, -1, 1).repeat_interleave(last + 1 - first, 2)
        result = _attend(block, k[:, :, keys], v[:, :, keys], seen, spec, sink)
        result = result.view(spec.kv_heads, group, -1, spec.head_dim)
        out[span] = result.permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)


def _gather_span(pages: Tensor, scale: Tensor | None, table: Tensor, low: int, end: int) -> Tensor:
    """Positions low .. end - 1 of one row, fp32 [1, kv_heads, end - low, D]."""
    page = pages.shape[1]
    used = table[low // page : (end - 1) // page + 1]
    skip = low % page
    tokens = _select(pages, scale, used).flatten(0, 1)
    return tokens[skip : skip + end - low].transpose(0, 1).unsqueeze(0)


def _seen(first: int, last: int, seen_from: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """bool [last - first + 1, last - seen_from + 1]: True where a query (row) sees a key (column)."""
    query = torch.arange(first, last + 1, device=device).unsqueeze(1)
    key = torch.arange(seen_from, last + 1, device=device)
    seen = key <= query
    if spec.window:
        seen &= key > query - spec.window
    if spec.chunk:
        seen &= key >= query - query % spec.chunk
    return seen


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, spec: AttentionSpec, sink: Tensor | None) -> Tensor:
    """q [B, kv_heads, N, D], k and v [B, kv_heads, L, D], seen broadcast to [B, kv_heads, N, L]; all fp32.

    sink [1, kv_heads, N, 1]: the score of the key without a value, or None.
    """
    if not spec.softcap and sink is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=spec.scale)
    scores = torch.matmul(q * spec.scale, k.transpose(-1, -2))
    if spec.softcap:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    scores = scores.masked_fill_(~seen, float("-inf"))
    if sink is None:
        return torch.matmul(scores.softmax(-1), v)
    scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), dim=-1)
    return torch.matmul(scores.softmax(-1)[..., :-1], v)
