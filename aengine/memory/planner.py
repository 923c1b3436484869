"""Page sizes for any list of groups, fixed once at start-up.

Owns: the choice of the large page size and of how many small pages of each group it holds.
Does not know: who uses the pages; torch.
Invariants: pitch * slots = large page, exactly, so page id -> address is id * pitch; pitch is a multiple of 256 bytes
and no smaller than the payload; large page 0 is never handed out: it holds the null page (id 0) of every group.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aengine.errors import ConfigError
from aengine.memory.groups import GroupSpec, PartPlace, attention_group
from aengine.memory.lifetimes import Full

PITCH_ALIGN = 256  # what paged attention kernels ask of stride(0)
LARGE_MAX = 64 * 2**20
ARENA_SHARE = 512  # a large page is at most this part of the arena: bounds what a half-empty one strands
MULTIPLES_MAX = 256  # candidates tried; padding falls like 1 / multiple, so more bring nothing
REFERENCE_TOKENS = 8192  # the length at which groups are weighed by default


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group in the arena. Page id = large page * slots + slot; its bytes begin at id * pitch."""

    spec: GroupSpec
    slots: int
    pitch: int
    payload: int
    places: tuple[tuple[PartPlace, ...], ...]

    @property
    def padding(self) -> float:
        """Pitch padding per payload byte."""
        return self.pitch / self.payload - 1


@dataclass(frozen=True, slots=True)
class PagePlan:
    """The layout of an arena of `large_pages` large pages of `large_bytes` bytes, the null one included."""

    large_bytes: int
    large_pages: int
    groups: tuple[GroupPlan, ...]

    @property
    def arena_bytes(self) -> int:
        return self.large_bytes * self.large_pages

    @property
    def usable(self) -> int:
        """Large pages that can be handed out."""
        return self.large_pages - 1

    @property
    def capacity(self) -> tuple[int, ...]:
        """Pages of each group if it had the arena for itself."""
        return tuple(self.usable * group.slots for group in self.groups)

    def large_needed(self, pages: Iterable[int]) -> int:
        """Large pages that hold pages[g] pages of each group g in an empty arena."""
        return sum(-(-count // group.slots) for count, group in zip(pages, self.groups, strict=True))

    def peak_pages(
        self, total_tokens: int, *, media_tokens: Sequence[int] = (), in_flight_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Most pages of each group that one sequence of `total_tokens` with these media items holds at once."""
        out = []
        for group in self.groups:
            spec = group.spec
            lifetime, page = spec.lifetime, spec.tokens_per_page
            if lifetime.per_item:
                out.append(sum(lifetime.peak_pages(tokens, page, None) for tokens in media_tokens))
            else:
                out.append(lifetime.peak_pages(total_tokens, page, in_flight_tokens))
        return tuple(out)

    def fits(self, total_tokens: int, *, media_tokens: Sequence[int] = (), in_flight_tokens: int | None = None) -> bool:
        """Whether one such sequence can run to its end in an otherwise empty arena."""
        pages = self.peak_pages(total_tokens, media_tokens=media_tokens, in_flight_tokens=in_flight_tokens)
        return self.large_needed(pages) <= self.usable

    def max_tokens(self, limit: int, *, in_flight_tokens: int | None = None) -> int:
        """The longest sequence, up to `limit`, that fits: what start-up sizing fits the context length to."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle, in_flight_tokens=in_flight_tokens) else (low, middle - 1)
        return low

    def digest(self) -> bytes:
        """Names the byte layout of pages: pages written under another digest must not be read back."""
        return hashlib.sha256(repr([(g.spec, g.payload) for g in self.groups]).encode()).digest()

    def describe(self) -> str:
        """A text table for people."""
        head = (
            f"{self.large_pages:,} large pages of {_size(self.large_bytes)} = {_size(self.arena_bytes)}"
            f" (one of them stays empty: unused places in tables point to it)"
        )
        rows = [("group", "lifetime", "layers", "tokens/page", "payload", "pitch", "slots", "padding", "pages")]
        for group, pages in zip(self.groups, self.capacity, strict=True):
            spec = group.spec
            cells = (spec.name, spec.lifetime.label, str(len(spec.layers)), str(spec.tokens_per_page))
            sizes = (_size(group.payload), _size(group.pitch), str(group.slots), f"{group.padding:.2%}", f"{pages:,}")
            rows.append(cells + sizes)
        widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
        return "\n".join(
            [head] + ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
        )


def plan(
    groups: Sequence[GroupSpec],
    arena_bytes: int,
    weights: Sequence[float] | None = None,
    *,
    large_bytes: int | None = None,
) -> PagePlan:
    """Choose the large page for `groups` in `arena_bytes` bytes.

    `weights`: expected byte share of each group (any scale); None: shares of one 8,192-token sequence with one media
    item of that many entries. `large_bytes` forces the size (rounded up to fit the slots).
    Raises ConfigError when the arena has no room for the null page and one large page.
    """
    if not groups:
        raise ConfigError("no page groups: a plan needs at least one")
    payloads = [group.payload_bytes for group in groups]
    shares = _shares(groups, payloads, weights)
    if large_bytes is not None:
        if large_bytes < max(payloads):
            raise ConfigError(f"large page of {large_bytes:,} bytes is smaller than a page of {max(payloads):,} bytes")
        sizes = [large_bytes]
    else:
        sizes = _candidates(payloads, arena_bytes)
    large, slots = min(
        (fit for size in sizes for fit in _fits(size, payloads)),
        key=lambda fit: (_score(fit, payloads, shares, arena_bytes), fit[0]),
    )
    large_pages = arena_bytes // large
    if large_pages < 2:
        raise ConfigError(
            f"{arena_bytes:,} bytes for pages hold {large_pages} large pages of {large:,} bytes; at least 2 are needed"
        )
    planned = tuple(
        GroupPlan(spec, n, large // n, payload, spec.places())
        for spec, n, payload in zip(groups, slots, payloads, strict=True)
    )
    return PagePlan(large, large_pages, planned)


def uniform_plan(pages: int, tokens_per_page: int = 16) -> PagePlan:
    """`pages` usable pages of one full-attention group with tiny entries: for simulation and tests."""
    spec = attention_group("full", Full(), 1, kv_heads=1, head_dim=4, dtype="float32", tokens_per_page=tokens_per_page)
    return plan([spec], _pitched(spec.payload_bytes) * (pages + 1))


def _shares(groups: Sequence[GroupSpec], payloads: Sequence[int], weights: Sequence[float] | None) -> list[float]:
    if weights is None:
        weights = [
            float(payload * spec.lifetime.peak_pages(REFERENCE_TOKENS, spec.tokens_per_page, 0))
            for spec, payload in zip(groups, payloads, strict=True)
        ]
    if len(weights) != len(groups) or min(weights) < 0 or sum(weights) <= 0:
        raise ConfigError(f"weights {list(weights)} do not fit {len(groups)} groups")
    total = sum(weights)
    return [weight / total for weight in weights]


def _candidates(payloads: Sequence[int], arena_bytes: int) -> list[int]:
    """Multiples of the largest payload, and the least common multiple, which needs no padding at all."""
    largest = max(payloads)
    limit = max(largest, min(LARGE_MAX, arena_bytes // ARENA_SHARE))
    if len(payloads) == 1:
        return [largest]  # a plain free list; larger would only strand bytes
    sizes = [largest * k for k in range(1, min(limit // largest, MULTIPLES_MAX) + 1)]
    common = math.lcm(*map(_pitched, payloads))
    return [*sizes, common] if common <= limit else sizes


def _fits(size: int, payloads: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """(large page, slots): as many slots as go into `size`, which is rounded up until every pitch is exact and aligned.

    Slot counts without a common factor can make that a long way up; powers of two never need more than twice the size.
    """
    most = tuple(max(1, size // _pitched(payload)) for payload in payloads)
    powers = tuple(1 << n.bit_length() - 1 for n in most)
    out = []
    for slots in (most, powers):
        unit = PITCH_ALIGN * math.lcm(*slots)
        need = max(size, *(n * _pitched(payload) for n, payload in zip(slots, payloads, strict=True)))
        out.append((-(-need // unit) * unit, slots))
    return out


def _pitched(payload: int) -> int:
    return -(-payload // PITCH_ALIGN) * PITCH_ALIGN


def _score(
    fit: tuple[int, tuple[int, ...]], payloads: Sequence[int], shares: Sequence[float], arena_bytes: int
) -> float:
    """Expected padding, plus a large page per group that is only partly used at any time."""
    large, slots = fit
    padding = sum(
        share * (large / (n * payload) - 1) for share, n, payload in zip(shares, slots, payloads, strict=True)
    )
    return padding + len(payloads) * large / arena_bytes


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
