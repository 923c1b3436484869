"""What one page holds: layers of one lifetime, their parts, shapes and element types.

Owns: Part, LayerSpec, GroupSpec and the byte layout inside a page.
Does not know: the arena, other groups, torch.
Invariants: a page is layer-major, then part-major; each part starts at a multiple of PART_ALIGN bytes; a part of a
page is contiguous, [entries, *shape].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aengine.memory.lifetimes import Lifetime, State

PART_ALIGN = 64  # one cache line, and a multiple of every element size

ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer: `shape` of one entry (of one token, or of the whole recurrent state)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"part {self.name!r} has element type {self.dtype!r}, not one of {sorted(ITEM_BYTES)}")
        if any(size < 1 for size in self.shape):
            raise ValueError(f"part {self.name!r} has shape {self.shape}: sizes must be at least 1")

    @property
    def entry_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's share of a page. `name` is for people; the order of layers in the group is what counts."""

    name: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Where a part lies: byte `offset` in the page, [entries, *shape] of `dtype`."""

    offset: int
    entries: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers that share a lifetime, and thus pages.

    `tokens_per_page`: positions (or media entries) of one page; for State the alignment of checkpoints.
    `tokens_per_entry` > 1: a compressed cache keeps one entry for that many tokens.
    """

    name: str
    lifetime: Lifetime
    layers: tuple[LayerSpec, ...]
    tokens_per_page: int = 16
    tokens_per_entry: int = 1

    def __post_init__(self) -> None:
        if self.tokens_per_page < 1 or self.tokens_per_page % self.tokens_per_entry:
            raise ValueError(
                f"group {self.name!r}: {self.tokens_per_page} tokens per page is not a positive multiple of "
                f"{self.tokens_per_entry} tokens per entry"
            )
        if not any(layer.parts for layer in self.layers):
            raise ValueError(f"group {self.name!r} has no layers with parts")

    @property
    def entries_per_page(self) -> int:
        return 1 if isinstance(self.lifetime, State) else self.tokens_per_page // self.tokens_per_entry

    @property
    def elements(self) -> tuple[str, ...]:
        """The element types in a page; a page re-used with other ones must be zeroed (stale bits may be NaN)."""
        return tuple(sorted({part.dtype for layer in self.layers for part in layer.parts}))

    @property
    def payload_bytes(self) -> int:
        """Bytes of a page in use, alignment of its parts included."""
        last = self.places()[-1][-1]
        return last.offset + _aligned(last.entries * math.prod(last.shape) * ITEM_BYTES[last.dtype])

    def places(self) -> tuple[tuple[PartPlace, ...], ...]:
        """places()[layer][part], in page order."""
        offset = 0
        out = []
        for layer in self.layers:
            row = []
            for part in layer.parts:
                row.append(PartPlace(offset, self.entries_per_page, part.shape, part.dtype))
                offset += _aligned(self.entries_per_page * part.entry_bytes)
            out.append(tuple(row))
        return tuple(out)


def attention_group(
    name: str,
    lifetime: Lifetime,
    layers: int | Sequence[str],
    *,
    kv_heads: int,
    head_dim: int,
    dtype: str = "bfloat16",
    tokens_per_page: int = 16,
) -> GroupSpec:
    """A group of equal attention layers with parts "k" and "v", each [tokens_per_page, kv_heads, head_dim].

    With dtype int8 also "k_scale" and "v_scale", float32 [tokens_per_page, kv_heads].
    """
    names = [f"layer{i}" for i in range(layers)] if isinstance(layers, int) else layers
    parts = [Part("k", (kv_heads, head_dim), dtype), Part("v", (kv_heads, head_dim), dtype)]
    if dtype == "int8":
        parts += [Part("k_scale", (kv_heads,), "float32"), Part("v_scale", (kv_heads,), "float32")]
    return GroupSpec(name, lifetime, tuple(LayerSpec(n, tuple(parts)) for n in names), tokens_per_page)


def _aligned(size: int) -> int:
    return -(-size // PART_ALIGN) * PART_ALIGN
