"""Groups of recurrent state: one page is the state after some number of tokens.

Owns: how state pages are matched, split into checkpoints, published and let go.
Does not know: other groups.
Invariants: a step reads table[0] and writes table[1] (equal: in place; 0 read: the initial state). A page that is to
stay as it is (a checkpoint, or the state before unverified drafts) is never written again: the next step writes
another page. The state that a step writes is published no earlier than the next step's growth, so only later steps
can read it.
"""

from __future__ import annotations

from aengine.memory.groups import GroupSpec
from aengine.memory.pool import Pool
from aengine.memory.slabs import Page
from aengine.prefix_cache.journal import Journal
from aengine.prefix_cache.keys import TokenChain
from aengine.prefix_cache.lease import Lease, TablePart


class StateHold:
    """What a lease holds of a state group.

    `read`: the page the last grown step reads if it differs from the one it writes, or a hit not yet continued.
    `read_at`: tokens whose state it is. `write`: the page written by the last grown step.
    """

    __slots__ = ("adopted", "changed", "edge", "group", "read", "read_at", "sent", "serial", "step", "table", "write")

    def __init__(self, group: int, serial: int) -> None:
        self.group = group
        self.serial = serial  # of the lease
        self.read: Page | None = None
        self.write: Page | None = None
        self.read_at = 0
        self.edge = 0  # positions that may be launched before the pages change again
        self.step = -1  # the last step that read `read`
        self.table = [0, 0]
        self.sent = 2  # entries the device has, of whatever age
        self.changed = False
        self.adopted: list[bytes] = []  # names of the states of others that it went on from

    def unsent(self) -> bool:
        """Whether the device has another pair."""
        return self.changed

    def news(self) -> TablePart:
        """The pair; told once."""
        self.changed = False
        return TablePart(self.group, 0, tuple(self.table))


class StateRules:
    """One state group's rules. `page`: checkpoints stand at multiples of it."""

    full = False

    def __init__(self, pool: Pool, index: int, spec: GroupSpec, unit: int, journal: Journal) -> None:
        self.pool = pool
        self.journal = journal
        self.index = index
        self.page = spec.tokens_per_page
        self._stride = spec.tokens_per_page // unit
        self._names = pool.names[index]

    def open(self, lease: Lease) -> StateHold:
        return StateHold(self.index, lease.serial)

    # -- matching --------------------------------------------------------------------------------------------------

    def longest(self, chain: TokenChain, bound: int, hold: StateHold | None = None, floor: int = 0) -> int:
        """The last checkpoint at or before `bound`; one <= floor may be any such number."""
        page, stride, names = self.page, self._stride, self._names
        end = bound // page
        digests = chain.extend(end * stride)
        while end * page > floor and digests[end * stride - 1] not in names:
            end -= 1
        return end * page

    def adopt(self, lease: Lease, hold: StateHold, tokens: int, step: int) -> None:
        if not tokens:
            return
        page = self._names[lease.chain.digests[tokens // self.page * self._stride - 1]]
        self.pool.pin(page)
        page.holder = hold.serial
        self._drop_read(hold)
        if hold.write is not None:
            self.pool.drop(hold.write, step - 1)
            hold.write = None
        hold.adopted.append(lease.chain.digests[tokens // self.page * self._stride - 1])
        hold.read, hold.read_at, hold.edge = page, tokens, tokens

    def has_tail(self, chain: TokenChain, tokens: int, key: bytes) -> bool:
        return key in self._names

    def adopt_tail(self, lease: Lease, hold: StateHold, tokens: int, key: bytes) -> None:
        hold.read, hold.read_at, hold.edge = self._names[key], tokens, tokens
        self.pool.pin(hold.read)
        hold.read.holder = hold.serial
        hold.adopted.append(key)

    def claim_tail(self, hold: StateHold) -> None:
        """The state read stays as it is: the next step writes another page."""

    def name_tail(self, lease: Lease, hold: StateHold, tokens: int, key: bytes, step: int) -> None:
        """At release: name the state after the last launched position."""
        page = hold.write
        if page is None and hold.read_at == tokens:  # a hit, or the state before rejected drafts, not continued
            page = hold.read
        if page is not None and page.key is None and self.pool.publish(page, key):
            self.journal.record(page, lease.serial, step)

    def aligned(self, hold: StateHold, tokens: int) -> bool:
        return True

    # -- growing ---------------------------------------------------------------------------------------------------

    def prepare(self, lease: Lease, hold: StateHold, start: int, upto: int, step: int, drafts: int) -> int:
        """The page read by the step before is not needed any more; a new one is if the current one must stay."""
        if hold.write is None:
            return 1
        self._publish_read(lease, hold, step)
        self._drop_read(hold)
        return int(bool(drafts) or lease.points.has(start, self.page))

    def extend(
        self, lease: Lease, hold: StateHold, pages: list[Page], start: int, upto: int, step: int, parts: list[TablePart]
    ) -> int:
        if pages:
            if hold.write is not None:
                hold.read, hold.read_at = hold.write, start
            hold.write = pages[0]
            hold.write.holder = hold.serial
        write = hold.write
        assert write is not None
        table = [hold.read.id if hold.read is not None else 0 if start == 0 else write.id, write.id]
        hold.changed = hold.changed or table != hold.table
        hold.table[:] = table
        hold.step = step
        split = table[0] != table[1]
        hold.edge = upto if split else lease.points.after(upto, self.page)
        if hold.changed:
            parts.append(hold.news())
        return hold.edge

    def capacity(self, lease: Lease, hold: StateHold) -> int:
        return hold.edge

    def publish(self, lease: Lease, hold: StateHold, tokens: int, step: int | None) -> None:
        """Name the state that the last grown step read, when it is a checkpoint within `tokens` known positions."""
        if hold.read is not None and hold.read_at <= tokens:
            self._publish_read(lease, hold, step)

    # -- moving ----------------------------------------------------------------------------------------------------

    def relocate(self, hold: StateHold, page: Page, source: int) -> tuple[int, tuple[int, ...]]:
        """`page` has moved from `source`: how often the lease holds it, and the table entries that changed. A hit that
        nobody has gone on from stands in no table yet."""
        if page is not hold.read and page is not hold.write:
            return 0, ()
        indices = tuple(index for index, entry in enumerate(hold.table) if entry == source)
        for index in indices:
            hold.table[index] = page.id
        return 1, indices

    # -- letting go ------------------------------------------------------------------------------------------------

    def prune(self, lease: Lease, hold: StateHold, computed: int, step: int) -> None:
        """The page read stays until the next growth: drafts may have to go back to it."""

    def cut(self, lease: Lease, hold: StateHold, tokens: int, step: int) -> int:
        """Go back to the state at or before `tokens` that is still held; the tokens after it are computed again.

        A step in place leaves nothing to go back to: drafts must be announced to `grow`.
        """
        if hold.write is None:
            return min(tokens, hold.read_at)
        if tokens >= lease.tokens_ready:
            return tokens
        assert hold.read is not None or hold.table[0] == 0, "rollback of a state that was written in place"
        self.pool.drop(hold.write, step)
        hold.write = None
        hold.edge = hold.read_at if hold.read is not None else 0
        return hold.edge

    def close(self, lease: Lease, hold: StateHold) -> list[tuple[int, Page]]:
        """Pages held, each with the position after its end."""
        out = []
        if hold.write is not None:
            out.append((lease.tokens_ready, hold.write))
        if hold.read is not None:
            out.append((hold.read_at, hold.read))
        return out

    def pages(self, hold: StateHold) -> list[Page]:
        return [page for page in (hold.read, hold.write) if page is not None]

    def _publish_read(self, lease: Lease, hold: StateHold, step: int | None) -> None:
        page, at = hold.read, hold.read_at
        if page is None or page.key is not None or at > lease.known or not lease.publishes:
            return
        if lease.points.has(at, self.page):
            self._name(lease, page, at, step)

    def _name(self, lease: Lease, page: Page, tokens: int, step: int | None) -> None:
        index = tokens // self.page * self._stride
        if page.key is None and self.pool.publish(page, lease.chain.extend(index)[index - 1]):
            self.journal.record(page, lease.serial, step)

    def _drop_read(self, hold: StateHold) -> None:
        if hold.read is not None:
            self.pool.drop(hold.read, hold.step)
            hold.read = None
