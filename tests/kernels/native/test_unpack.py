"""GGML blocks taken apart natively: the bits of the plain form, whatever the format, the number and place of blocks."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels.native import NativeOps
from aengine.kernels.native.library import NativeError
from aengine.kernels.native.unpack import KINDS
from aengine.models.blocks import quantised
from aengine.models.ggml_types import GGML_TYPES
from tests.models.test_blocks import HALVES, random_blocks

TYPES = {kind.name: kind for kind in GGML_TYPES.values()}
BROKEN = {0: 0x7C00, 1: 0xFC00, 2: 0x7E01, 3: 0x0001, 4: 0x83FF, 5: 0x8000, 6: 0x7BFF}  # block: its fp16 scales


def bits(value: torch.Tensor | None) -> torch.Tensor | None:
    return value if value is None or value.dtype is not torch.float32 else value.view(torch.int32)


def check(ops: NativeOps, name: str, raw: torch.Tensor, shape: tuple[int, int]) -> None:
    kind = TYPES[name]
    want, got = quantised(raw, kind, shape), quantised(raw, kind, shape, ops.unpack_blocks)
    assert want is not None
    assert got is not None
    assert (got.bits, got.group, got.shape) == (want.bits, want.group, want.shape)
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(bits(got.scale), bits(want.scale))
    assert (got.minimum is None) == (want.minimum is None)
    assert got.minimum is None or torch.equal(bits(got.minimum), bits(want.minimum))


def test_every_integer_format_of_the_plain_form_has_a_native_one():
    assert {name: code for code, kind in GGML_TYPES.items() if (name := kind.name) in HALVES} == KINDS


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 1), (7, 3), (700, 5)])
def test_the_bits_are_those_of_plain_torch(ops, name, rows, columns):
    raw = random_blocks(name, rows * columns, seed=rows)
    check(ops, name, raw, (rows, columns * TYPES[name].block_elements))


@pytest.mark.parametrize("name", KINDS)
def test_blocks_may_begin_at_any_byte_and_hold_any_half(ops, name):
    kind = TYPES[name]
    blocks = random_blocks(name, 11, seed=5).view(11, kind.block_bytes).clone()
    for at in HALVES[name]:
        for block, half in BROKEN.items():
            blocks[block, at], blocks[block, at + 1] = half & 255, half >> 8
    apart = torch.zeros(blocks.numel() + 1, dtype=torch.uint8)
    apart[1:] = blocks.flatten()
    check(ops, name, apart[1:], (11, kind.block_elements))


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_the_number_of_threads_changes_nothing(ops_by_threads, name):
    raw = random_blocks(name, 2000, seed=1)
    for ops in ops_by_threads.values():
        check(ops, name, raw, (1000, 2 * TYPES[name].block_elements))


def test_another_format_or_a_minimum_out_of_place_is_refused(ops):
    codes, scale = torch.zeros(1, 32, dtype=torch.uint8), torch.zeros(1, 1)
    for name, minimum in (("F16", None), ("Q4_1", None), ("Q8_0", torch.zeros(1, 1))):
        with pytest.raises(NativeError, match="unpack"):
            ops.unpack_blocks(name, torch.zeros(1, 34, dtype=torch.uint8), codes, scale, minimum)
