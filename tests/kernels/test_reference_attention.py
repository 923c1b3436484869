"""Paged attention of the reference backend against the definition, one query and one key at a time.

Owns: shapes of rows, windows, chunks, soft caps, grouped heads, strided and stale pages.
Does not know: how the backend groups its rows.
Invariants: unwritten page bytes are NaN in every test, so a single one read shows.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aengine.kernels import reference_attention
from aengine.kernels.reference import ReferenceOps
from tests.kernels.native.paged import Pages, dense_attention, make_batch, make_spec, random_sequence, step_inputs

MIXED = [(0, 5), (7, 1), (3, 6), (30, 1), (0, 1), (8, 1), (12, 4), (16, 1)]


def attend(scene):
    return ReferenceOps().attention(scene.q, scene.k, scene.v, scene.spec, scene.batch)


def check(scene, slow_attention, atol=1e-5):
    torch.testing.assert_close(attend(scene).double(), slow_attention(scene), atol=atol, rtol=atol)


@pytest.mark.parametrize("page", [1, 3, 4, 16])
@pytest.mark.parametrize(
    "kind", [{}, {"window": 1}, {"window": 6}, {"chunk": 5}, {"chunk": 8}, {"softcap": 2.0}, {"window": 9, "chunk": 7}]
)
def test_mixed_rows_agree_with_the_definition(make_scene, slow_attention, page, kind):
    check(make_scene(MIXED, page=page, **kind), slow_attention)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 2), (9, 3), (8, 1)])
def test_grouped_heads(make_scene, slow_attention, heads, kv_heads):
    check(make_scene([(0, 3), (9, 1), (4, 2)], heads=heads, kv_heads=kv_heads), slow_attention)


def test_bf16_keeps_fp32_sums(make_scene, slow_attention):
    """The output is rounded to bf16 once (2^-9 relative), the scores never."""
    check(make_scene(MIXED, dtype=torch.bfloat16), slow_attention, atol=2**-7)


def test_queries_in_several_blocks(make_scene, slow_attention, monkeypatch):
    monkeypatch.setattr(reference_attention, "QUERY_BLOCK", 4)
    for kind in ({}, {"window": 5}, {"chunk": 6}):
        check(make_scene([(0, 19), (5, 9), (22, 1)], **kind), slow_attention)


def test_a_bucket_is_split_when_its_contexts_are_too_many(make_scene, slow_attention, monkeypatch):
    monkeypatch.setattr(reference_attention, "BUCKET_TOKENS", 64)
    monkeypatch.setattr(reference_attention, "BUCKET_SLACK_TOKENS", 0)
    check(make_scene([(start, 1) for start in (1, 2, 30, 31, 29, 3, 60)]), slow_attention)


def test_the_steps_own_keys_are_written_through_the_strides(make_scene):
    scene = make_scene([(2, 5), (6, 1)])
    attend(scene)
    page = 4
    for row, (start, count) in enumerate([(2, 5), (6, 1)]):
        for position in range(start + count):
            at = int(scene.batch.tables[0][row, position // page]), position % page
            assert torch.equal(scene.batch.kv[0].k[at], scene.keys[row][position])
            assert torch.equal(scene.batch.kv[0].v[at], scene.values[row][position])
    storage = scene.batch.kv[0].k.untyped_storage()
    flat = torch.empty(0, dtype=torch.float32).set_(storage)
    assert torch.isnan(flat[:40]).all(), "the gap before the first page was written"


def test_a_window_never_reads_pages_before_it(make_scene, slow_attention):
    """Pages wholly before the window are given back while rows run: here they hold NaN or are the null page."""
    scene = make_scene([(50, 1), (47, 3)], window=8)
    scene.batch.tables[0][0, :10] = 0
    scene.batch.tables[0][1, :9] = 0
    check(scene, slow_attention)


def test_rows_that_share_a_page_see_what_this_step_writes(make_scene, slow_attention):
    """A prefix published when scheduled is read by another row of the same step."""
    scene = make_scene([(0, 8), (8, 2)])
    table = scene.batch.tables[0]
    table[1, :2] = table[0, :2]
    scene.keys[1][:8], scene.values[1][:8] = scene.keys[0], scene.values[0]
    check(scene, slow_attention)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), min_size=1, max_size=6),
    page=st.integers(1, 9),
    window=st.sampled_from([0, 0, 1, 7, 20]),
    chunk=st.sampled_from([0, 0, 4, 11]),
    seed=st.integers(0, 99),
)
def test_any_batch_agrees_with_the_definition(make_scene, slow_attention, rows, page, window, chunk, seed):
    check(make_scene(rows, page=page, window=window, chunk=chunk, seed=seed, heads=2, kv_heads=1), slow_attention)


@pytest.mark.parametrize("kind", [{}, {"window": 21}, {"chunk": 24}])
def test_int8_pages(kind):
    spec = make_spec(6, 2, 16, **kind)
    rows = [(0, 0, 40), (1, 38, 1), (2, 30, 5)]
    sequences = [random_sequence(start + count, spec, torch.float32, row) for row, start, count in rows]
    pages = Pages([s.length for s in sequences], spec, torch.int8, page_tokens=8, seed=0)
    for row, start, _ in rows:
        pages.fill(row, sequences[row], start)
    out = ReferenceOps().attention(*step_inputs(sequences, rows), spec, make_batch(pages, rows))
    expected = torch.cat([dense_attention(sequences[row], spec, torch.int8, start=start) for row, start, _ in rows])
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)
    exact = torch.cat([dense_attention(sequences[row], spec, torch.float32, start=start) for row, start, _ in rows])
    assert 1e-4 < (expected - exact).abs().max() < 0.05
