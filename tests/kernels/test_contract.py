"""The same cases for every backend that can run here: what `Ops` promises, against fp64 and plain formulas.

Owns: small shapes at the edges of every op.
Does not know: how a backend computes; tests of that lie beside this one.
Invariants: a case that one backend passes means the same for another. Under TRITON_INTERPRET (see
`triton/test_interpreted.py`) the Triton backend runs on the CPU, and alone: a program takes milliseconds there.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.errors import NotSupported
from aengine.kernels.native import Context, NativeOps, Unavailable, build, load_library
from aengine.kernels.ops import (
    AttentionSpec,
    CrossBatch,
    CrossItem,
    CrossSpan,
    Experts,
    LayerKV,
    LayerState,
    Linear,
    Ops,
    RopeTable,
    StatePart,
    StateSpec,
    StepBatch,
)
from aengine.kernels.quantised import Quantised
from aengine.kernels.reference import ReferenceOps
from aengine.kernels.reference_cross import cross_attention, write_items
from tests.kernels.native.conftest import ISAS
from tests.kernels.native.paged import (
    Pages,
    dense_attention,
    make_batch,
    make_spec,
    random_sequence,
    rotated,
    step_inputs,
)

F32, BF16, INT8, E4M3 = torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["triton"] if INTERPRETED else ["reference", *ISAS] + ["triton"] * torch.cuda.is_available()
TOLERANCE = {F32: 2e-5, BF16: 2**-6}


@pytest.fixture(scope="module", params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "reference":
        return ReferenceOps()
    if request.param in ISAS:
        built = build(request.config.cache.mkdir("native-kernels"), isas=ISAS)
        assert not isinstance(built, Unavailable), built.reason
        return NativeOps(Context(load_library(built.path), threads=2, isa=request.param))
    from aengine.kernels.triton import TritonOps

    return TritonOps(torch.device("cpu" if INTERPRETED else "cuda"))


@pytest.fixture(autouse=True)
def small_splits(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rows of some dozens of tokens are split and merged."""
    if ops.name == "triton":
        monkeypatch.setattr("aengine.kernels.triton.attention.SPLIT_TOKENS", 32)


def moved(x: Tensor, ops: Ops) -> Tensor:
    """On the backend's device, with the strides and gaps it has here."""
    device = getattr(ops, "device", torch.device("cpu"))
    if device.type == "cpu":
        return x
    flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


def near(got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    tolerance = TOLERANCE[dtype] * factor
    torch.testing.assert_close(got.cpu().double(), want.double(), rtol=tolerance, atol=tolerance)


# ---- attention


def moved_batch(batch: StepBatch, ops: Ops) -> StepBatch:
    at = {name: moved(getattr(batch, name), ops) for name in ("ids", "positions", "row_offsets", "context")}
    scales = ((kv.k_scale, kv.v_scale) for kv in batch.kv)
    kv = tuple(
        LayerKV(moved(layer.k, ops), moved(layer.v, ops), *(None if s is None else moved(s, ops) for s in pair))
        for layer, pair in zip(batch.kv, scales, strict=True)
    )
    return replace(batch, **at, kv=kv, tables=tuple(moved(table, ops) for table in batch.tables))


def check_attention(
    ops: Ops,
    spec: AttentionSpec,
    rows: list[tuple[int, int, int]],
    page: int,
    dtype: torch.dtype = F32,
    kv_dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
    half: int = 0,
) -> None:
    """rows: (sequence, start, count). Sequences before `start` are in their pages. `half`: the attention rotates."""
    kv_dtype = kv_dtype or dtype
    lengths = [1 + max(start + count for row, start, count in rows if row == i) for i in range(len(rows))]
    sequences = [random_sequence(length, spec, dtype, seed) for seed, length in enumerate(lengths)]
    pages = Pages(lengths, spec, kv_dtype, page_tokens=page, seed=1)
    for row, start, _ in rows:
        pages.fill(row, sequences[row], start)
    batch = moved_batch(make_batch(pages, rows), ops)
    q, k, v = (moved(x, ops) for x in step_inputs(sequences, rows))
    rope = None
    if half:
        sequences, table = rotated(sequences, half)
        rope = RopeTable(moved(table.cos, ops), moved(table.sin, ops))
        for row, start, _ in rows:
            pages.fill(row, sequences[row], start)
        batch = moved_batch(make_batch(pages, rows), ops)
    got = ops.attention(q, k, v, spec, batch, None if sinks is None else moved(sinks, ops), rope)
    want = [dense_attention(sequences[row], spec, kv_dtype, sinks, start)[:count] for row, start, count in rows]
    cut = INTERPRETED and kv_dtype is BF16  # the interpreter cuts fp32 off where the device rounds
    near(got, torch.cat(want), BF16 if cut else dtype)


@pytest.mark.parametrize("page", [1, 5, 16])
def test_rows_around_a_page_and_rows_without_tokens(ops: Ops, page: int) -> None:
    lengths = [(0, 1), (0, page), (0, page + 1), (page, 1), (2 * page - 1, 1), (page - 1, 2), (33, 0)]
    check_attention(ops, make_spec(4, 2, 16), [(i, *row) for i, row in enumerate(lengths)], page)


@pytest.mark.parametrize(
    "kind", [{"window": 1}, {"window": 8}, {"chunk": 8}, {"window": 21, "chunk": 24}, {"softcap": 2.0}], ids=str
)
def test_windows_chunks_and_soft_caps(ops: Ops, kind: dict[str, float]) -> None:
    rows = [(0, 6, 1), (1, 7, 1), (2, 8, 1), (3, 3, 12), (4, 62, 1), (5, 40, 9)]
    check_attention(ops, make_spec(2, 1, 16, **kind), rows, 4)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 24), (9, 3, 64), (20, 1, 16)])
def test_grouped_heads(ops: Ops, heads: int, kv_heads: int, dim: int) -> None:
    check_attention(ops, make_spec(heads, kv_heads, dim), [(0, 0, 19), (1, 32, 1), (2, 33, 2)], 16)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, BF16), (F32, INT8), (BF16, INT8), (F32, BF16)])
def test_element_types(ops: Ops, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check_attention(ops, make_spec(4, 2, 16), [(0, 0, 11), (1, 40, 1), (2, 15, 2)], 8, dtype, kv_dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_pages_of_fp8(ops: Ops, dtype: torch.dtype) -> None:
    """What is beyond their range is kept as their greatest value."""
    spec, rows, one = make_spec(4, 2, 16), [(0, 0, 11), (1, 40, 1), (2, 15, 2)], make_spec(1, 1, 16)
    if ops.name.startswith("native"):
        with pytest.raises(NotSupported, match="float8"):
            check_attention(ops, spec, rows, 8, dtype, E4M3)
        return
    check_attention(ops, spec, rows, 8, dtype, E4M3)
    batch = moved_batch(make_batch(Pages([1], one, E4M3, page_tokens=4, seed=0), [(0, 0, 1)]), ops)
    x = moved(torch.tensor([1e4, -1e4, 448.0, 0.3], dtype=dtype).repeat(4).view(1, 1, 16), ops)
    assert ops.attention(x, x, x, one, batch).view(-1)[:4].tolist() == [448.0, -448.0, 448.0, 0.3125]


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(F32, F32), (BF16, BF16), (F32, INT8)])
@pytest.mark.parametrize("half", [8, 5])
def test_rotation_within_attention(ops: Ops, dtype: torch.dtype, kv_dtype: torch.dtype, half: int) -> None:
    """Of all of a head's elements, or of its first."""
    rows = [(0, 0, 11), (1, 40, 1), (2, 15, 2)]
    check_attention(ops, make_spec(6, 2, 16), rows, 8, dtype, kv_dtype, half=half)


def test_sinks(ops: Ops) -> None:
    sinks = torch.tensor([0.0, 2.0, -3.0, 8.0])
    check_attention(
        ops, make_spec(4, 2, 16, window=16), [(0, 0, 11), (1, 40, 1), (2, 15, 2), (3, 0, 1)], 8, sinks=sinks
    )


def test_rows_that_share_pages_see_what_this_step_writes(ops: Ops) -> None:
    spec = make_spec(2, 1, 16)
    sequence = random_sequence(14, spec, F32, 0)
    pages = Pages([14, 14], spec, F32, page_tokens=4, seed=0)
    pages.share(1, 0, 8)
    rows = [(0, 0, 8), (1, 8, 6)]
    q, k, v = (moved(x, ops) for x in step_inputs([sequence, sequence], rows))
    got = ops.attention(q, k, v, spec, moved_batch(make_batch(pages, rows), ops))
    near(got, dense_attention(sequence, spec, F32), F32)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_items_are_seen_whole_and_nothing_behind_their_ends(ops: Ops, dtype: torch.dtype) -> None:
    page, heads, kv_heads, dim = 4, 4, 2, 16
    spec = AttentionSpec(0, 1, heads, kv_heads, dim, 0.3, cross=True)
    kv = LayerKV(*(moved(torch.full((16, page, kv_heads, dim), torch.nan, dtype=dtype), ops) for _ in range(2)))
    made = {}
    for name, length, numbers in (("a", 6, [7, 2]), ("b", 8, [5, 1]), ("c", 1, [9]), ("d", 15, [3, 12, 4, 10])):
        k, v = torch.randn(2, length, kv_heads, dim, generator=torch.Generator().manual_seed(length)).to(dtype)
        item = CrossItem(moved(torch.tensor(numbers), ops), length)
        ops.write_items(moved(k, ops), moved(v, ops), kv, item.pages)
        made[name] = (item, k, v)
    plan = [("a", 0, 4), ("ab", 4, 1), ("dbcad", 5, 11)]
    spans = tuple(CrossSpan(first, count, tuple(made[name][0] for name in names)) for names, first, count in plan)
    q = torch.randn(16, heads, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    batch = StepBatch(
        ids=q, positions=q, row_offsets=q, context=q, tables=(), kv=(kv,), max_context=0, host_counts=(),
        host_starts=(), cross=CrossBatch(moved(torch.arange(16), ops), spans),
    )  # fmt: skip
    got = ops.cross_attention(moved(q, ops), spec, batch)
    for names, first, count in plan:
        k, v = (torch.cat([made[name][part] for name in names]).double().repeat_interleave(2, 1) for part in (1, 2))
        weights = (torch.einsum("thd,lhd->htl", q[first : first + count].double(), k) * spec.scale).softmax(-1)
        near(got[first : first + count], torch.einsum("htl,lhd->thd", weights, v).flatten(1), dtype)


@pytest.mark.parametrize(("page", "dim", "heads", "dtype"), [(16, 64, 3, BF16), (48, 24, 6, F32)])
def test_items_of_many_pages(ops: Ops, page: int, dim: int, heads: int, dtype: torch.dtype) -> None:
    """Against the reference: pages that lie apart, items that end at, before and behind what a kernel takes at once,
    spans of one token, of a tile and of several, two spans that see the same."""
    spec = AttentionSpec(0, 1, heads, heads // 3, dim, dim**-0.5, cross=True)
    lengths, counts = [255, 1, 257, 512, 300], [1, 1, 40, 1, 3]
    seen = [(3,), (3,), (1, 0, 4), (2, 4), (4,)]
    pages = Pages(lengths, spec, dtype, page_tokens=page, seed=3)
    items = []
    for row, length in enumerate(lengths):
        sequence = random_sequence(length, spec, dtype, row)
        table = pages.tables[row, : -(-length // page)].long()
        write_items(sequence.k, sequence.v, pages.kv, table)
        items.append(CrossItem(moved(table, ops), length))
    q = torch.randn(sum(counts), heads, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    spans, first = [], 0
    for names, count in zip(seen, counts, strict=True):
        spans.append(CrossSpan(first, count, tuple(items[name] for name in names)))
        first += count
    cross = CrossBatch(moved(torch.arange(len(q)), ops), tuple(spans))
    kv = LayerKV(moved(pages.kv.k, ops), moved(pages.kv.v, ops))
    batch = StepBatch(
        ids=q, positions=q, row_offsets=q, context=q, tables=(), kv=(kv,), max_context=0, host_counts=(),
        host_starts=(), cross=cross,
    )  # fmt: skip
    near(ops.cross_attention(moved(q, ops), spec, batch), cross_attention(q, pages.kv, spec, cross, 32), dtype)


# ---- rows and elements


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("dim", [1, 48, 130])
def test_norms(ops: Ops, dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(dim)
    wide, weight = torch.randn(3, 4 * dim).to(dtype), torch.rand(dim)
    heads = wide.split([dim, 2 * dim, dim], -1)[1].unflatten(1, (2, dim))

    def normed(x: Tensor) -> Tensor:
        return x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()

    moved_wide, moved_weight = moved(wide, ops), moved(weight, ops)
    moved_heads = moved_wide.split([dim, 2 * dim, dim], -1)[1].unflatten(1, (2, dim))
    near(ops.rms_norm(moved_heads, moved_weight, 1e-5), normed(heads), dtype)
    x, residual = wide[:, :dim], wide[:, dim : 2 * dim]
    out, total = ops.add_rms_norm(moved_wide[:, :dim], moved_wide[:, dim : 2 * dim], moved_weight, 1e-5)
    near(total, x + residual, dtype)
    near(out, normed(x + residual), dtype, 2)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rotations_and_gates(ops: Ops, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference, wide = ReferenceOps(), torch.randn(3, 3 * 24).to(dtype)
    positions, angles = torch.tensor([0, 9, 4], dtype=torch.int32), torch.rand(10, 8) * 6
    here, there = wide.unflatten(1, (3, 24))[:, :2], moved(wide, ops).unflatten(1, (3, 24))[:, :2]
    for half in (8, 5):
        table = RopeTable(angles[:, :half].cos().contiguous(), angles[:, :half].sin().contiguous())
        got = ops.rope(there, moved(positions, ops), RopeTable(moved(table.cos, ops), moved(table.sin, ops)))
        near(got, reference.rope(here, positions, table), dtype)
    factors = torch.rand(10)
    got = ops.scale_positions(there, moved(positions, ops), moved(factors, ops))
    near(got, reference.scale_positions(here, positions, factors), dtype)
    near(ops.silu_mul(moved(wide, ops)[:, :50]), reference.silu_mul(wide[:, :50]), dtype)
    near(ops.gelu_tanh_mul(moved(wide, ops)[:, :50]), reference.gelu_tanh_mul(wide[:, :50]), dtype)


def test_row_operations(ops: Ops) -> None:
    x, y = torch.randn(2, 6, 10)
    index, there, other = moved(torch.tensor([4, 0, 5]), ops), moved(x, ops), moved(y, ops)
    assert torch.equal(ops.add(there, other).cpu(), x + y)
    assert torch.equal(ops.mul(there[:, :3], other[:, 3:6]).cpu(), x[:, :3] * y[:, 3:6])
    assert torch.equal(ops.scale(there, 0.3).cpu(), x * 0.3)
    assert torch.equal(ops.take(there, index).cpu(), x[[4, 0, 5]])
    assert torch.equal(ops.put(there, index, other[:3]).cpu(), x.index_copy(0, torch.tensor([4, 0, 5]), y[:3]))
    assert [part.tolist() for part in ops.split(there, (3, 7))] == [part.tolist() for part in x.split([3, 7], -1)]


# ---- linears


def prepared(ops: Ops, weight: Tensor, bias: Tensor | None = None, parts: tuple[Quantised, ...] = ()) -> Linear:
    return ops.prepare(Linear(weight, bias, parts))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [0, 1, 18])
def test_dense_linears(ops: Ops, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 40).to(dtype), torch.randn(24, 40).to(dtype) / 6, torch.randn(24).to(dtype)
    want = x.double() @ weight.double().T
    near(ops.linear(moved(x, ops), prepared(ops, weight, bias)), want + bias.double(), dtype, 2)
    logits = ops.logits(moved(x, ops), prepared(ops, weight))
    assert logits.dtype is F32
    near(logits, want, F32)
    ids = torch.tensor([23, 0, 7], dtype=torch.int32)
    assert torch.equal(ops.embed(prepared(ops, weight), moved(ids, ops)).cpu(), weight[ids])
    assert torch.equal(ops.embed(moved(weight, ops), moved(ids, ops)).cpu(), weight[ids])


def quantised(out: int, size: int, group: int, bits: int, minimum: bool, seed: int = 0) -> Quantised:
    random = torch.Generator().manual_seed(seed)
    low, high, kind = (0, 16, torch.uint8) if bits == 4 else (-127, 128, torch.int8)
    codes = torch.randint(low, high, (out, size), generator=random).to(kind)
    scale = (torch.rand(out, size // group, generator=random) + 0.1) / high
    return Quantised(codes, scale, -scale * (high // 2) if minimum else None, group, bits)


FORMATS = [(4, 32, True), (4, 16, True), (4, 96, False), (8, 16, False), (8, 32, True), (8, 96, False), (4, 128, True)]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("bits", "group", "minimum"), FORMATS)
def test_quantised_linears(ops: Ops, dtype: torch.dtype, bits: int, group: int, minimum: bool) -> None:
    """Of two parts and a bias. Backends that round activations to int8 may be off by their share of it."""
    size = 128 if group == 128 else 96
    parts = (quantised(20, size, group, bits, minimum), quantised(13, size, size, 8, False, 1))
    weight = torch.cat([part.dequantise() for part in parts])
    bias, x = (torch.randn(n, generator=torch.Generator().manual_seed(2)).to(dtype) for n in ((33,), (5, size)))
    made = prepared(ops, torch.empty(33, size, dtype=dtype, device="meta"), bias, parts)
    got = ops.linear(moved(x, ops), made)
    want = x.double() @ weight.double().T + bias.double()
    near(got, want, BF16, 8 if ops.name.startswith("native") or dtype is BF16 else 0.01)
    if dtype is F32:
        ids = torch.tensor([32, 0, 19, 20], dtype=torch.int32)
        assert torch.equal(ops.embed(made, moved(ids, ops)).cpu(), weight[ids])


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_linears_whose_inputs_are_reordered(ops: Ops, bits: int) -> None:
    order = torch.randperm(96, generator=torch.Generator().manual_seed(6)).int()
    parts = tuple(replace(quantised(out, 96, 32, bits, True, out), order=order) for out in (20, 13))
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(2))
    got = ops.linear(moved(x, ops), prepared(ops, torch.empty(33, 96, device="meta"), None, parts))
    want = x.double() @ torch.cat([part.dequantise() for part in parts]).double().T
    near(got, want, BF16, 8 if ops.name.startswith("native") else 0.01)


# ---- mixtures and states


@pytest.mark.parametrize("packed", [0, 4, 8])
@pytest.mark.parametrize(
    ("scoring", "weigh", "activation", "bias"),
    [("softmax", "output", "silu", True), ("sigmoid", "input", "clamped", False)],
)
def test_mixtures(ops: Ops, packed: int, scoring: str, weigh: str, activation: str, bias: bool) -> None:
    torch.manual_seed(3)
    settings = {"top_k": 2, "scoring": scoring, "weigh": weigh, "activation": activation, "limit": 0.8}

    def linears(out: int, size: int) -> list[Linear]:
        made = []
        for seed in range(5):
            parts = (quantised(out, size, 32, packed, packed == 4, seed),) if packed else ()
            weight = parts[0].dequantise() if parts else torch.randn(out, size) / size**0.5
            made.append(Linear(weight, torch.randn(out) if bias else None, parts))
        return made

    gate_up, down = linears(44, 32), linears(32, 22) if not packed else linears(32, 32)
    gate_up = linears(64, 32) if packed else gate_up
    dense = Experts(*(tuple(Linear(w.weight, w.bias) for w in part) for part in (gate_up, down)), **settings)
    held = Experts(*(tuple(ops.prepare(w) for w in part) for part in (gate_up, down)), **settings)
    x = torch.randn(9, 32)
    scores = torch.stack([torch.randperm(5) for _ in range(9)]).float() * 0.7
    scores[4] = torch.tensor([0.0, 1.0, 1.0, 0.5, 1.0])  # of equals the lower experts
    distinct = scores.clone()
    distinct[4] = torch.tensor([0.0, 1.0, 1.0, 0.5, 0.0])
    got = ops.mixture(moved(x, ops), moved(scores, ops), held)
    loose = 8 if packed and ops.name.startswith("native") else 0.01
    near(got, ReferenceOps().mixture(x, distinct, dense), BF16, loose)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [[1], [3, 1, 5, 2], [1, 0, 4]], ids=str)
def test_short_convolutions(ops: Ops, dtype: torch.dtype, rows: list[int]) -> None:
    """Bit for bit, with rows that read pages which others write."""
    torch.manual_seed(1)
    dim, taps = 70, 3
    spec = StateSpec(0, 0, (StatePart("inputs", (taps - 1, dim), dtype),))
    pages = torch.randn(9, taps - 1, dim).to(dtype)
    pages[0] = 0
    order = torch.tensor([3, 8, 1, 5][: len(rows)], dtype=torch.int32)
    tables, offsets = torch.stack((order.roll(1), order), 1), torch.tensor([0, *accumulate(rows)], dtype=torch.int32)
    tables[0, 0] = 0
    tables[3:, 1] = 0  # a fourth row leaves no state
    x, weight, bias = torch.randn(sum(rows), dim).to(dtype), torch.randn(taps, dim), torch.randn(dim)

    def batch(pages: Tensor, tables: Tensor, offsets: Tensor) -> StepBatch:
        return StepBatch(
            ids=offsets, positions=offsets, row_offsets=offsets, context=offsets[1:], tables=(tables,), kv=(),
            max_context=0, host_counts=tuple(rows), host_starts=(0,) * len(rows), states=(LayerState((pages,)),),
        )  # fmt: skip

    here, there = pages.clone(), moved(pages.clone(), ops)
    want = ReferenceOps().short_conv(x, weight, bias, spec, batch(here, tables, offsets))
    args = (moved(x, ops), moved(weight, ops), moved(bias, ops), spec)
    got = ops.short_conv(*args, batch(there, moved(tables, ops), moved(offsets, ops)))
    if INTERPRETED and dtype is BF16:
        near(got, want, BF16)
    else:
        assert torch.equal(got.cpu(), want)
    assert torch.equal(there.cpu(), here)
    assert not here[0].any()


def test_a_plain_formula_agrees_with_the_gates(ops: Ops) -> None:
    x = torch.linspace(-30, 30, 64).view(2, 32)
    gate, up = x.double().chunk(2, -1)
    near(ops.silu_mul(moved(x, ops)), F.silu(gate) * up, F32)
    near(ops.gelu_tanh_mul(moved(x, ops)), F.gelu(gate, approximate="tanh") * up, F32)
