"""How long a prefix of a sequence is there in every group.

Owns: the fixed point over the groups' rules, late hits, the search for tails, the roots of namespaces.
Does not know: leases' lives, steps, publication.
Invariants: matching changes nothing; the result is the longest length that every group can serve, of those each group's
`longest` admits.
"""

from __future__ import annotations

from collections.abc import Mapping

from aengine.memory.lifetimes import State
from aengine.memory.pool import Pool
from aengine.prefix_cache.items import ItemRules
from aengine.prefix_cache.journal import Journal
from aengine.prefix_cache.keys import root_key
from aengine.prefix_cache.lease import Lease
from aengine.prefix_cache.positional import PositionalRules
from aengine.prefix_cache.state import StateRules
from aengine.prefix_cache.tails import TailIndex

LATE_TOKENS = 1024  # how far a late hit is looked for without a full group to tell where the run ends
ROOTS = 4096  # salts come from users, so the roots kept are bounded; they are cheap to make again

Rules = PositionalRules | StateRules | ItemRules


def make_rules(pool: Pool, index: int, unit: int, journal: Journal) -> Rules:
    """The rules of one group, by its lifetime. `unit`: tokens per hash."""
    spec = pool.plan.groups[index].spec
    if spec.lifetime.per_item:
        return ItemRules(pool, index, spec, unit, journal)
    kind = StateRules if isinstance(spec.lifetime, State) else PositionalRules
    return kind(pool, index, spec, unit, journal)


class Roots:
    """The root of each namespace: weights, overrides, and per sequence salt and adapter."""

    def __init__(self, weights_digest: bytes, unit: int, overrides: Mapping[str, str]) -> None:
        self.adapters: dict[str, bytes] = {}  # name -> digest of its weights; a name without one stands for itself
        self._weights_digest = weights_digest
        self._unit = unit
        self._overrides = dict(overrides)
        self._made: dict[tuple[str, bytes], bytes] = {}

    def of(self, salt: str, adapter: str) -> bytes:
        digest = self.adapters.get(adapter, adapter.encode())
        root = self._made.get((salt, digest))
        if root is None:
            if len(self._made) >= ROOTS:
                self._made.clear()
            root = self._made[salt, digest] = root_key(
                weights_digest=self._weights_digest,
                adapter=digest,
                salt=salt,
                page_tokens=self._unit,
                overrides=self._overrides,
            )
        return root


class Matcher:
    """Reconciles the groups' hits."""

    def __init__(self, rules: tuple[Rules, ...], tails: TailIndex, unit: int) -> None:
        self._rules = rules
        self._leading = tuple(rule for rule in rules if rule.full)
        self._others = tuple(rule for rule in rules if not rule.full and not isinstance(rule, ItemRules))
        self._tails = tails
        self._unit = unit

    def match(self, lease: Lease, bound: int, *, beyond: int = 0) -> tuple[int, int]:
        """(reconciled hit, longest hit of the groups that keep everything). `beyond`: the lease's own pages count, and
        a hit that does not exceed this many tokens is of no interest.

        The fixed point: each group cuts the bound to a length it can serve, until none cuts any more.
        """
        hit = bound if self._leading or self._others else 0
        chain, holds = lease.chain, lease.holds
        for rule in self._leading:
            hit = rule.longest(chain, hit, holds[rule.index] if beyond else None)
        possible = hit if self._leading else 0
        while self._others and hit > beyond:
            before = hit
            for other in self._others:
                hit = other.longest(chain, hit, holds[other.index] if beyond else None, beyond)
                if not self._leading:
                    possible = max(possible, hit)
            for rule in self._leading:
                hit -= hit % rule.page
            if hit == before:
                break
        return max(hit, 0), possible

    def match_beyond(self, lease: Lease, frontier: int) -> int:
        """The hit beyond what the lease has already; at or below `frontier` when there is none."""
        bound = lease.bound if self._leading else min(lease.bound, frontier + LATE_TOKENS)
        return self.match(lease, bound, beyond=frontier)[0]

    def tail(self, lease: Lease, hit: int, possible: int) -> tuple[int, bytes] | None:
        """(tokens, key) of the longest tail beyond `hit` that every group has."""
        if not self._tails:
            return None
        chain = lease.chain
        upto = possible if self._leading else lease.bound
        for pages in range(upto // self._unit, hit // self._unit - 1, -1):
            for tokens, key in self._tails.of(chain.prefix(pages)):
                if (
                    hit < tokens <= lease.bound
                    and chain.tail_key(tokens) == key
                    and all(rule.has_tail(chain, tokens, key) for rule in self._rules)
                ):
                    return tokens, key
        return None
