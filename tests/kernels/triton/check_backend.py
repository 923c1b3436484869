"""What is particular to the Triton backend: bits that do not depend on the batch, padding, packed bytes, fp8.

Owns: these properties.
Does not know: results of single ops, which `tests/kernels/test_contract.py` holds every backend to.
Invariants: run by `test_interpreted.py`, in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.errors import NotSupported
from aengine.kernels.ops import AttentionSpec, Experts, LayerKV, Linear
from aengine.kernels.quantised import Quantised
from aengine.kernels.triton import TritonOps, attention, fp8, packed
from aengine.kernels.triton.relay import fill_ids
from tests.kernels.native.paged import Pages, Sequence_, make_batch, make_spec, random_sequence, step_inputs

CPU = torch.device("cpu")
# The interpreter multiplies matrices by a library whose sums depend on where in the matrix a row stands; a device's do
# not, so there these bounds are 0.
LAST_BITS = 3e-7


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> TritonOps:
    monkeypatch.setattr(attention, "SPLIT_TOKENS", 32)
    return TritonOps(CPU)


def attend(ops: TritonOps, spec: AttentionSpec, sequences: list[Sequence_], rows: list[tuple[int, int, int]]) -> Tensor:
    pages = Pages([sequence.length for sequence in sequences], spec, torch.float32, page_tokens=4, seed=len(rows))
    for row, start, _ in rows:
        pages.fill(row, sequences[row], start)
    return ops.attention(*step_inputs(sequences, rows), spec, make_batch(pages, rows))


@pytest.mark.parametrize("kind", [{}, {"window": 9}], ids=str)
def test_a_row_has_the_same_bits_alone_among_others_and_in_other_splits_of_the_launch(
    ops: TritonOps, kind: dict[str, int]
) -> None:
    spec = make_spec(4, 2, 16, **kind)
    sequences = [random_sequence(length, spec, torch.float32, length) for length in (70, 40, 90)]
    rows = [(0, 69, 1), (1, 20, 19), (2, 88, 2)]
    together = attend(ops, spec, sequences, rows)
    at = 0
    for row in rows:
        assert torch.equal(attend(ops, spec, sequences, [row]), together[at : at + row[2]])
        at += row[2]


def test_tokens_of_a_short_row_are_those_of_one_at_a_time(ops: TritonOps) -> None:
    """Draft rows stay with the decode kernel while they are short."""
    spec = make_spec(4, 2, 16, window=33)
    sequences = [random_sequence(80, spec, torch.float32, 0)]
    together = attend(ops, spec, sequences, [(0, 62, 4)])
    for i in range(4):
        alone = attend(ops, spec, sequences, [(0, 62 + i, 1)])[0]
        assert (alone - together[i]).abs().max() < LAST_BITS


def test_a_chunk_of_a_prompt_is_that_of_the_whole(ops: TritonOps) -> None:
    spec = make_spec(4, 2, 16)
    sequences = [random_sequence(60, spec, torch.float32, 0)]
    whole = attend(ops, spec, sequences, [(0, 0, 60)])
    assert (attend(ops, spec, sequences, [(0, 21, 17)]) - whole[21:38]).abs().max() < LAST_BITS


def test_rows_of_padding_write_nothing_and_get_zeros(ops: TritonOps) -> None:
    spec = make_spec(2, 1, 16)
    sequences = [random_sequence(9, spec, torch.float32, row) for row in range(3)]
    pages = Pages([9, 9, 9], spec, torch.float32, page_tokens=4, seed=0)
    pages.fill(0, sequences[0], 8)
    rows = [(0, 8, 1), (1, 0, 1), (2, 0, 1)]
    batch = make_batch(pages, rows)
    batch = replace(batch, context=torch.tensor([9, 0, 0], dtype=torch.int32), tables=(batch.tables[0] * 1,))
    batch.tables[0][1:] = 0
    out = ops.attention(*step_inputs(sequences, rows), spec, batch)
    assert not out[1:].any()
    assert out[0].isfinite().all()
    assert batch.kv[0].k[0].isnan().all()


def test_the_number_of_splits_covers_what_a_row_can_see() -> None:
    full, windowed = make_spec(4, 2, 16), make_spec(4, 2, 16, window=600)
    assert [attention.splits_of(full, context, 8) for context in (0, 1, 512, 513, 5000)] == [1, 1, 1, 2, 10]
    assert [attention.splits_of(windowed, context, 8) for context in (1, 600, 5000)] == [1, 2, 3]


def test_pages_of_int8_need_scales_and_heads_have_a_limit(ops: TritonOps) -> None:
    pages = torch.zeros((2, 4, 1, 16), dtype=torch.int8)
    spec, sequences = make_spec(1, 1, 16), [random_sequence(1, make_spec(1, 1, 16), torch.float32, 0)]
    batch = make_batch(Pages([1], spec, torch.float32, page_tokens=4, seed=0), [(0, 0, 1)])
    with pytest.raises(ValueError, match="k_scale"):
        ops.attention(*step_inputs(sequences, [(0, 0, 1)]), spec, replace(batch, kv=(LayerKV(pages, pages),)))
    with pytest.raises(NotSupported, match="1024"):
        attention.geometry(make_spec(1, 1, 1024), torch.float32, torch.float32)


# ---- weights


def test_codes_of_four_bits_lie_two_to_an_octet_as_documented() -> None:
    codes = torch.randint(0, 16, (5, 70), dtype=torch.uint8)
    part = packed.pack([Quantised(codes, torch.full((5, 7), 0.5), None, 10, 4)], None, CPU).parts[0]
    assert part.codes.shape == (48, 16)
    assert part.scale.dtype is torch.float16
    for index in range(70):
        octet = part.codes[index // 32 * 16 + index % 16, :5]
        assert torch.equal(octet >> 4 if index % 32 >= 16 else octet & 15, codes[:, index])


def test_scales_that_fp16_cannot_hold_stay_fp32_and_equal_neighbours_are_joined() -> None:
    codes = torch.zeros((4, 32), dtype=torch.int8)
    parts = [Quantised(codes, torch.full((4, 1), scale), None, 32, 8) for scale in (0.5, 0.1)]
    made = packed.pack(parts, torch.zeros(8), CPU)
    assert [part.out_features for part in made.parts] == [8]
    assert made.parts[0].scale.dtype is torch.float32
    assert made.bias is not None


def test_groups_that_are_no_multiple_of_16_are_held_dense(ops: TritonOps) -> None:
    part = Quantised(torch.randint(0, 16, (6, 40), dtype=torch.uint8), torch.rand(6, 5), None, 8, 4)
    made = ops.prepare(Linear(torch.empty((6, 40), device="meta"), None, (part,)))
    assert made.packed is None
    assert torch.equal(made.weight, part.dequantise())


def test_experts_of_several_formats_are_refused(ops: TritonOps) -> None:
    def linear(bits: int) -> Linear:
        codes = torch.zeros((32, 32), dtype=torch.uint8 if bits == 4 else torch.int8)
        part = Quantised(codes, torch.ones(32, 1), None, 32, bits)
        return ops.prepare(Linear(torch.empty((32, 32), device="meta"), None, (part,)))

    mixed = (linear(4), linear(8))
    with pytest.raises(NotSupported, match="2 formats"):
        ops.mixture(torch.zeros(1, 32), torch.zeros(1, 2), Experts(mixed, mixed, 1, "softmax", "output"))


def test_fp8_weights_are_turned_back_where_the_device_does_not_multiply_them(ops: TritonOps) -> None:
    torch.manual_seed(0)
    dense, x = torch.randn(24, 48), torch.randn(3, 48)
    codes, scale = fp8.quantise_rows(dense)
    weight = fp8.Fp8Weight(codes, scale, torch.randn(24))
    assert not fp8.multiplies(weight)
    assert (weight.dequantise(torch.float32) - dense).abs().max() < dense.abs().max() / 16
    made = Linear(torch.empty((24, 48), device="meta"), packed=weight)
    assert torch.equal(ops.linear(x, made), F.linear(x, weight.dequantise(torch.float32)) + weight.bias)
    assert torch.equal(ops.embed(made, torch.tensor([3, 0])), weight.dequantise(torch.float32)[[3, 0]])
    unit = ops.prepare(Linear(codes))
    assert torch.equal(ops.logits(x, unit), F.linear(x, codes.float()))


def test_fp8_parts_of_a_checkpoint_become_one_weight_of_the_devices_product(
    ops: TritonOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every argument of the product, by a stand-in that multiplies what it is given."""
    torch.manual_seed(2)
    parts = []
    for out in (32, 16):
        codes, scale = fp8.quantise_rows(torch.randn(out, 48))
        parts.append(Quantised(codes, scale.unsqueeze(1), None, 48, 8))
    made = ops.prepare(Linear(torch.empty((48, 48), dtype=torch.bfloat16, device="meta"), None, tuple(parts)))
    assert isinstance(made.packed, fp8.Fp8Weight)
    dense, x = torch.cat([part.dequantise() for part in parts]), torch.randn(3, 48).bfloat16()

    def product(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert (a.dtype, b.dtype, b.stride(0)) == (fp8.E4M3, fp8.E4M3, 1)
        assert (scale_a.shape, scale_b.shape, scale_a.dtype) == ((3, 1), (1, 48), torch.float32)
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    monkeypatch.setattr(fp8, "multiplies", lambda weight: True)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    assert (ops.linear(x, made).float() - x.float() @ dense.T).abs().max() < 0.2 * 48**0.5
    odd = Quantised(parts[1].codes[:9], parts[1].scale[:9], None, 48, 8)
    assert ops.prepare(Linear(torch.empty((9, 48), device="meta"), None, (odd,))).packed is None


def test_fp8_products_of_rounded_activations_are_near() -> None:
    """The arithmetic of the device's product, spelt out."""
    torch.manual_seed(1)
    x, dense = torch.randn(5, 64), torch.randn(32, 64)
    (a, sa), (b, sb) = fp8.quantise_rows(x), fp8.quantise_rows(dense)
    product = (a.float() @ b.float().T) * sa.unsqueeze(1) * sb
    assert (product - x @ dense.T).abs().max() < 0.2 * 64**0.5
    zero, scale = fp8.quantise_rows(torch.zeros(1, 4))
    assert not zero.float().any()
    assert scale.tolist() == [1.0]


# ---- ids


def test_ids_come_from_the_host_or_the_relay_and_unusable_ones_are_told() -> None:
    ids = torch.tensor([7, 0, 0, 100, -1], dtype=torch.int32)
    sources = torch.tensor([-1, 2, 0, -1, -1], dtype=torch.int32)
    relay = torch.tensor([-5, 3, 99], dtype=torch.int32)
    out, unusable = fill_ids(ids, sources, relay, 100)
    assert out.tolist() == [7, 99, 0, 0, 0]
    assert unusable.tolist() == [False, False, True, True, True]
