"""WHAT is already computed, and who holds it: the only verbs by which sequences get and give back pages.

Owns: leases, hit reconciliation across groups, publication by step, hit accounting.
Does not know: requests, scheduling, tensors, how pages lie in memory.
Invariants: `acquire` never fails and changes nothing but pins; `grow` takes pages of all groups or of none; the last
known token is always computed; a published page is never written again; every lease is released exactly once; what a
failed step published is taken back before anybody can hit it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.memory.compaction import compact
from aengine.memory.pool import Pool
from aengine.memory.slabs import Page
from aengine.prefix_cache.audit import audit
from aengine.prefix_cache.bulk import RowParts, commit_rows, grow_rows
from aengine.prefix_cache.cohort import Cohort
from aengine.prefix_cache.growth import grow_all, grow_one
from aengine.prefix_cache.items import ItemRules
from aengine.prefix_cache.journal import Journal
from aengine.prefix_cache.keys import MediaItem, TokenChain
from aengine.prefix_cache.lease import Grown, Lease
from aengine.prefix_cache.matching import Matcher, Roots, make_rules
from aengine.prefix_cache.positional import PositionalRules
from aengine.prefix_cache.relocation import Compaction, relocate
from aengine.prefix_cache.retention import GRID_TOKENS, RetentionPoints
from aengine.prefix_cache.retraction import retract
from aengine.prefix_cache.state import StateRules
from aengine.prefix_cache.stats import CacheStats, Counters, gather
from aengine.prefix_cache.tails import TailIndex

COPIED_SLABS = 8  # as many bytes at most does a step copy to empty large pages


class PrefixCache:
    """The prefix cache of one engine over the pages of `pool`.

    `weights_digest`: names the weights; another model's pages never match. `enabled` False: nothing is published, so
    nothing hits. `in_flight_tokens`: most positions of one sequence launched and not retired (bounds what windows hold;
    None: unbounded). `grid_tokens`: spacing of the regular retention points of window and state groups; 0: none.
    `key_bytes`: shortened keys, for tests only.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        weights_digest: bytes = b"",
        enabled: bool = True,
        in_flight_tokens: int | None = None,
        grid_tokens: int = GRID_TOKENS,
        overrides: Mapping[str, str] | None = None,
        key_bytes: int = 32,
    ) -> None:
        self.pool = pool
        self.enabled = enabled
        self.in_flight_tokens = in_flight_tokens
        specs = [group.spec for group in pool.plan.groups]
        sized = [spec.tokens_per_page for spec in specs if not spec.lifetime.per_item]
        self._unit = math.gcd(*sized) if sized else 16
        self._grid_tokens = grid_tokens
        self._journal = Journal()
        self._rules = tuple(make_rules(pool, i, self._unit, self._journal) for i in range(len(specs)))
        self._tails = TailIndex()
        self._matcher = Matcher(self._rules, self._tails, self._unit)
        self._state_pages = tuple(rule.page for rule in self._rules if isinstance(rule, StateRules))
        self._items = tuple(rule for rule in self._rules if isinstance(rule, ItemRules))
        self._single = len(self._rules) == 1
        positional = tuple(rule for rule in self._rules if isinstance(rule, PositionalRules))
        self._positional = positional if len(positional) == len(self._rules) else ()  # () also when there are others
        self._solo = self._single and bool(self._positional)
        self._keeps_all = all(rule.full for rule in self._rules)
        self._key_bytes = key_bytes
        self._roots = Roots(weights_digest, self._unit, overrides or {})
        self._leases: dict[int, Lease] = {}  # live ones by serial number, so by age
        self._serial = 0
        self._counters = Counters()

    # -- acquire ---------------------------------------------------------------------------------------------------

    def acquire(
        self,
        handle: int,
        tokens: NDArray[np.int32],
        known: int,
        *,
        salt: str = "",
        adapter: str = "",
        cause: str = "fresh",
        max_hit: int | None = None,
        media: Sequence[MediaItem] = (),
    ) -> Lease:
        """Open a lease on a sequence and pin the longest hit.

        `tokens`: 1-D contiguous int32 buffer that its owner appends to, the first `known` ids valid now; it must not be
        reallocated while the lease lives. `max_hit`: no hit beyond that many tokens, now or later. `media`: the
        sequence's items, by rising position.
        """
        bound = known - 1 if max_hit is None else min(known - 1, max_hit)
        chain = TokenChain(self._roots.of(salt, adapter), tokens, self._unit, media=media, key_bytes=self._key_bytes)
        lease = Lease(
            handle,
            chain,
            known,
            RetentionPoints(known, self._grid_tokens),
            bound=bound,
            cause=cause,
            media=tuple(media),
            state_pages=self._state_pages,
        )
        lease.sharing = lease.publishes = self.enabled
        lease.serial = self._serial
        lease.open([(rule, rule.open(lease)) for rule in self._rules])
        self._leases[self._serial] = lease
        self._serial += 1
        counters = self._counters
        counters.query(cause, known)
        if self.enabled:
            hit, possible = self._matcher.match(lease, bound)
            tail = self._matcher.tail(lease, hit, possible)
            if tail is not None:
                hit = self._adopt_tail(lease, *tail)
            elif hit or lease.media:
                self._adopt(lease, hit, 0)
            if hit:
                counters.hit(cause, hit)
            if possible > hit:
                counters.lost_to_sparse_tokens += possible - hit
                lease.points.junction = possible
            lease.cached_tokens = lease.tokens_ready = lease.capacity_tokens = hit
        return lease

    def register_adapter(self, name: str, digest: bytes) -> None:
        """The digest of the weights that `name` stands for from now on; leases opened later are named by it."""
        self._roots.adapters[name] = digest

    def _adopt(self, lease: Lease, tokens: int, step: int) -> None:
        for rule, hold in lease.pairs:
            rule.adopt(lease, hold, tokens, step)

    def _adopt_tail(self, lease: Lease, tokens: int, key: bytes) -> int:
        for rule, hold in lease.pairs:
            rule.adopt_tail(lease, hold, tokens, key)
        lease.tail = True
        return tokens

    # -- grow ------------------------------------------------------------------------------------------------------

    def grow(
        self, lease: Lease, upto: int, step: int, known: int, *, start: int | None = None, drafts: int = 0
    ) -> Grown:
        """Make positions up to `upto` writable by `step`, which is about to be launched.

        `start`: the caller's frontier; None: `tokens_ready`, or upto - 1 - drafts in a step beyond the known ids. It
        matters to state groups only: attention pages do not care where a step begins.
        `drafts`: how many of the positions hold unverified ids (state groups keep the state before them).
        Pages that somebody else has published meanwhile for the next prompt positions are adopted, not allocated. When
        pages are short nothing else changes. Full pages of known ids are published for `step`: the caller launches
        what it has grown in that step, or calls `retract`.
        """
        if known > lease.known:
            lease.known = known
        if lease.tail:
            lease.tail = False
            for rule, hold in lease.pairs:
                rule.claim_tail(hold)
        frontier = lease.tokens_ready
        if start is None and upto > lease.known:
            start = upto - 1 - drafts  # beyond the known ids a step computes one position and its drafts
        if start is not None and start > frontier:
            frontier = lease.tokens_ready = start
        if frontier < lease.bound and lease.sharing:
            frontier = lease.tokens_ready = self._late_hit(lease, frontier, step)
        if frontier >= upto:
            return Grown(frontier, lease.deltas())
        if self._solo and upto - frontier <= self._unit:
            return grow_one(self.pool, lease, frontier, upto, step)
        return grow_all(self.pool, lease, frontier, upto, step, drafts)

    @property
    def grows_rows(self) -> bool:
        """Whether `grow_rows` may be called: all groups follow positions."""
        return bool(self._positional)

    def grow_rows(self, leases: Sequence[Lease], starts: Sequence[int]) -> list[RowParts] | None:
        """`grow` of many rows by one position each, starts[i] of leases[i], with everything before it launched and the
        prompt behind. Pages for all of them, or None and nothing is changed. Publishes nothing: `commit` does."""
        return grow_rows(self.pool, self._positional, leases, starts)

    @property
    def cohort_tokens(self) -> int:
        """Positions after which rows that cross a page together do so again; 0: they need not."""
        return self._unit if self._solo else 0

    def cohort(self, leases: Sequence[Lease]) -> Cohort:
        """Leases that `grow_rows` could grow together; only with `cohort_tokens`."""
        return Cohort(self._positional[0], leases, enabled=self.enabled)

    def _late_hit(self, lease: Lease, frontier: int, step: int) -> int:
        """Siblings that prefill the same prompt leapfrog: each takes over what the other has published."""
        for rule, hold in lease.pairs:
            if not rule.aligned(hold, frontier):
                return frontier
        hit = self._matcher.match_beyond(lease, frontier)
        if hit <= frontier:
            return frontier
        self._adopt(lease, hit, step)
        lease.capacity_tokens = hit
        self._counters.late_hit_tokens += hit - frontier
        self._counters.hit(lease.cause, hit - frontier)
        return hit

    # -- commit, rollback, release ---------------------------------------------------------------------------------

    def commit(self, lease: Lease, computed: int, known: int, last_step: int) -> None:
        """A step has retired: KV of positions < `computed` exists, ids of positions < `known` are known.

        Publishes newly full pages and lets go of what no later query reads; `last_step` is the last launched step that
        names the lease's pages.
        """
        if known > lease.known:
            lease.known = known
        if computed > lease.tokens_ready:
            lease.tokens_ready = computed
        publish = lease.publishes
        tokens = computed if computed < known else known
        for rule, hold in lease.pairs:
            if publish:
                rule.publish(lease, hold, tokens, None)
            if not rule.full:
                rule.prune(lease, hold, computed, last_step)

    @property
    def commits_rows(self) -> bool:
        """Whether `commit_rows` may be called: the only group keeps everything."""
        return self._solo and self._keeps_all

    def commit_rows(self, leases: Sequence[Lease], counts: Sequence[int], ids: NDArray[np.int32]) -> None:
        """`commit` of many leases, counts[i] full pages of each, whose next `grow` is told where it starts and what is
        known. `ids` int32 [leases, cohort_tokens]: those of the last full page of each."""
        commit_rows(self._positional[0], leases, counts, ids)

    @property
    def commit_tokens(self) -> int:
        """`commit` has something to do when so many more positions have been computed, counted from 0; 0: never."""
        return self._unit if self.enabled or not self._keeps_all else 0

    def rollback(self, lease: Lease, upto: int, *, last_step: int = -1) -> int:
        """Positions from `upto` on held rejected drafts: drop their pages. Returns where computing goes on, which is
        before `upto` only for state groups (from the state kept before the drafts)."""
        frontier: int = min(rule.cut(lease, hold, upto, last_step) for rule, hold in lease.pairs)
        lease.tokens_ready = min(lease.tokens_ready, frontier)
        lease.capacity_tokens = min(rule.capacity(lease, hold) for rule, hold in lease.pairs)
        return frontier

    def release(
        self,
        lease: Lease,
        *,
        last_step: int,
        keep: bool = True,
        scheduled: int | None = None,
        known: int = 0,
        computed: int = 0,
    ) -> None:
        """Give everything back, once; pages are fenced until `last_step` has retired.

        Published pages stay cached; so do full pages among the first `computed` positions, those of retired steps.
        With `scheduled`, the number of positions launched, and `known`, that of ids known
        by now, models with state groups also keep the exact end of the sequence, so that it can be resumed there; not
        for a lease whose own step has failed (`keep` False). Deepest positions go first, so that they are evicted
        first.
        """
        assert not lease.released, f"{lease} released twice"
        lease.released = True
        lease.known = max(lease.known, known)
        del self._leases[lease.serial]
        if self._keeps_all and lease.publishes:
            for rule, hold in lease.pairs:
                rule.publish(lease, hold, min(computed, lease.known), None)
        if keep and scheduled and scheduled <= lease.known and lease.publishes and self._state_pages and not lease.tail:
            self._name_tail(lease, scheduled, last_step)
        held: list[tuple[int, Page]] = []
        for rule, hold in lease.pairs:
            held += reversed(rule.close(lease, hold))
        if not self._single:
            held.sort(key=_deepest_first)  # stable: groups in order at equal depth
        drop = self.pool.drop
        for _, page in held:
            drop(page, last_step)

    def withdraw(self, lease: Lease) -> None:
        """Release a lease that no step ever used, as if it had not been acquired: it does not count as a query."""
        self._counters.query(lease.cause, -lease.known, queries=-1)
        self._counters.hit(lease.cause, -lease.cached_tokens)
        self.release(lease, last_step=0, keep=False)

    def _name_tail(self, lease: Lease, tokens: int, step: int) -> None:
        """Name what the sequence leaves behind at its exact length, so that it can be resumed there."""
        key = lease.chain.tail_key(tokens)
        for rule, hold in lease.pairs:
            rule.name_tail(lease, hold, tokens, key, step)
        if any(tokens % rule.page for rule in self._rules if not isinstance(rule, ItemRules)):
            self._tails.add(lease.chain.prefix(tokens // self._unit), tokens, key)

    # -- steps -----------------------------------------------------------------------------------------------------

    def retire(self, step: int) -> None:
        """All steps up to `step` have retired: their fenced pages become cached or free."""
        self.pool.retire(step)
        self._journal.retire(step)

    def retract(self, step: int, lease: Lease | None = None) -> tuple[int, ...]:
        """`step` failed: un-publish what was published for it and for later steps, by all leases or by one (whose row
        failed alone), and what it was to move.

        Returns the handles of other leases that have built on such pages, or on pages of those, oldest first, and of
        all that hold moved ones; what they compute is worthless, and they publish nothing any more.
        """
        return retract(self.pool, self._journal, self._leases, step, lease)

    # -- moving ----------------------------------------------------------------------------------------------------

    def compact(self, step: int, slabs: int) -> Compaction:
        """Move live pages together, so that up to `slabs` large pages come back when `step` has retired. The caller
        launches `step` with what is returned, or calls `retract`."""
        moves = compact(self.pool, slabs, step, COPIED_SLABS * self.pool.plan.large_bytes)
        if not moves:
            return Compaction()
        for moved in moves:
            self._journal.moved(moved.page, step)
        return relocate(moves, self._rules, self._leases)

    # -- questions -------------------------------------------------------------------------------------------------

    @property
    def item_groups(self) -> tuple[int, ...]:
        """Groups whose pages belong to media items."""
        return tuple(rule.index for rule in self._items)

    @property
    def capacity(self) -> tuple[int, ...]:
        """Pages of each group if it had the whole arena."""
        return self.pool.plan.capacity

    def needed_pages(self, total_tokens: int, media_tokens: Sequence[int] = ()) -> tuple[int, ...]:
        """Most pages of each group that one sequence of that length, with items of that many entries, holds."""
        return self.pool.plan.peak_pages(
            total_tokens, media_tokens=media_tokens, in_flight_tokens=self.in_flight_tokens
        )

    def media_pages(self, media_tokens: Sequence[int]) -> tuple[int, ...]:
        """Pages of each group for items of that many entries alone."""
        pages = self.needed_pages(0, media_tokens)
        return tuple(need if index in self.item_groups else 0 for index, need in enumerate(pages))

    def owed_pages(self, lease: Lease, total_tokens: int, media_tokens: Sequence[int] = ()) -> tuple[int, ...]:
        """Most pages of each group that `lease` still takes until it holds `total_tokens` positions and those items,
        which it does not hold yet."""
        need = self.needed_pages(total_tokens, media_tokens)
        pairs = zip(need, lease.pairs, strict=True)
        return tuple(
            pages if isinstance(rule, ItemRules) else max(0, pages - len(rule.pages(hold)))
            for pages, (rule, hold) in pairs
        )

    def fits(self, total_tokens: int, media_tokens: Sequence[int] = ()) -> bool:
        """Whether such a sequence could run to its end alone; the start-up sizer asks the same function."""
        return self.pool.plan.fits(total_tokens, media_tokens=media_tokens, in_flight_tokens=self.in_flight_tokens)

    def reclaimable_pages(self, lease: Lease) -> tuple[int, ...]:
        """Pages of each group that nobody else holds: what releasing the lease would free or make evictable."""
        return tuple(sum(page.ref == 1 for page in rule.pages(hold)) for rule, hold in lease.pairs)

    def reset(self) -> None:
        """Forget every page that no lease holds; held pages keep their names."""
        self.pool.clear()

    def stats(self) -> CacheStats:
        return gather(self._counters, self.pool, published=self._journal.published, leases=len(self._leases))

    def check(self) -> None:
        """Assert every invariant of the pool and of all leases; O(pages), for tests and debugging."""
        audit(self.pool, [lease.held() for lease in self._leases.values()])


def _deepest_first(entry: tuple[int, Any]) -> int:
    return -entry[0]
