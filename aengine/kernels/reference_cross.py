"""Attention to media items in plain torch.

Owns: writing an item's K and V into its pages, and attention of a step's tokens over the items they see.
Does not know: models, vision towers, which token sees which item and why.
Invariants: every entry of a visible item is seen, none behind its end: its last page may hold stale bytes there.
Scores, softmax and sums are fp32. A token's result depends on its own query and items, and on the size
of its block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.ops import AttentionSpec, CrossBatch, CrossSpan, LayerKV

# Queries scored together: 32 heads x 32 x 6,404 keys x 4 B = 26 MB of scores.
QUERY_BLOCK = 32


def write_items(k: Tensor, v: Tensor, kv: LayerKV, pages: Tensor) -> None:
    """k, v [L, kv_heads, head_dim]: entry i goes to place i % page of pages[i // page]; pages int64 [n]."""
    entries = torch.arange(len(k), device=pages.device)
    page, offset = pages[entries // kv.page_tokens], entries % kv.page_tokens
    kv.k[page, offset] = k.to(kv.k.dtype)
    kv.v[page, offset] = v.to(kv.v.dtype)


def cross_attention(q: Tensor, kv: LayerKV, spec: AttentionSpec, cross: CrossBatch, block: int) -> Tensor:
    """q [V, heads, head_dim] of the tokens `cross.tokens` -> [V, heads * head_dim], at most `block` at a time."""
    out = torch.empty_like(q)
    for span in cross.spans:
        k, v = _gather(kv.k, span), _gather(kv.v, span)
        for first in range(span.first, span.first + span.count, block):
            part = slice(first, min(first + block, span.first + span.count))
            out[part] = _attend(q[part], k, v, spec)
    return out.flatten(1)


def _gather(pages: Tensor, span: CrossSpan) -> Tensor:
    """The entries of a span's items, one after another: fp32 [1, kv_heads, L, head_dim]."""
    parts = [pages.index_select(0, item.pages).flatten(0, 1)[: item.tokens] for item in span.items]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).float().transpose(0, 1).unsqueeze(0)


def _attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """q [n, heads, D] -> [n, heads, D]; the query heads of one KV head are scored as if they were queries."""
    grouped = q.float().view(len(q), spec.kv_heads, -1, spec.head_dim).transpose(0, 1)
    flat = grouped.reshape(1, spec.kv_heads, -1, spec.head_dim)
    seen = F.scaled_dot_product_attention(flat, k, v, scale=spec.scale)
    return seen.view(spec.kv_heads, len(q), -1, spec.head_dim).transpose(0, 1).reshape(q.shape).to(q.dtype)
