"""The storage formats of GGML files.

Owns: the formats' names and sizes.
Does not know: their arithmetic (quants), files; never imports torch, because whoever only reads a tokenizer needs none.
Invariants: codes are those of the file format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A storage format: `block_elements` values in `block_bytes` bytes."""

    name: str
    block_elements: int
    block_bytes: int


GGML_TYPES: Mapping[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    30: GgmlType("BF16", 1, 2),
}
