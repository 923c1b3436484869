"""Cross attention over the pages of items, against a dense softmax."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels.ops import AttentionSpec, CrossBatch, CrossItem, CrossSpan, LayerKV
from aengine.kernels.reference_cross import cross_attention, write_items

PAGE, HEADS, KV_HEADS, DIM = 4, 4, 2, 8
SPEC = AttentionSpec(layer=0, group=1, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, scale=0.3, cross=True)


def dense(q, k, v):
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    weights = (torch.einsum("thd,lhd->htl", q, k) * SPEC.scale).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, v).flatten(1)


@pytest.mark.parametrize("block", [1, 3, 32])
def test_items_are_seen_whole_and_nothing_behind_their_ends(block):
    torch.manual_seed(0)
    kv = LayerKV(*(torch.full((12, PAGE, KV_HEADS, DIM), torch.nan) for _ in range(2)))
    made = {}
    for name, length, pages in (("a", 6, [7, 2]), ("b", 8, [5, 1]), ("c", 1, [9])):
        k, v = torch.randn(2, length, KV_HEADS, DIM)
        item = CrossItem(torch.tensor(pages), length)
        write_items(k, v, kv, item.pages)
        made[name] = (item, k, v)
    q = torch.randn(9, HEADS, DIM)
    plan = [("a", 0, 4), ("ab", 4, 1), ("bca", 5, 4)]
    spans = tuple(CrossSpan(first, count, tuple(made[name][0] for name in names)) for names, first, count in plan)
    got = cross_attention(q, kv, SPEC, CrossBatch(torch.arange(9), spans), block)
    assert kv.k[2, 2:].isnan().all()
    for names, first, count in plan:
        k, v = (torch.cat([made[name][part] for name in names]) for part in (1, 2))
        want = dense(q[first : first + count], k, v)
        assert (got[first : first + count] - want).abs().max() < 1e-5


def test_one_token_at_a_time_gives_the_same_bits_in_any_batch():
    torch.manual_seed(1)
    kv = LayerKV(*torch.randn(2, 4, PAGE, KV_HEADS, DIM))
    item = CrossItem(torch.tensor([3, 1, 2]), 11)
    q = torch.randn(7, HEADS, DIM)
    whole = cross_attention(q, kv, SPEC, CrossBatch(torch.arange(7), (CrossSpan(0, 7, (item,)),)), 1)
    for i in range(7):
        alone = CrossBatch(torch.arange(1), (CrossSpan(0, 1, (item,)),))
        assert torch.equal(cross_attention(q[i : i + 1], kv, SPEC, alone, 1)[0], whole[i])
