"""The law of the backend: no bit of a row depends on the other rows, chunking, pages or threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from aengine.kernels.native import NativeOps
from aengine.kernels.ops import AttentionSpec, CrossBatch, CrossItem, CrossSpan, Linear, RopeTable
from aengine.kernels.reference_attention import first_visible
from tests.kernels.native.paged import Pages, Sequence_, make_batch, make_spec, random_sequence, step_inputs

OpsByThreads = dict[int, NativeOps]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_in", [(576, 576), (960, 576), (576, 1536), (130, 17), (3000, 64)])
def test_linear_rows_alone_and_together(
    ops_by_threads: OpsByThreads, dtype: torch.dtype, out_in: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    weight = Linear(torch.randn(out_in).to(dtype), torch.randn(out_in[0]))
    x = torch.randn(400, out_in[1]).to(dtype)
    whole = ops_by_threads[1].logits(x, ops_by_threads[1].prepare(weight))
    for ops in ops_by_threads.values():
        packed = ops.prepare(weight)
        for rows in (1, 2, 3, 5, 6, 7, 13, 33, 64, 200, 400):
            first = 400 - rows
            assert torch.equal(ops.logits(x[first:], packed), whole[first:]), (
                f"{rows} rows, {ops.context.threads} threads"
            )


def _row_operations(dtype: torch.dtype) -> dict[str, Callable[[NativeOps, Tensor, Tensor], Tensor]]:
    weight = torch.randn(96).to(dtype)
    angles = torch.rand(1000, 12)
    table = RopeTable(angles.cos(), angles.sin())
    return {
        "rms_norm": lambda ops, x, p: ops.rms_norm(x, weight, 1e-5),
        "add_rms_norm": lambda ops, x, p: ops.add_rms_norm(x, x.flip(1), weight, 1e-5)[0],
        "silu_mul": lambda ops, x, p: ops.silu_mul(x),
        "gelu_tanh_mul": lambda ops, x, p: ops.gelu_tanh_mul(x),
        "rope": lambda ops, x, p: ops.rope(x.unflatten(1, (4, 24)), p, table),
        "scale": lambda ops, x, p: ops.scale(x, 1.7),
        "add": lambda ops, x, p: ops.add(x, x.flip(1)),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_operations_alone_and_together(ops_by_threads: OpsByThreads, dtype: torch.dtype) -> None:
    x, positions = torch.randn(1000, 96).to(dtype), torch.arange(1000, dtype=torch.int32)
    for name, run in _row_operations(dtype).items():
        whole = run(ops_by_threads[1], x, positions)
        for ops in ops_by_threads.values():
            assert torch.equal(run(ops, x, positions), whole), name
            for row in (0, 1, 499, 999):
                at = slice(row, row + 1)
                assert torch.equal(run(ops, x[at], positions[at]), whole[at]), name


def attend_in_chunks(
    ops: NativeOps,
    spec: AttentionSpec,
    sequence: Sequence_,
    chunks: Sequence[int],
    *,
    kv_dtype: torch.dtype = torch.float32,
    companions: Sequence[Sequence_] = (),
    seed: int = 0,
) -> Tensor:
    """The sequence's outputs [L, heads * D], computed chunk by chunk beside companions that decode their last token."""
    sequences = [*companions, sequence]
    me = len(companions)
    pages = Pages([s.length for s in sequences], spec, kv_dtype, page_tokens=16, seed=seed)
    for row, companion in enumerate(companions):
        pages.fill(row, companion, companion.length - 1)
    outputs, start = [], 0
    for count in chunks:
        rows = [(row, s.length - 1, 1) for row, s in enumerate(companions)]
        rows.insert(me // 2, (me, start, count))
        out = ops.attention(*step_inputs(sequences, rows), spec, make_batch(pages, rows))
        outputs.append(out[me // 2 : me // 2 + count])
        start += count
    assert start == sequence.length
    return torch.cat(outputs)


SPECS = [
    make_spec(9, 3, 64),
    make_spec(4, 1, 256, window=100),
    make_spec(6, 2, 24, window=37, softcap=15.0),
    make_spec(4, 4, 17, chunk=48),
]
KV_DTYPES = [*DTYPES, torch.int8]
WAYS = [(1, [16] * 18 + [2], 6), (2, [64] * 4 + [34], 0), (5, [255, 1, 1, 33], 6), (2, [290], 6), (5, [290], 0)]


@pytest.mark.parametrize(
    ("spec", "kv_dtype"), [*zip(SPECS, (*KV_DTYPES, torch.float32), strict=True), (SPECS[0], torch.bfloat16)], ids=str
)
def test_attention_chunks_batches_pages_threads(
    ops_by_threads: OpsByThreads, spec: AttentionSpec, kv_dtype: torch.dtype
) -> None:
    length = 290
    sequence = random_sequence(length, spec, torch.float32, 11)
    companions = [random_sequence(1 + 17 * i, spec, torch.float32, 100 + i) for i in range(6)]
    whole = attend_in_chunks(ops_by_threads[1], spec, sequence, [length], kv_dtype=kv_dtype)
    for seed, (threads, chunks, others) in enumerate(WAYS):
        out = attend_in_chunks(
            ops_by_threads[threads],
            spec,
            sequence,
            chunks,
            kv_dtype=kv_dtype,
            companions=companions[:others],
            seed=seed,
        )
        assert torch.equal(out, whole), f"{threads} threads, chunks {chunks[:2]}.., {others} companions"


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_token_by_token_equals_prefill(ops_by_threads: OpsByThreads, kv_dtype: torch.dtype) -> None:
    sequence = random_sequence(530, SPECS[0], torch.float32, 5)
    chunks = [230, *[1] * 40, 240, *[1] * 20]
    whole = attend_in_chunks(ops_by_threads[2], SPECS[0], sequence, [530], kv_dtype=kv_dtype)
    assert torch.equal(attend_in_chunks(ops_by_threads[2], SPECS[0], sequence, chunks, kv_dtype=kv_dtype), whole)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_cross_attention_rows_pages_threads(ops_by_threads: OpsByThreads, kv_dtype: torch.dtype) -> None:
    """Tokens see items 0 and 1; companions see the same, others, or an item so long that tables get wider."""
    spec, lengths = make_spec(9, 3, 64), [700, 90, 300, 2100]
    stored = [random_sequence(length, spec, torch.float32, length) for length in lengths]
    q = torch.randn(45, spec.heads, spec.head_dim, generator=torch.Generator().manual_seed(0))
    mine = (0, 1)

    def attend(ops: NativeOps, rows: Sequence[tuple[int, int, tuple[int, ...]]], seed: int) -> list[Tensor]:
        """rows: (first token of q, tokens, items)."""
        pages = Pages(lengths, spec, kv_dtype, page_tokens=16, seed=seed)
        for row, sequence in enumerate(stored):
            pages.fill(row, sequence, sequence.length)
        items = [
            CrossItem(table[: -(-length // 16)].long(), length)
            for table, length in zip(pages.tables, lengths, strict=True)
        ]
        offsets = [0, *accumulate(count for _, count, _ in rows)]
        spans = tuple(
            CrossSpan(first, count, tuple(items[i] for i in seen))
            for first, (_, count, seen) in zip(offsets, rows, strict=False)
        )
        cross = CrossBatch(torch.arange(offsets[-1]), spans)
        batch = replace(make_batch(pages, [(0, 0, 1)]), cross=cross)
        out = ops.cross_attention(torch.cat([q[at : at + count] for at, count, _ in rows]), spec, batch)
        return list(out.split([count for _, count, _ in rows]))

    whole = attend(ops_by_threads[1], [(0, 45, mine)], 0)[0]
    twins = [(i, 1, mine) for i in range(20)]
    others = [(7, 1, (0,)), (3, 20, (3,)), (9, 2, (2, 0, 1)), (0, 1, (1, 0))]
    for threads, rows, at in (
        (2, [(0, 45, mine)], [0]),
        (5, [(5, 1, mine)], [0]),
        (2, [(0, 30, mine), *others, (30, 15, mine)], [0, 5]),
        (2, [*others, *twins, (20, 25, mine)], range(4, 25)),
        (1, [(44, 1, mine), *others], [0]),
    ):
        outputs = attend(ops_by_threads[threads], rows, threads)
        for i in at:
            first, count, _ = rows[i]
            assert torch.equal(outputs[i], whole[first : first + count]), f"{threads} threads, row {i} of {len(rows)}"


# Rows of the shared-pages test: (length, tokens of this step, row whose pages it shares, positions shared).
FAMILY = [
    (700, 1, 0, 0),
    (712, 1, 0, 600),  # ends a shared run inside a span
    (690, 3, 0, 600),
    (650, 1, 1, 640),  # shares more with row 1 than with row 0
    (513, 1, 0, 512),  # its own part is one position
    (300, 1, 0, 112),  # too little to sit in one tile
    (609, 40, 0, 560),  # a prefill beside them
    (420, 1, 7, 0),  # nothing shared
]
SHARED_SPECS = [
    (SPECS[0], torch.float32, 16),
    (make_spec(4, 1, 256), torch.int8, 16),
    (make_spec(6, 2, 64, window=300), torch.bfloat16, 8),
    (make_spec(4, 4, 40, chunk=320), torch.int8, 5),
    (make_spec(14, 2, 32, softcap=10.0), torch.bfloat16, 80),
]


@pytest.mark.parametrize(("spec", "kv_dtype", "page_tokens"), SHARED_SPECS, ids=str)
def test_rows_that_share_pages_as_if_each_had_its_own(
    ops_by_threads: OpsByThreads, spec: AttentionSpec, kv_dtype: torch.dtype, page_tokens: int
) -> None:
    sequences: list[Sequence_] = []
    for row, (length, _, other, common) in enumerate(FAMILY):
        fresh = random_sequence(length, spec, torch.float32, row)
        if common:
            common = common // page_tokens * page_tokens
            for mine, theirs in ((fresh.k, sequences[other].k), (fresh.v, sequences[other].v)):
                mine[:common] = theirs[:common]
        sequences.append(fresh)
    rows = [(row, length - count, count) for row, (length, count, _, _) in enumerate(FAMILY)]
    results = []
    for shared in (False, True):
        pages = Pages([s.length for s in sequences], spec, kv_dtype, page_tokens=page_tokens, seed=int(shared))
        for row, (_, _, other, common) in enumerate(FAMILY):
            if shared:
                pages.share(row, other, common)
            pages.fill(row, sequences[row], rows[row][1])
        for row, start, _ in rows:
            pages.tables[row, : first_visible(start, spec) // page_tokens] = 0  # given back: nothing may look there
        for threads, chosen in ((1, rows), (2, rows[::-1]), (5, rows)):
            out = ops_by_threads[threads].attention(*step_inputs(sequences, chosen), spec, make_batch(pages, chosen))
            per_row = dict(zip((row for row, _, _ in chosen), out.split([n for _, _, n in chosen]), strict=True))
            results.append(torch.cat([per_row[row] for row in range(len(FAMILY))]))
    assert torch.isfinite(results[0]).all()
    for result in results[1:]:
        assert torch.equal(result, results[0])


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_attention_any_chunks(ops_by_threads: OpsByThreads, data: st.DataObject) -> None:
    spec = make_spec(
        4,
        2,
        data.draw(st.sampled_from([8, 20, 64])),
        window=data.draw(st.sampled_from([0, 1, 16, 31, 70])),
        chunk=data.draw(st.sampled_from([0, 0, 32, 50])),
    )
    chunks = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
    threads = data.draw(st.sampled_from([1, 2, 5]))
    sequence = random_sequence(sum(chunks), spec, torch.float32, 3)
    whole = attend_in_chunks(ops_by_threads[1], spec, sequence, [sum(chunks)])
    assert torch.equal(attend_in_chunks(ops_by_threads[threads], spec, sequence, chunks, seed=9), whole)


def test_decode_batches(ops_by_threads: OpsByThreads) -> None:
    """A decode row alone, and among 7, 33 and 64 of other lengths."""
    spec = SPECS[0]
    sequences = [random_sequence(1 + (i * 37) % 400, spec, torch.float32, i) for i in range(64)]
    pages = Pages([s.length for s in sequences], spec, torch.float32, page_tokens=16, seed=0)
    for row, sequence in enumerate(sequences):
        pages.fill(row, sequence, sequence.length - 1)
    rows = [(row, s.length - 1, 1) for row, s in enumerate(sequences)]

    def run(ops: NativeOps, chosen: list[tuple[int, int, int]]) -> Tensor:
        return ops.attention(*step_inputs(sequences, chosen), spec, make_batch(pages, chosen))

    alone = torch.cat([run(ops_by_threads[1], [row]) for row in rows])
    for ops in ops_by_threads.values():
        for size in (7, 33, 64):
            assert torch.equal(run(ops, rows[64 - size :]), alone[64 - size :])


def test_a_shared_prefix_computed_by_another_row(ops_by_threads: OpsByThreads) -> None:
    """A cache hit: the second sequence reads the first one's pages for its first 96 positions."""
    spec = SPECS[0]
    first = random_sequence(96, spec, torch.float32, 1)
    tail = random_sequence(40, spec, torch.float32, 2)
    second = Sequence_(
        *(torch.cat(pair) for pair in zip((first.q, first.k, first.v), (tail.q, tail.k, tail.v), strict=True))
    )
    cold = attend_in_chunks(ops_by_threads[1], spec, second, [136])[96:]
    ops = ops_by_threads[2]
    pages = Pages([96, 136], spec, torch.float32, page_tokens=16, seed=4)
    pages.tables[1, :6] = pages.tables[0, :6]
    ops.attention(*step_inputs([first], [(0, 0, 96)]), spec, make_batch(pages, [(0, 0, 96)]))
    rows = [(1, 96, 40)]
    hot = ops.attention(*step_inputs([first, second], rows), spec, make_batch(pages, rows))
    assert torch.equal(hot, cold)


def test_threads_can_change_between_operations(ops: NativeOps) -> None:
    x, linear = torch.randn(30, 576), ops.prepare(Linear(torch.randn(960, 576)))
    expected = ops.linear(x, linear)
    try:
        for threads in (1, 3, 8, 2, 1):
            ops.set_threads(threads)
            assert ops.context.threads == threads
            assert torch.equal(ops.linear(x, linear), expected)
    finally:
        ops.set_threads(2)


def test_callers_from_several_threads_queue(ops: NativeOps) -> None:
    """One context, four Python threads (the foreign call drops the GIL): every result is whole."""
    linear = ops.prepare(Linear(torch.randn(960, 576)))
    inputs = [torch.randn(1 + 7 * i, 576).to(DTYPES[i % 2]) for i in range(4)]
    expected = [ops.linear(x, linear) for x in inputs]

    def work(index: int) -> bool:
        return all(torch.equal(ops.linear(inputs[index], linear), expected[index]) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
