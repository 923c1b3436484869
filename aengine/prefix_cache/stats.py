"""What the cache has done.

Owns: hit accounting by cause, and the frozen statistics value.
Does not know: how hits are found.
Invariants: counters only grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aengine.memory.accounting import PoolStats
from aengine.memory.pool import Pool


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since start, and the pages of each group now.

    `hit_tokens_by_cause` (fresh, fork, resume, ...): a headline hit rate leaves resumes out.
    `late_hit_tokens`: the part of hit_tokens adopted after acquire. `lost_to_sparse_tokens`: what the group that keeps
    everything could have hit beyond the reconciled hit.
    """

    queries: int
    query_tokens: int
    hit_tokens: int
    query_tokens_by_cause: Mapping[str, int]
    hit_tokens_by_cause: Mapping[str, int]
    late_hit_tokens: int
    lost_to_sparse_tokens: int
    published_pages: int
    evicted_pages: int
    leases: int
    usage: float
    pool: PoolStats


@dataclass(slots=True)
class Counters:
    queries: int = 0
    query_tokens: dict[str, int] = field(default_factory=dict)
    hit_tokens: dict[str, int] = field(default_factory=dict)
    late_hit_tokens: int = 0
    lost_to_sparse_tokens: int = 0

    def query(self, cause: str, tokens: int, *, queries: int = 1) -> None:
        self.queries += queries
        self.query_tokens[cause] = self.query_tokens.get(cause, 0) + tokens

    def hit(self, cause: str, tokens: int) -> None:
        self.hit_tokens[cause] = self.hit_tokens.get(cause, 0) + tokens


def gather(counters: Counters, pool: Pool, *, published: int, leases: int) -> CacheStats:
    stats = pool.stats()
    return CacheStats(
        queries=counters.queries,
        query_tokens=sum(counters.query_tokens.values()),
        hit_tokens=sum(counters.hit_tokens.values()),
        query_tokens_by_cause=dict(counters.query_tokens),
        hit_tokens_by_cause=dict(counters.hit_tokens),
        late_hit_tokens=counters.late_hit_tokens,
        lost_to_sparse_tokens=counters.lost_to_sparse_tokens,
        published_pages=published,
        evicted_pages=sum(group.evicted + group.evicted_by_steal for group in pool.groups),
        leases=leases,
        usage=stats.usage,
        pool=stats,
    )
