"""Integer weights: against the plain-torch oracle, back out exactly, and the same bits whoever stands beside a row."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from aengine.errors import NotSupported
from aengine.kernels.native import NativeOps
from aengine.kernels.native.capture import Program, Sizes, record
from aengine.kernels.native.library import NativeError
from aengine.kernels.ops import Linear
from aengine.kernels.quantised import Quantised
from aengine.kernels.reference import ReferenceOps
from aengine.kernels.reference_quantised import linear_quantised

ROWS = (1, 2, 5, 6, 7, 64, 129)
# (bits, group or 0 for the whole row, with a minimum, scales that fp16 holds); 5: codes of 8 bits that fit 5
FORMATS = [
    (4, 32, True, True),
    (4, 32, False, True),
    (4, 64, True, False),
    (4, 16, True, True),
    (4, 0, True, False),
    (5, 32, False, True),
    (5, 32, True, True),
    (5, 64, False, False),
    (5, 16, True, False),
    (5, 16, False, True),
    (5, 0, False, False),
    (8, 32, False, True),
    (8, 32, True, False),
    (8, 16, False, False),
    (8, 16, True, True),
    (8, 64, True, True),
    (8, 0, False, True),
    (8, 0, True, False),
]


def make(
    out: int, size_in: int, bits: int = 4, group: int = 32, minimum: bool = True, half: bool = True, seed: int = 0
) -> Quantised:
    random = torch.Generator().manual_seed(seed + out + 1000 * size_in)
    group = group or size_in
    low, high = {4: (0, 16), 5: (0, 32) if minimum else (-16, 16), 8: (-128, 128)}[bits]
    codes = torch.randint(low, high, (out, size_in), generator=random).to(torch.uint8 if bits == 4 else torch.int8)
    scale = (torch.rand(out, size_in // group, generator=random) + 0.5) / 2**bits
    least = torch.randn(out, size_in // group, generator=random)
    if half:
        scale, least = scale.half().float(), least.half().float()
    return Quantised(codes, scale, least if minimum else None, group, 4 if bits == 4 else 8)


def linear_of(*parts: Quantised, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.float32) -> Linear:
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    return Linear(torch.empty(shape, dtype=dtype, device="meta"), bias, parts)


def activations(rows: int, size_in: int, seed: int = 0) -> torch.Tensor:
    """[rows, size_in], some units of 32 of which stand out in some rows, and get second codes."""
    random = torch.Generator().manual_seed(seed + rows)
    x = torch.randn(rows, size_in, generator=random)
    outlying = torch.rand(rows, -(-size_in // 32), generator=random) < 0.15
    return x * torch.where(outlying, 40.0, 1.0).repeat_interleave(32, 1)[:, :size_in]


def assert_near(y: torch.Tensor, expected: torch.Tensor) -> None:
    """Integer sums are exact, so only roundings of the fp32 sums differ: far less than one step of a code would."""
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=3e-6 * float(expected.abs().max()))


@pytest.mark.parametrize(("bits", "group", "minimum", "half"), FORMATS)
@pytest.mark.parametrize("size_in", [32, 40, 64, 576, 1536])
def test_against_the_oracle(ops: NativeOps, size_in: int, bits: int, group: int, minimum: bool, half: bool) -> None:
    if group and size_in % group:
        group = size_in
    pairs = tuple(zip((1, 7, 8, 9, 17, 8, 33), ROWS, strict=True))
    for out, rows in pairs if size_in < 576 else pairs[3::3]:
        part, bias = make(out, size_in, bits, group, minimum, half), torch.randn(out)
        w, x = ops.prepare(linear_of(part, bias=bias)), activations(rows, size_in)
        assert_near(ops.linear(x, w), linear_quantised(x, [part], bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_in_another_order(ops: NativeOps, dtype: torch.dtype) -> None:
    """What a captured step replays, too; and each row's bits are its own."""
    random = torch.Generator().manual_seed(5)
    order = torch.randperm(160, generator=random).int()
    parts = tuple(replace(make(out, 160, bits), order=order) for out, bits in ((40, 4), (9, 8)))
    w, x = ops.prepare(linear_of(*parts, dtype=dtype)), torch.randn(300, 200, generator=random).to(dtype)[:, 20:180]
    got = ops.logits(x, w)
    assert_near(got, linear_quantised(x, parts))
    exact = x.double() @ torch.cat([part.dequantise() for part in parts]).double().T
    assert (got - exact).norm() / exact.norm() < 2e-2
    alone = torch.cat([ops.logits(x[row : row + 1], w) for row in range(len(x))])
    assert torch.equal(got, alone)

    taken = torch.zeros(7, 160, dtype=dtype)
    replayed = record(ops, lambda other, sizes: other.logits(taken[: sizes.tokens], w), Sizes(7, 1, 1, 1))
    program = Program(ops.context, replayed.calls)
    for rows in (7, 3, 1):
        taken[:rows] = x[:rows]
        replayed.resize(Sizes(rows, 1, 1, 1))
        program.run()
        assert torch.equal(replayed.outputs[:rows], got[:rows])


def test_bf16_in_and_out(ops: NativeOps) -> None:
    parts = (make(24, 96), make(9, 96, 8))
    w = ops.prepare(linear_of(*parts, dtype=torch.bfloat16))
    x = torch.randn(9, 200).to(torch.bfloat16)[:, 50:146]
    z = ops.logits(x, w)
    assert_near(z, linear_quantised(x, parts))
    assert torch.equal(ops.linear(x, w), z.to(torch.bfloat16))


def test_segments_of_several_formats(ops: NativeOps) -> None:
    """As in a fused qkv of a file whose v has more bits: each segment's outputs as if it stood alone."""
    parts = (make(40, 128), make(7, 128, 8, 16, False), make(33, 128, 4, 64), make(1, 128, 8, 0), make(64, 128, 8))
    bias, x = torch.randn(145), torch.randn(11, 128)
    y = ops.linear(x, ops.prepare(linear_of(*parts, bias=bias)))
    alone = [ops.linear(x, ops.prepare(linear_of(part))) for part in parts]
    assert torch.equal(y, torch.cat(alone, -1) + bias)


@pytest.mark.parametrize(("bits", "rounding"), [(4, 2e-2), (8, 5e-5)])
def test_how_near_the_exact_product(ops: NativeOps, bits: int, rounding: float) -> None:
    """8 bits of activations err by some 1 %, 16 by 256 times less, which codes of 8 bits meet."""
    part, random = make(40, 576, bits), torch.Generator().manual_seed(1)
    for rows in (1, 9):
        x = torch.randn(rows, 576, generator=random)
        exact = x.double() @ part.dequantise().double().T
        error = (ops.linear(x, ops.prepare(linear_of(part))) - exact).norm() / exact.norm()
        assert rounding / 100 < error < rounding


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_units_that_stand_out_err_as_little_as_the_others(ops: NativeOps, rows: int) -> None:
    part, x = make(40, 576), torch.randn(rows, 576, generator=torch.Generator().manual_seed(1))
    x[:, 64:96] *= 100
    x[0, 128:160] *= 100
    w = ops.prepare(linear_of(part))
    exact = x.double() @ part.dequantise().double().T
    error = (ops.linear(x, w) - exact).norm() / exact.norm()
    assert 1e-6 < error < 5e-4  # 30 to 100 times less than 8 bits leave
    assert_near(ops.linear(x, w), linear_quantised(x, [part]))


@pytest.mark.parametrize("size_in", [512, 8192, 8224])
def test_rows_of_one_scale_are_summed_as_integers(ops: NativeOps, size_in: int) -> None:
    """The greatest sums that there are fit, whatever the signs; beyond 8,192 inputs sums are of units."""
    random = torch.Generator().manual_seed(size_in)
    codes = torch.full((18, size_in), -128, dtype=torch.int8)
    codes[9:] = torch.randint(-128, 128, (9, size_in), generator=random)
    part = Quantised(codes, torch.rand(18, 1, generator=random) + 0.5, torch.randn(18, 1, generator=random), size_in, 8)
    signs = torch.randint(0, 2, (40, size_in), generator=random) * 2.0 - 1
    signs[0], signs[1] = 1, -1
    signs[2, : size_in // 2] = -1
    signs[3] = torch.randn(size_in, generator=random)
    x, w = signs, ops.prepare(linear_of(part))
    expected = linear_quantised(x, [part])
    for rows in (1, 5, 40):
        assert_near(ops.linear(x[:rows], w), expected[:rows])
    exact = x.double() @ part.dequantise().double().T
    torch.testing.assert_close(expected.double(), exact, rtol=0, atol=1e-4 * float(exact.abs().max()))


def test_rows_of_one_scale_bear_activations_that_stand_out(ops: NativeOps) -> None:
    """Less error than int8 with a scale for each 32 inputs would make, even where one is 3,000 times the others."""
    part, x = make(40, 1536, 8, 0, False), torch.randn(6, 1536, generator=torch.Generator().manual_seed(1))
    x[:, 700] = torch.tensor([1.0, 10, 100, 300, 1000, 3000])
    exact = x.double() @ part.dequantise().double().T
    units = x.view(6, 48, 32)
    scale = units.abs().amax(-1, keepdim=True) / 127
    by_units = (torch.round(units / scale) * scale).view(6, 1536).double() @ part.dequantise().double().T
    error = (ops.linear(x, ops.prepare(linear_of(part))) - exact).norm(dim=1)
    assert (error < (by_units - exact).norm(dim=1)).all()


@pytest.mark.parametrize("bits", [4, 5, 8, 0])
def test_rows_threads_and_places_change_no_bit(ops_by_threads: dict[int, NativeOps], bits: int) -> None:
    parts = (
        (make(200, 160, bits, 32, bits != 5), make(120, 160, 8 if bits == 4 else 4, 16, True))
        if bits
        else (make(200, 160, 8, 0, True), make(120, 160, 4, 32))
    )
    x = activations(300, 160)
    alone = None
    for ops in ops_by_threads.values():
        w = ops.prepare(linear_of(*parts))
        whole = ops.linear(x, w)
        if alone is None:
            alone = torch.cat([ops.linear(x[r : r + 1], w) for r in range(300)])
        assert torch.equal(whole, alone)
        for first, rows in ((0, 2), (3, 5), (40, 7), (100, 129), (299, 1)):
            assert torch.equal(ops.linear(x[first : first + rows], w), alone[first : first + rows])


@pytest.mark.parametrize(("bits", "code"), [(4, 15), (4, 0), (5, -16), (5, 15), (8, -128), (8, 127), (8, -1)])
@pytest.mark.parametrize("group", [16, 32])
def test_extremes_do_not_saturate(ops: NativeOps, bits: int, code: int, group: int) -> None:
    """Activations are the greatest codes themselves: each integer sum is exact, only roundings to fp32 differ."""
    codes = torch.full((17, 64), code, dtype=torch.uint8 if bits == 4 else torch.int8)
    part = Quantised(codes, torch.ones(17, 64 // group), None, group, 4 if bits == 4 else 8)
    w = ops.prepare(linear_of(part))
    x = torch.full((8, 64), 127.0 if part.fits_five or bits == 4 else 32767.0)
    x[1] *= -1
    x[2, ::2] *= -1
    x[3, ::4] *= -1
    x[4, 1::4] *= -1
    x[5, :32] *= -1
    expected = (x.double() @ codes.double().T).float()
    for rows in (1, 8):
        got, want = ops.linear(x[:rows], w), expected[:rows]
        zero = want == 0  # terms that cancel in the oracle's order need not in another
        torch.testing.assert_close(got[~zero], want[~zero], rtol=1e-6, atol=0)
        assert (got[zero].abs() <= 1e-7 * expected.abs().max()).all()
        assert torch.equal(ops.linear(x[:rows] * 0, w), torch.zeros(rows, 17))


@pytest.mark.parametrize("bits", [4, 5])
@pytest.mark.parametrize("group", [16, 32])
def test_extremes_of_second_codes_do_not_saturate(ops: NativeOps, group: int, bits: int) -> None:
    """What the first codes leave over is half a step wherever it can be: as much as there is."""
    codes = torch.full((17, 192), 15, dtype=torch.uint8 if bits == 4 else torch.int8)
    part = Quantised(codes, torch.ones(17, 192 // group), None, group, 4 if bits == 4 else 8)
    x = torch.full((8, 192), 0.1)
    x[:, :32] = 63.5 - 1 / 64  # 63 and nearly a half in steps of 1, which the next input makes of the unit
    x[:, 0] = 127.0
    x[1] *= -1
    got, want = ops.linear(x, ops.prepare(linear_of(part))), x.double() @ codes.double().T
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_not_finite_marks_its_row_alone(ops: NativeOps, bits: int, bad: float) -> None:
    w = ops.prepare(linear_of(make(33, 96, bits)))
    x = torch.randn(9, 96)
    clean = ops.linear(x, w)
    x[4, 50] = bad
    y = ops.linear(x, w)
    assert y[4].isnan().all()
    assert torch.equal(y[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_tiny_and_huge_activations(ops: NativeOps) -> None:
    part = make(9, 64)
    x = torch.randn(5, 64) * torch.tensor([1e-45, 1e-37, 1e-30, 1e30, 1e36]).unsqueeze(-1)
    y, expected = ops.linear(x, ops.prepare(linear_of(part))), linear_quantised(x, [part])
    for row in range(5):
        assert_near(y[row], expected[row])


@pytest.mark.parametrize(("bits", "group", "minimum", "half"), FORMATS)
def test_rows_come_back_bit_for_bit(ops: NativeOps, bits: int, group: int, minimum: bool, half: bool) -> None:
    parts = (make(21, 192, bits, group, minimum, half), make(12, 192, 8 if bits == 4 else 4, 32))
    dense, ids = (
        torch.cat([part.dequantise() for part in parts]),
        torch.tensor([0, 32, 20, 21, 7, 7, 15], dtype=torch.int32),
    )
    assert torch.equal(ops.embed(ops.prepare(linear_of(*parts)), ids), dense[ids])
    half_precision = ops.embed(ops.prepare(linear_of(*parts, dtype=torch.bfloat16)), ids)
    assert torch.equal(half_precision, dense[ids].to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_dense_panels_come_back(ops: NativeOps, dtype: torch.dtype) -> None:
    weight, ids = torch.randn(37, 24).to(dtype), torch.tensor([36, 0, 17, 15, 16, 8], dtype=torch.int32)
    assert torch.equal(ops.embed(ops.prepare(Linear(weight)), ids), weight[ids])


def test_rows_that_are_not_there(ops: NativeOps) -> None:
    w = ops.prepare(linear_of(make(8, 32)))
    for index in (-1, 8):
        with pytest.raises(NativeError, match="out of range"):
            ops.embed(w, torch.tensor([0, index], dtype=torch.int32))


def test_scales_take_half_the_bytes_only_where_that_is_exact(ops: NativeOps) -> None:
    sizes = [ops.prepare(linear_of(make(64, 1024, half=half))).packed.block.size for half in (True, False)]
    scales = 2 * 64 * 32
    assert sizes[1] - sizes[0] == 2 * scales
    assert sizes[0] < 64 * 1024 // 2 + 2 * scales + 256


def test_prepare_keeps_nothing_unpacked(ops: NativeOps) -> None:
    part = make(24, 64)
    x = torch.randn(3, 64)
    w = ops.prepare(linear_of(part))
    assert w.parts == ()
    assert w.weight.is_meta
    assert ops.prepare(w) is w
    before = ops.linear(x, w)
    part.codes.zero_()
    assert torch.equal(ops.linear(x, w), before)


def test_parts_that_do_not_fit_name_their_shapes(ops: NativeOps) -> None:
    linear = Linear(torch.empty(9, 32, device="meta"), None, (make(8, 32),))
    with pytest.raises(ValueError, match=r"\[\(8, 32\)\] do not make up a weight of 9 x 32"):
        ops.prepare(linear)


def test_groups_the_kernels_lack_are_refused(ops: NativeOps) -> None:
    with pytest.raises(NotSupported, match="groups of 8 in rows of 40"):
        ops.prepare(linear_of(make(3, 40, group=8)))


def test_no_rows(ops: NativeOps) -> None:
    w = ops.prepare(linear_of(make(8, 32)))
    assert ops.linear(torch.empty(0, 32), w).shape == (0, 8)
    assert ops.embed(w, torch.empty(0, dtype=torch.int32)).shape == (0, 32)


def test_reference_dequantises(ops: NativeOps) -> None:
    parts = (make(8, 64), make(9, 64, 8))
    reference = ReferenceOps()
    w = reference.prepare(linear_of(*parts, dtype=torch.bfloat16))
    assert torch.equal(w.weight, torch.cat([part.dequantise(torch.bfloat16) for part in parts]))
    assert torch.equal(reference.embed(w, torch.tensor([16, 0])), w.weight[[16, 0]])
    assert w.parts == ()
