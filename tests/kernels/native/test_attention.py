"""Paged attention against its definition: shapes, masks, dtypes, page layouts."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels.native import NativeOps
from aengine.kernels.ops import AttentionSpec
from aengine.kernels.reference_attention import quantise
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
        expected = dense_attention(sequences[row], spec, kv_dtype, start=start)
        tolerance = 2e-6 if dtype is torch.float32 else 2e-2
        if spec.softcap:
            tolerance *= 4
        torch.testing.assert_close(out[first : first + count].double(), expected, rtol=tolerance, atol=tolerance)
        first += count
        page = pages.kv.page_tokens
        for position in (start, start + count - 1):
            at = int(pages.tables[row, position // page]), position % page
            for held, scale, x in (
                (pages.kv.k, pages.kv.k_scale, sequences[row].k),
                (pages.kv.v, pages.kv.v_scale, sequences[row].v),
            ):
                if scale is None:
                    assert torch.equal(held[at], x[position].to(kv_dtype))
                else:
                    values, factors = quantise(x[position])
                    assert torch.equal(held[at], values)
                    assert torch.equal(scale[at], factors)


DECODE = [(context - 1, 1) for context in (1, 2, 15, 17, 31, 32, 33, 41, 64, 255, 256, 257, 300)]
PREFILL = [(0, 16), (0, 17), (5, 31), (0, 70), (250, 9), (0, 290)]
# Every spec with every other setting at least once among neighbours, not each with all.
F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
KINDS = [(F32, F32), (F32, INT8), (F32, BF16), (BF16, BF16), (F32, F32), (BF16, INT8), (BF16, F32)]
PAGE_TOKENS = (16, 5, 32, 48, 1)


@pytest.mark.parametrize("name", SPECS)
def test_decode_and_prefill_at_edges(ops: NativeOps, name: str) -> None:
    number = list(SPECS).index(name)
    dtype, kv_dtype = KINDS[number % len(KINDS)]
    page_tokens = PAGE_TOKENS[number % len(PAGE_TOKENS)]
    check_against_definition(ops, SPECS[name], DECODE + PREFILL, dtype, kv_dtype, page_tokens)
    dtype, kv_dtype = KINDS[(number + 3) % len(KINDS)]
    check_against_definition(ops, SPECS[name], [(70, 1), (33, 5)], dtype, kv_dtype, PAGE_TOKENS[(number + 2) % 5])


@pytest.mark.parametrize("kv_dtype", [F32, BF16, INT8])
def test_few_rows_split_in_spans(ops: NativeOps, kv_dtype: torch.dtype) -> None:
    check_against_definition(ops, SPECS["gemma3-270m"], [(530, 1)], kv_dtype=kv_dtype)
    check_against_definition(ops, SPECS["smollm2"], [(1030, 1)], kv_dtype=kv_dtype)
    check_against_definition(ops, SPECS["smollm2"], [(500, 33)], kv_dtype=kv_dtype)
    check_against_definition(ops, make_spec(4, 2, 24), [(70, 1), (287, 1)], kv_dtype=kv_dtype, page_tokens=5)


def test_int8_rows_of_zeros_and_of_tiny_numbers(ops: NativeOps) -> None:
    """Their scale is 0 or next to it: no division by zero, no NaN."""
    spec = SPECS["smollm2"]
    sequence = random_sequence(40, spec, F32, 3)
    sequence.k[5] = 0.0
    sequence.v[6] = 0.0
    sequence.v[7] *= 1e-36
    pages = Pages([40], spec, INT8, page_tokens=16, seed=0)
    out = ops.attention(*step_inputs([sequence], [(0, 0, 40)]), spec, make_batch(pages, [(0, 0, 40)]))
    torch.testing.assert_close(out.double(), dense_attention(sequence, spec, INT8), rtol=2e-6, atol=2e-6)


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


@pytest.mark.parametrize("size", [-200.0, 3.0, 200.0])
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
