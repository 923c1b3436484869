"""Dequantisation against the gguf package, bit for bit, on random blocks and on quantised values."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.models.ggml_types import GGML_TYPES
from aengine.models.quants import dequantise

CODES = sorted(GGML_TYPES)
QUANTISABLE = (2, 3, 6, 7, 8, 30)  # the package has no quantiser for the K formats


def expected(raw: np.ndarray, code: int) -> np.ndarray:
    if code in (0, 1):
        return raw.view(np.float32 if code == 0 else np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(code))


@pytest.mark.parametrize("code", CODES, ids=lambda code: GGML_TYPES[code].name)
def test_type_table_agrees_with_the_package(code):
    kind = GGML_TYPES[code]
    assert gguf.GGMLQuantizationType(code).name == kind.name
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(code)] == (kind.block_elements, kind.block_bytes)


@pytest.mark.parametrize("code", CODES, ids=lambda code: GGML_TYPES[code].name)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 40))
@settings(max_examples=15, deadline=None)
def test_random_bytes_equal_the_package(code, seed, blocks):
    kind = GGML_TYPES[code]
    raw = np.random.default_rng(seed).integers(0, 256, blocks * kind.block_bytes, dtype=np.uint8)
    want = expected(raw, code).reshape(-1)
    got = dequantise(torch.from_numpy(raw.copy()), kind, (blocks * kind.block_elements,)).numpy()
    assert np.array_equal(got, want, equal_nan=True)


@pytest.mark.parametrize("code", QUANTISABLE, ids=lambda code: GGML_TYPES[code].name)
def test_quantised_matrix_keeps_shape_and_values(code):
    kind = GGML_TYPES[code]
    values = np.random.default_rng(code).standard_normal((6, 64), dtype=np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType(code)).reshape(-1).view(np.uint8)
    got = dequantise(torch.from_numpy(raw.copy()), kind, (6, 64))
    assert got.shape == (6, 64)
    assert got.dtype == torch.float32
    assert np.abs(got.numpy() - values).max() < 0.35
    assert np.array_equal(got.numpy(), expected(raw, code).reshape(6, 64))


def test_result_is_new_memory():
    raw = torch.zeros(8, dtype=torch.uint8)
    dequantise(raw, GGML_TYPES[0], (2,)).fill_(1.0)
    assert raw.sum() == 0
