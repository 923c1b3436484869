"""The short convolution against its formula, and its state against every way to cut a sequence.

Owns: `short_conv` of the reference backend.
Does not know: models.
Invariants: pages a row does not read or write hold NaN and stay as they are.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from aengine.kernels.ops import LayerState, StatePart, StateSpec, StepBatch
from aengine.kernels.reference import ReferenceOps

SIZE, PAGES = 13, 24


def make_pages(taps, dtype=torch.float32):
    """NaN in all pages but the null page, with gaps between them."""
    flat = torch.full((PAGES, taps - 1, SIZE + 3), math.nan, dtype=dtype)
    pages = flat[:, :, :SIZE]
    pages[0] = 0.0
    return pages


def batch(rows, pages):
    """rows: (count, page read, page written)."""
    table = torch.tensor([[read, write] for _, read, write in rows], dtype=torch.int32)
    counts = tuple(count for count, _, _ in rows)
    none = torch.zeros(0, dtype=torch.int32)
    return StepBatch(
        ids=none,
        positions=none,
        row_offsets=none,
        context=none,
        tables=(none, table),
        kv=(),
        max_context=0,
        host_counts=counts,
        host_starts=(0,) * len(counts),
        states=(LayerState((pages,)),),
    )


def spec(taps, dtype=torch.float32):
    return StateSpec(0, 1, (StatePart("inputs", (taps - 1, SIZE), dtype),))


def sequence(length, seed=0, dtype=torch.float32):
    return torch.randn(length, SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(x, weight, bias):
    """The formula in fp64: zeros before the first token."""
    taps = len(weight)
    padded = torch.cat((torch.zeros(taps - 1, SIZE, dtype=torch.float64), x.double()))
    out = sum(padded[tap : tap + len(x)] * weight[tap].double() for tap in range(taps))
    return out if bias is None else out + bias.double()


@pytest.fixture
def ops():
    return ReferenceOps()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("taps", [2, 3, 5])
def test_whole_sequences_equal_the_formula(ops, taps, biased, dtype):
    weight, bias = sequence(taps, 1), sequence(1, 2)[0] if biased else None
    lengths = (1, 7, 1, 2, taps)
    parts = [sequence(length, 10 + i, dtype) for i, length in enumerate(lengths)]
    pages = make_pages(taps, dtype)
    rows = [(length, 0, 3 + i) for i, length in enumerate(lengths)]
    out = ops.short_conv(torch.cat(parts), weight, bias, spec(taps, dtype), batch(rows, pages))
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    wanted = torch.cat([expected(part, weight, bias) for part in parts])
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    assert pages[3 + len(lengths) :].isnan().all()
    assert pages[1:3].isnan().all()
    assert not pages[0].any()


def test_the_state_is_the_last_inputs_oldest_first(ops):
    x, pages = sequence(5), make_pages(4)
    ops.short_conv(x, sequence(4, 1), None, spec(4), batch([(5, 0, 2)], pages))
    assert torch.equal(pages[2], x[-3:])
    ops.short_conv(sequence(1, 5), sequence(4, 1), None, spec(4), batch([(1, 2, 7)], pages))
    assert torch.equal(pages[7], torch.cat((x[-2:], sequence(1, 5))))
    assert torch.equal(pages[2], x[-3:])  # a checkpoint that was read stays as it is


def test_short_sequences_keep_the_zeros_before_them(ops):
    x, pages = sequence(1), make_pages(4)
    ops.short_conv(x, sequence(4, 1), None, spec(4), batch([(1, 0, 2)], pages))
    assert torch.equal(pages[2], torch.cat((torch.zeros(2, SIZE), x)))


@pytest.mark.parametrize("seed", range(20))
def test_bits_do_not_depend_on_cuts_or_neighbours(ops, seed):
    """Three sequences, cut at random into steps they share or not, in place or from page to page."""
    dice = random.Random(seed)
    taps = dice.choice((2, 3, 4))
    weight, bias, pages = sequence(taps, 1), sequence(1, 2)[0], make_pages(taps)
    whole = [sequence(dice.randint(1, 30), 20 + i) for i in range(3)]
    wanted = []
    for x in whole:
        wanted.append(ops.short_conv(x, weight, bias, spec(taps), batch([(len(x), 0, 1)], make_pages(taps))))
    done, page, got = [0, 0, 0], [0, 0, 0], [[], [], []]
    while any(done[i] < len(whole[i]) for i in range(3)):
        going = [i for i in range(3) if done[i] < len(whole[i]) and dice.random() < 0.7]
        counts = [min(dice.choice((1, 1, 2, 5, 9)), len(whole[i]) - done[i]) for i in going]
        write = [page[i] if page[i] and dice.random() < 0.5 else 1 + i + 3 * dice.randint(0, 6) for i in going]
        if not going:
            continue
        rows = [(count, page[i], w) for i, count, w in zip(going, counts, write, strict=True)]
        x = torch.cat([whole[i][done[i] : done[i] + count] for i, count in zip(going, counts, strict=True)])
        parts = ops.short_conv(x, weight, bias, spec(taps), batch(rows, pages)).split(counts)
        for i, count, w, part in zip(going, counts, write, parts, strict=True):
            got[i].append(part)
            done[i], page[i] = done[i] + count, w
    for i in range(3):
        assert torch.equal(torch.cat(got[i]), wanted[i])


def test_rows_that_read_one_checkpoint_side_by_side(ops):
    x, weight, pages = sequence(6), sequence(3, 1), make_pages(3)
    ops.short_conv(x[:4], weight, None, spec(3), batch([(4, 0, 9)], pages))
    rows = [(1, 9, 2), (2, 9, 3), (1, 9, 4)]
    out = ops.short_conv(torch.cat((x[4:5], x[4:6], x[4:5])), weight, None, spec(3), batch(rows, pages))
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[0], out[3])
    assert torch.equal(pages[3], x[4:6])
