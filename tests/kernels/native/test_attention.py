"""Paged attention against its definition: shapes, masks, dtypes, page layouts."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels.native import NativeOps
from aengine.kernels.ops import AttentionSpec
from tests.kernels.native.paged import Pages, dense_attention, make_batch, make_spec, random_sequence, step_inputs

SPECS = {
    "smollm2": make_spec(9, 3, 64),
    "gemma3-270m": make_spec(4, 1, 256, window=40),
    "odd-dim": make_spec(2, 2, 17),
    "one-head": make_spec(1, 1, 3),
    "mqa-80": make_spec(8, 1, 80),
    "window-1": make_spec(6, 2, 32, window=1),
    "window-33": make_spec(6, 2, 32, window=33),
    "window-300": make_spec(6, 2, 32, window=300),
    "chunk-24": make_spec(6, 2, 32, chunk=24),
    "chunk-256": make_spec(6, 2, 32, chunk=256),
    "softcap": make_spec(6, 2, 32, softcap=20.0),
    "all": make_spec(6, 2, 40, window=19, chunk=64, softcap=10.0),
}


def check_against_definition(
    ops: NativeOps,
    spec: AttentionSpec,
    rows: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype = torch.float32,
    page_tokens: int = 16,
) -> None:
    """rows: (start, count); positions before start are in the pages already."""
    sequences = [random_sequence(start + count, spec, dtype, seed) for seed, (start, count) in enumerate(rows)]
    pages = Pages([s.length for s in sequences], spec, kv_dtype, page_tokens=page_tokens, seed=7)
    step = [(row, start, count) for row, (start, count) in enumerate(rows)]
    for row, start, _ in step:
        pages.fill(row, sequences[row], start)
    batch = make_batch(pages, step)
    out = ops.attention(*step_inputs(sequences, step), spec, batch)
    assert out.dtype is dtype
    first = 0
    for row, start, count in step:
        expected = dense_attention(sequences[row], spec, kv_dtype)[start:]
        tolerance = 2e-6 if dtype is torch.float32 else 2e-2
        if spec.softcap:
            tolerance *= 4
        torch.testing.assert_close(out[first : first + count].double(), expected, rtol=tolerance, atol=tolerance)
        first += count
        page = pages.kv.page_tokens
        for position in (start, start + count - 1):
            at = int(pages.tables[row, position // page])
            assert torch.equal(pages.kv.k[at, position % page], sequences[row].k[position].to(kv_dtype))
            assert torch.equal(pages.kv.v[at, position % page], sequences[row].v[position].to(kv_dtype))


@pytest.mark.parametrize("name", SPECS)
def test_decode_at_edges(ops: NativeOps, name: str) -> None:
    contexts = (1, 2, 15, 16, 17, 31, 32, 33, 40, 41, 64, 255, 256, 257, 300)
    check_against_definition(ops, SPECS[name], [(context - 1, 1) for context in contexts])


@pytest.mark.parametrize("name", SPECS)
def test_prefill_at_edges(ops: NativeOps, name: str) -> None:
    check_against_definition(ops, SPECS[name], [(0, 1), (0, 16), (0, 17), (5, 31), (0, 70), (250, 9), (0, 290)])


def test_one_long_row_split_in_spans(ops: NativeOps) -> None:
    check_against_definition(ops, SPECS["gemma3-270m"], [(1030, 1)])
    check_against_definition(ops, SPECS["smollm2"], [(1030, 1)])
    check_against_definition(ops, SPECS["smollm2"], [(500, 33)])


@pytest.mark.parametrize("page_tokens", [1, 5, 16, 32, 48])
def test_page_sizes(ops: NativeOps, page_tokens: int) -> None:
    check_against_definition(ops, SPECS["window-33"], [(0, 37), (100, 1), (95, 6)], page_tokens=page_tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_dtypes(ops: NativeOps, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check_against_definition(ops, SPECS["smollm2"], [(0, 21), (70, 1), (33, 5)], dtype, kv_dtype)
    check_against_definition(ops, SPECS["odd-dim"], [(0, 21), (70, 1)], dtype, kv_dtype)


def test_empty_step(ops: NativeOps) -> None:
    spec = SPECS["smollm2"]
    sequence = random_sequence(4, spec, torch.float32, 0)
    pages = Pages([4], spec, torch.float32, page_tokens=16, seed=0)
    batch = make_batch(pages, [(0, 0, 0)])
    out = ops.attention(*(x[:0] for x in (sequence.q, sequence.k, sequence.v)), spec, batch)
    assert out.shape == (0, 576)


def test_large_scores_do_not_overflow(ops: NativeOps) -> None:
    spec = make_spec(2, 1, 64)
    sequence = random_sequence(60, spec, torch.float32, 3)
    sequence.q.mul_(300.0)
    pages = Pages([60], spec, torch.float32, page_tokens=16, seed=0)
    out = ops.attention(*step_inputs([sequence], [(0, 0, 60)]), spec, make_batch(pages, [(0, 0, 60)]))
    expected = dense_attention(sequence, spec, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [-200.0, 0.0, 3.0, 200.0])
def test_sinks(ops: NativeOps, size: float) -> None:
    spec = SPECS["window-33"]
    sinks = torch.randn(6) + size
    sequence = random_sequence(290, spec, torch.float32, 3)
    pages = Pages([290], spec, torch.float32, page_tokens=16, seed=0)
    outputs = []
    for start, count in ((0, 280), (280, 9), (289, 1)):
        rows = [(0, start, count)]
        outputs.append(ops.attention(*step_inputs([sequence], rows), spec, make_batch(pages, rows), sinks))
    expected = dense_attention(sequence, spec, torch.float32, sinks)
    torch.testing.assert_close(torch.cat(outputs).double(), expected, rtol=2e-6, atol=2e-6)
    pages = Pages([290], spec, torch.float32, page_tokens=16, seed=1)
    rows = [(0, 0, 290)]
    whole = ops.attention(*step_inputs([sequence], rows), spec, make_batch(pages, rows), sinks)
    assert torch.equal(torch.cat(outputs), whole)
