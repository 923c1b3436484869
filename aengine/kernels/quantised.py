"""Integer weights in groups: what every quantised checkpoint is turned into before a backend packs it.

Owns: the `Quantised` record and its exact meaning.
Does not know: file formats, how backends lay codes out, activations.
Invariants: value[o, i] = scale[o, c // group] * code[o, c] + minimum[o, c // group], where c is input i's column: i
itself unless the columns have an `order` of their own. It is one fp32 multiplication and one addition, so that formats
whose products are exact in fp32 (all GGML block formats are) come back bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight [out, in]. codes [out, in]: uint8 0 .. 15 for `bits` 4, int8 for 8; scale fp32 [out, in / group];
    minimum fp32 of the same shape, or None for zero; `group` divides `in`. `order` int32 [in]: column c of codes
    belongs to input order[c], so that the inputs of a group stand together; None: to input c. `floating`: codes are
    e4m3, `bits` 8, with one scale an output and no minimum; only backends that ask for such weights (`holds_float8`)
    get them.

    Raises ValueError when the shapes do not fit together.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None
    group: int
    bits: int
    order: Tensor | None = None

    def __post_init__(self) -> None:
        out, size_in = self.codes.shape
        wanted = {4: torch.uint8, 8: torch.float8_e4m3fn if self.floating else torch.int8}.get(self.bits)
        if self.floating and (self.group != size_in or self.minimum is not None):
            raise ValueError(
                f"float8 codes in groups of {self.group} of {size_in} inputs: one scale an output, no minimum"
            )
        if self.codes.dtype is not wanted:
            raise ValueError(f"{self.bits}-bit codes of type {self.codes.dtype}: 4 takes uint8, 8 takes int8")
        if self.group < 1 or size_in % self.group:
            raise ValueError(f"{size_in} inputs do not divide into groups of {self.group}")
        if self.order is not None and (self.order.dtype is not torch.int32 or tuple(self.order.shape) != (size_in,)):
            raise ValueError(f"order is {self.order.dtype} {tuple(self.order.shape)}, not int32 ({size_in},)")
        shape = (out, size_in // self.group)
        for name, value in (("scale", self.scale), ("minimum", self.minimum)):
            if value is not None and (tuple(value.shape) != shape or value.dtype is not torch.float32):
                raise ValueError(f"{name} is {value.dtype} {tuple(value.shape)}, not float32 {shape}")

    @property
    def floating(self) -> bool:
        return self.codes.dtype is torch.float8_e4m3fn

    @property
    def fits_five(self) -> bool:
        """Whether codes of 8 bits are of 5 alone: -16 .. 15, or 0 .. 31 above a minimum. Most show it in a few rows."""
        if self.bits != 8 or self.floating:
            return False
        least, most = (-16, 15) if self.minimum is None else (0, 31)
        for codes in (self.codes[:8], self.codes):
            low, high = codes.aminmax()
            if int(low) < least or int(high) > most:
                return False
        return True

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.codes.shape[0]), int(self.codes.shape[1])

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in], computed in fp32 and rounded once to `dtype`."""
        out, size_in = self.shape
        values = self.codes.view(out, -1, self.group).float().mul_(self.scale.unsqueeze(-1))
        if self.minimum is not None:
            values.add_(self.minimum.unsqueeze(-1))
        values = values.view(out, size_in)
        if self.order is not None:
            values = torch.empty_like(values).index_copy_(1, self.order.long(), values)
        return values.to(dtype)

    def with_rows(self, order: Callable[[Tensor], Tensor]) -> Quantised:
        """The weight whose rows `order` puts in another order; it takes and returns tensors [out, ...]."""
        minimum = None if self.minimum is None else order(self.minimum)
        codes = order(self.codes.view(torch.uint8)).view(self.codes.dtype) if self.floating else order(self.codes)
        return Quantised(codes, order(self.scale), minimum, self.group, self.bits, self.order)


def one_order(parts: Sequence[Quantised]) -> bool:
    """Whether the columns of all parts belong to the same inputs, so that one row of activations serves them."""
    first = parts[0].order
    if first is None:
        return all(part.order is None for part in parts)
    return all(part.order is not None and torch.equal(part.order, first) for part in parts[1:])
