"""Which media items a step's tokens see, as the attention kernel wants it.

Owns: the tables of items' pages, one after another by spans of tokens.
Does not know: attention, layers, what an item is.
Invariants: the positions that a table could name are whole spans of the kernel, so that every item begins one. A
step's spans of tokens follow one another: each begins where the one before ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from aengine.kernels.ops import CrossBatch

SPAN = 256  # AE_SPAN of attention.h


@dataclass(frozen=True, slots=True)
class SeenItems:
    """Of one step and one size of pages; items in the order of `cross.spans`, once for each span that sees them.

    tables int32 [items, columns]; row_offsets, row_items int32 [spans + 1]: tokens and items before each span;
    item_tokens int32 [items].
    """

    cross: CrossBatch
    page_tokens: int
    tables: Tensor
    row_offsets: Tensor
    row_items: Tensor
    item_tokens: Tensor

    @classmethod
    def of(cls, cross: CrossBatch, page_tokens: int) -> SeenItems:
        items = [item for span in cross.spans for item in span.items]
        step = SPAN // math.gcd(SPAN, page_tokens)
        columns = -(-max(len(item.pages) for item in items) // step) * step
        tables = torch.zeros((len(items), columns), dtype=torch.int32)
        for table, item in zip(tables, items, strict=True):
            table[: len(item.pages)] = item.pages
        return cls(
            cross,
            page_tokens,
            tables,
            _ends([span.count for span in cross.spans]),
            _ends([len(span.items) for span in cross.spans]),
            torch.tensor([item.tokens for item in items], dtype=torch.int32),
        )

    @property
    def rows(self) -> tuple[int, int, int, int, int]:
        """Tables, their stride, row_offsets, no context, number of rows."""
        return self.tables.data_ptr(), self.tables.stride(0), self.row_offsets.data_ptr(), 0, len(self.cross.spans)

    @property
    def items(self) -> tuple[int, int]:
        return self.row_items.data_ptr(), self.item_tokens.data_ptr()


def _ends(counts: Sequence[int]) -> Tensor:
    """0 and the running sums."""
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
