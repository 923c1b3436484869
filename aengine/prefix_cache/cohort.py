"""Leases that go on together: a page more for each, again and again.

Owns: taking and naming their pages in one call each, and what a lease hears of it when it is asked for its pages.
Does not know: slots, requests, how pages are chosen.
Invariants: the same pages, tables and names as the verbs for one lease would give. A lease is told before anybody sees
its pages (`Lease.holds`, `Lease.pairs`), so it does not matter how long it was not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aengine.memory.naming import publish_fresh
from aengine.memory.slabs import Page
from aengine.prefix_cache.keys import ChainRows
from aengine.prefix_cache.lease import Lease
from aengine.prefix_cache.positional import PageRun, PositionalRules


class Cohort:
    """Leases of a cache with one group whose next positions all begin a page: they do so again and again, as long as
    they advance together. To be left behind when a step has failed: leases may publish nothing any more.

    It touches nothing of a lease from turn to turn: with thousands of rows every object is out of the processor's reach
    by the time a row crosses its next page.
    """

    def __init__(self, rule: PositionalRules, leases: Sequence[Lease], *, enabled: bool) -> None:
        runs: list[PageRun] = [lease.holds[rule.index] for lease in leases]
        self._rule = rule
        self._movable = rule.pool.groups[rule.index].slots > 1
        self._serials = [lease.serial for lease in leases]
        self._had = [len(run.pages) for run in runs]
        self._taken: list[list[Page]] = []  # by turn, then row
        self._named = 0  # pages of each row
        self.idle = rule.full and not enabled  # `commit` has nothing to do
        self.lag = self._had[0] - runs[0].keyed  # pages of each that are not offered to the cache yet
        self.commits = rule.full and all(map(self._in_step, leases, runs))
        waiting = range(self.lag, 0, -1) if self.commits else ()
        self._filling = deque([page for run in runs if (page := run.pages[-back])] for back in waiting)
        self._chains = ChainRows([lease.chain for lease in leases]) if self.commits else None
        self._told = [(0, 0)] * len(leases)  # of `_taken` and `_named`, by row
        self.news = 0  # how often there was something to tell
        for row, lease in enumerate(leases):
            lease.join(self, row)

    def _in_step(self, lease: Lease, run: PageRun) -> bool:
        """Whether it publishes, as many pages later as the others, and what it has published is what is hashed."""
        offered = len(run.pages) - self.lag
        return lease.publishes and lease.chain.plain and offered == run.keyed == len(lease.chain.digests)

    def grow(self) -> list[int] | None:
        """A page more for each: their ids; None: pages are short. As `grow_rows`."""
        pages = self._rule.pool.try_take_of(self._rule.index, len(self._serials))
        if pages is None:
            return None
        if self._movable:
            turn = len(self._taken)
            for serial, had, page in zip(self._serials, self._had, pages, strict=True):
                page.holder, page.index = serial, had + turn
        self._taken.append(pages)
        self.news += 1
        if self.commits:
            self._filling.append(pages)
        return [page.id for page in pages]

    def commit(self, ids: NDArray[np.int32]) -> None:
        """Each has filled its page with ids[i]. Only if it `commits`."""
        assert self._chains is not None
        keys = self._chains.extend(ids)
        self._named += 1
        self.news += 1
        rule = self._rule
        rule.journal.published += publish_fresh(rule.pool, rule.index, self._filling.popleft(), keys)

    def tell(self, row: int, run: PageRun) -> int:
        """What has become of the run of a row since it was last told: its capacity in tokens."""
        taken, named = self._told[row]
        self._told[row] = len(self._taken), self._named
        run.pages += [pages[row] for pages in self._taken[taken:]]
        run.sent = len(run.pages)
        run.keyed += self._named - named
        return run.sent * self._rule.page
