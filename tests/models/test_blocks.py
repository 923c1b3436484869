"""GGML blocks taken apart: codes, scales and minima give back exactly what the formats' own formulas give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aengine.models.blocks import quantised
from aengine.models.ggml_types import GGML_TYPES
from aengine.models.quants import dequantise

HALVES = {  # where the fp16 scales of a block stand
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
FORMS = {"Q4_0": (4, 32), "Q4_1": (4, 32), "Q4_K": (4, 32), "Q2_K": (8, 16), "Q3_K": (8, 16), "Q6_K": (8, 16)}
KINDS = {kind.name: kind for kind in GGML_TYPES.values()}


def random_blocks(name: str, count: int, seed: int) -> torch.Tensor:
    """Random bytes, but with finite scales of every size and sign, zero and subnormal ones among them."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, KINDS[name].block_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        value = (rng.standard_normal(count) * 10.0 ** rng.integers(-7, 4, count)).astype(np.float16)
        value[:: max(1, count // 3)] = 0.0
        blocks[:, at : at + 2] = value.view(np.uint8).reshape(count, 2)
    return torch.from_numpy(blocks.reshape(-1))


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 3), (5000, 2)])
def test_nothing_is_lost(name, rows, columns):
    kind = KINDS[name]
    shape = (rows, columns * kind.block_elements)
    raw = random_blocks(name, rows * columns, rows)
    before = raw.clone()
    got = quantised(raw, kind, shape)
    assert got is not None
    assert (got.bits, got.group) == FORMS.get(name, (8, 32))
    assert got.shape == shape
    assert torch.equal(got.dequantise(), dequantise(raw, kind, shape))
    assert torch.equal(raw, before)
    if got.bits == 4:
        assert int(got.codes.max()) <= 15


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_numbers_have_no_codes(name):
    kind = KINDS[name]
    assert quantised(torch.zeros(64 * kind.block_bytes, dtype=torch.uint8), kind, (2, 32)) is None
