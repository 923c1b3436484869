"""Ways to lay KV into one arena, behind one interface: aengine's, and the two it is compared with.

Owns: `MultiSize` (the project's own planner, pool and prefix cache verbs) and `EqualPages` (two rules for pages of one
size), the jobs they hold, and the bytes a job needs.
Does not know: traces, when a job is admitted or preempted.
Invariants: all schemes keep the same entries for a job (its lifetimes say which) and hold the same chunk of a prompt
in flight; `held_bytes` is what no other job can use, so held minus needed is waste; the equal-size schemes pay no null
page and never fragment, which favours them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol

import numpy as np

from aengine.memory import Full, GroupSpec, Lifetime, Pool, State, plan
from aengine.prefix_cache import Lease, MediaItem, PrefixCache
from aengine.scheduler.pages import SPARE_LARGE

PAGE = 16


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way: `length` tokens are computed, of `total`. `media`: entries of each image."""

    number: int
    prompt: int
    total: int
    media: tuple[int, ...] = ()
    length: int = 0

    def __post_init__(self) -> None:
        self.length = self.prompt


class Scheme(Protocol):
    name: str

    def admit(self, job: Job) -> bool:
        """Compute the first `job.length` tokens, chunk by chunk; False, and nothing held, when they do not fit."""
        ...

    def advance(self, job: Job, upto: int) -> bool:
        """Compute tokens up to `upto`; False, and nothing changed, when pages are short."""
        ...

    def release(self, job: Job) -> None: ...

    def end_step(self) -> None:
        """What the step's jobs let go of may be used again."""
        ...

    def held_bytes(self) -> int:
        """Bytes of the arena that no other job could be given now."""
        ...

    def pinned_bytes(self) -> int:
        """Bytes that hold only cached pages and yet can be given to one group alone: large pages in use hold them."""
        ...

    def moved_bytes(self) -> int:
        """Bytes copied so far to keep pages together."""
        ...

    def fits_alone(self, job: Job) -> bool:
        """Whether the job could run to its end in an empty arena."""
        ...


def needed_bytes(specs: Sequence[GroupSpec], jobs: Sequence[Job]) -> int:
    """Bytes of the entries that later tokens of `jobs` will read: what a perfect scheme would hold."""
    total = 0
    for spec in specs:
        entry = sum(part.entry_bytes for layer in spec.layers for part in layer.parts)
        lifetime = spec.lifetime
        if isinstance(lifetime, State):
            total += entry * len(jobs)
        elif lifetime.per_item:
            total += entry * sum(sum(job.media) for job in jobs)
        else:
            total += entry * sum(job.length - lifetime.first_live(job.length) for job in jobs)
    return total


# ---- aengine


class MultiSize:
    """The project's own. `caching` also publishes pages, so that ended jobs leave cached pages to be evicted."""

    def __init__(self, specs: Sequence[GroupSpec], budget_bytes: int, chunk: int, *, caching: bool) -> None:
        self.name = "multi-size, cache on" if caching else "multi-size"
        self.plan = plan(specs, budget_bytes)
        self.pool = Pool(self.plan)
        self.cache = PrefixCache(self.pool, enabled=caching, in_flight_tokens=chunk)
        self._budget_bytes = budget_bytes
        self._chunk = chunk
        self._leases: dict[Job, Lease] = {}
        self._last_step: dict[Job, int] = {}  # that names the job's pages: a preempted job's are free at once
        self._step = 1
        self.broken_admissions = 0

    def admit(self, job: Job) -> bool:
        tokens = np.zeros(job.total, np.int32)
        tokens[0] = job.number  # keys are chained, so one token makes the whole sequence differ from all others
        lease = self.cache.acquire(job.number, tokens, job.length, media=_items(job))
        need = self.plan.peak_pages(job.length + 1, media_tokens=job.media, in_flight_tokens=self._chunk)
        if not self.pool.packs(need):
            self.cache.release(lease, last_step=0)
            return False
        at = lease.cached_tokens
        while at < job.length:
            upto = min(at + self._chunk, job.length, lease.next_boundary(at))
            if not self._grow(lease, upto, job.length, at):
                self.cache.release(lease, last_step=self._step - 1)
                self.broken_admissions += 1
                return False
            self.cache.commit(lease, upto, job.length, self._step)
            self.end_step()
            at = upto
        self._leases[job], self._last_step[job] = lease, self._step - 1
        return True

    def advance(self, job: Job, upto: int) -> bool:
        lease = self._leases[job]
        if upto > lease.capacity_tokens and not self._grow(lease, upto, upto, job.length):
            return False
        if upto // PAGE > job.length // PAGE:
            self.cache.commit(lease, upto, upto, self._step)
        self._last_step[job] = self._step
        return True

    def _grow(self, lease: Lease, upto: int, known: int, start: int) -> bool:
        """As the scheduler does: pages are moved together before somebody is preempted, in steps of their own."""
        while True:
            grown = self.cache.grow(lease, upto, self._step, known, start=start)
            if not grown.short:
                return True
            if not self.pool.packs(grown.need):
                return False
            self.cache.compact(self._step, max(1, self.pool.large_needed(grown.need) - self.pool.spare.count))
            self.end_step()

    def release(self, job: Job) -> None:
        self.cache.release(self._leases.pop(job), last_step=self._last_step.pop(job))

    def end_step(self) -> None:
        spare = SPARE_LARGE - self.pool.spare.count
        if spare > 0:
            self.cache.compact(self._step, spare)
        self.cache.retire(self._step)
        self._step += 1

    def held_bytes(self) -> int:
        """Large pages in use, less what is cached in them; the null page; what the arena leaves of the budget."""
        open_slabs = self.pool.unowned_slabs + self.pool.idle_slabs
        return self._budget_bytes - open_slabs * self.plan.large_bytes - self.pinned_bytes()

    def pinned_bytes(self) -> int:
        groups = zip(self.pool.groups, self.plan.groups, strict=True)
        return sum(group.cached_active * planned.payload for group, planned in groups)

    def moved_bytes(self) -> int:
        return self.pool.stats().moved_bytes

    def fits_alone(self, job: Job) -> bool:
        return self.plan.fits(job.total, media_tokens=job.media, in_flight_tokens=self._chunk)


def _items(job: Job) -> tuple[MediaItem, ...]:
    return tuple(
        MediaItem(sha256(f"{job.number} {i}".encode()).digest(), position=i, span=1, tokens=tokens)
        for i, tokens in enumerate(job.media)
    )


# ---- pages of one size


@dataclass
class EqualPages:
    """Every page is `page_bytes`; `tables` lists (lifetime, number of tables) of the layers that share a table.

    `merged`: image tokens take positions in every layer, as in an engine without a layout of its own for them.
    """

    name: str
    page_bytes: int
    page_tokens: int
    tables: tuple[tuple[Lifetime, int], ...]
    budget_bytes: int
    chunk: int
    merged: bool = False
    _held: dict[Job, int] = field(default_factory=dict)
    _used: int = 0

    def admit(self, job: Job) -> bool:
        starts = range(0, job.length, self.chunk)
        peak = max(self._pages(job, at, min(at + self.chunk, job.length)) for at in starts)
        if (self._used + peak) * self.page_bytes > self.budget_bytes:
            return False
        self._hold(job, self._pages(job, job.length, job.length))
        return True

    def advance(self, job: Job, upto: int) -> bool:
        pages = self._pages(job, job.length, upto)
        if (self._used + pages - self._held[job]) * self.page_bytes > self.budget_bytes:
            return False
        self._hold(job, self._pages(job, upto, upto))
        return True

    def release(self, job: Job) -> None:
        self._used -= self._held.pop(job)

    def end_step(self) -> None:
        """Nothing is fenced here."""

    def held_bytes(self) -> int:
        return self._used * self.page_bytes

    def pinned_bytes(self) -> int:
        return 0

    def moved_bytes(self) -> int:
        return 0

    def fits_alone(self, job: Job) -> bool:
        """A window's chunk in flight makes it hold most while it is computed, else at the end."""
        ends = (self._pages(job, max(0, at - self.chunk), at) for at in range(job.total, 0, -self.chunk))
        return max(ends) * self.page_bytes <= self.budget_bytes

    def _hold(self, job: Job, pages: int) -> None:
        self._used += pages - self._held.get(job, 0)
        self._held[job] = pages

    def _pages(self, job: Job, computed: int, upto: int) -> int:
        """Pages held while positions computed .. upto are being written."""
        size = self.page_tokens
        if self.merged:
            return -(-(upto + sum(job.media)) // size) * self.tables[0][1]
        total = 0
        for lifetime, tables in self.tables:
            if isinstance(lifetime, State):
                total += tables
            elif lifetime.per_item:
                total += tables * sum(-(-entries // size) for entries in job.media)
            else:
                total += tables * (-(-upto // size) - lifetime.first_live(computed) // size)
        return total


def all_layers(specs: Sequence[GroupSpec], budget_bytes: int, chunk: int) -> EqualPages:
    """One table for all layers: a page holds 16 tokens of every layer, whatever the layer will read of them.

    Recurrent state does not fit that; such models get pages as large as the largest group's ("max-page").
    """
    if any(isinstance(spec.lifetime, State) for spec in specs):
        largest = max(spec.payload_bytes for spec in specs)
        tables = tuple((spec.lifetime, 1) for spec in specs)
        return EqualPages("max-page", largest, PAGE, tables, budget_bytes, chunk)
    page_bytes = sum(spec.payload_bytes for spec in specs)
    return EqualPages("all-layers", page_bytes, PAGE, ((Full(), 1),), budget_bytes, chunk, merged=True)


def padded(specs: Sequence[GroupSpec], budget_bytes: int, chunk: int) -> EqualPages:
    """Equal-size pages with one table per group of as many layers as the rarest kind has (or all, if kinds differ in
    number by less than a quarter), short groups padded; attention pages grown in steps of 16 tokens until a layer's
    page holds a layer's recurrent state, and the state padded to it."""
    token_bytes = {_layer_bytes(spec) for spec in specs if not isinstance(spec.lifetime, State)}
    assert len(token_bytes) == 1, f"attention layers of {sorted(token_bytes)} bytes a token"
    token = token_bytes.pop()
    state = max((_layer_bytes(spec) for spec in specs if isinstance(spec.lifetime, State)), default=0)
    page_tokens = max(PAGE, -(-state // (token * PAGE)) * PAGE)
    counts = [len(spec.layers) for spec in specs]
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    tables = tuple((spec.lifetime, -(-len(spec.layers) // size)) for spec in specs)
    return EqualPages("padded", size * page_tokens * token, page_tokens, tables, budget_bytes, chunk)


def _layer_bytes(spec: GroupSpec) -> int:
    """Bytes per entry (token, or whole state) of one layer; all layers of a group are alike here."""
    return sum(part.entry_bytes for part in spec.layers[0].parts)
