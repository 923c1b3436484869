"""Paged KV with gaps between pages, batches of ragged rows, and an attention that is slow and obviously right.

Owns: the fixtures of the kernel tests.
Does not know: the code under test.
Invariants: everything is seeded; pages are never contiguous, and hold NaN wherever nothing was written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from aengine.kernels.ops import AttentionSpec, LayerKV, StepBatch

COMPILING_S = 400  # compiling all instruction sets takes a minute of two idle cores, and waits where they are not idle


def pytest_collection_modifyitems(items):
    """Whichever test asks first for a compiled library waits for the compiler."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(COMPILING_S))


PAD = 40  # elements between one page and the next


def strided_pages(pages, page_tokens, kv_heads, head_dim, dtype=torch.float32):
    """A NaN-filled [pages, page_tokens, kv_heads, head_dim] view whose stride(0) exceeds a page."""
    size = page_tokens * kv_heads * head_dim
    flat = torch.full((pages * (size + PAD),), math.nan, dtype=dtype)
    view = flat.as_strided(
        (pages, page_tokens, kv_heads, head_dim), (size + PAD, kv_heads * head_dim, head_dim, 1), PAD
    )
    assert not view.is_contiguous()
    return view


@dataclass
class Scene:
    """Rows (start, count) with random sequences, whose earlier positions are already in their pages."""

    spec: AttentionSpec
    batch: StepBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: list[torch.Tensor]  # by row: [context, kv_heads, head_dim]
    values: list[torch.Tensor]


def make_scene(
    rows,
    *,
    page=4,
    heads=4,
    kv_heads=2,
    dim=8,
    window=0,
    chunk=0,
    softcap=0.0,
    seed=0,
    dtype=torch.float32,
    keep_freed=False,
):
    """`keep_freed`: also pages that lie wholly before a row's window hold its KV; else they stay NaN."""
    random = torch.Generator().manual_seed(seed)
    spec = AttentionSpec(0, 0, heads, kv_heads, dim, 1 / math.sqrt(dim), window, chunk, softcap)
    contexts = [start + count for start, count in rows]
    needed = [-(-context // page) for context in contexts]
    order = (torch.randperm(sum(needed), generator=random) + 1).tolist()  # page 0 is the null page
    kv = LayerKV(
        strided_pages(1 + sum(needed), page, kv_heads, dim, dtype),
        strided_pages(1 + sum(needed), page, kv_heads, dim, dtype),
    )
    table = torch.zeros((len(rows), max(needed) + 2), dtype=torch.int32)
    keys, values, q, k, v, positions = [], [], [], [], [], []
    for row, (start, count) in enumerate(rows):
        pages = [order.pop() for _ in range(needed[row])]
        table[row, : needed[row]] = torch.tensor(pages)
        key = torch.randn(start + count, kv_heads, dim, generator=random).to(dtype)
        value = torch.randn(start + count, kv_heads, dim, generator=random).to(dtype)
        low = lowest_visible(start, spec)
        for position in range(start):
            if keep_freed or position >= low:
                kv.k[pages[position // page], position % page] = key[position]
                kv.v[pages[position // page], position % page] = value[position]
        keys.append(key)
        values.append(value)
        q.append(torch.randn(count, heads, dim, generator=random).to(dtype))
        k.append(key[start:])
        v.append(value[start:])
        positions += range(start, start + count)
    offsets = [0]
    for _, count in rows:
        offsets.append(offsets[-1] + count)
    batch = StepBatch(
        ids=torch.zeros(offsets[-1], dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        row_offsets=torch.tensor(offsets, dtype=torch.int32),
        context=torch.tensor(contexts, dtype=torch.int32),
        tables=(table,),
        kv=(kv,),
        max_context=max(contexts),
        host_counts=tuple(count for _, count in rows),
        host_starts=tuple(start for start, _ in rows),
    )
    return Scene(spec, batch, torch.cat(q), torch.cat(k), torch.cat(v), keys, values)


def lowest_visible(position, spec):
    return next(key for key in range(position + 1) if sees(position, key, spec))


def sees(query, key, spec):
    """The definition: causal, within the window, within the query's own chunk."""
    if key > query:
        return False
    if spec.window and key <= query - spec.window:
        return False
    return not (spec.chunk and key // spec.chunk != query // spec.chunk)


def slow_attention(scene):
    """One query, one head, one key at a time, in fp64. -> [T, heads * head_dim]"""
    spec = scene.spec
    out = []
    token = 0
    for (start, count), keys, values in zip(
        zip(scene.batch.host_starts, scene.batch.host_counts, strict=True), scene.keys, scene.values, strict=True
    ):
        for position in range(start, start + count):
            heads = []
            for head in range(spec.heads):
                kv_head = head // (spec.heads // spec.kv_heads)
                seen = [key for key in range(len(keys)) if sees(position, key, spec)]
                query = scene.q[token, head].double()
                scores = torch.stack([query @ keys[key, kv_head].double() * spec.scale for key in seen])
                if spec.softcap:
                    scores = spec.softcap * torch.tanh(scores / spec.softcap)
                weights = torch.exp(scores - scores.max())
                weights = weights / weights.sum()
                heads.append(
                    sum(weight * values[key, kv_head].double() for weight, key in zip(weights, seen, strict=True))
                )
            out.append(torch.cat(heads))
            token += 1
    return torch.stack(out)


@pytest.fixture(name="make_scene")
def _make_scene():
    return make_scene


@pytest.fixture(name="slow_attention")
def _slow_attention():
    return slow_attention
