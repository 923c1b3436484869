"""Who has to be told that pages have moved.

Owns: finding the leases that hold a moved page, and what their tables now say.
Does not know: which pages move and why, who hears of it.
Invariants: after `relocate` every table names every held page by its new address; the parts returned correct exactly
what earlier parts have told. Costs O(1) for a page with one holder, O(leases) for a shared one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from aengine.memory.compaction import Moved
from aengine.memory.slabs import Page
from aengine.prefix_cache.items import ItemRules
from aengine.prefix_cache.lease import Lease, TablePart
from aengine.prefix_cache.matching import Rules


class Compaction(NamedTuple):
    """What the step that carries it must do, in this order: copy pages, correct tables. `items`: (lease, group, item)
    of media items whose pages are among those that moved."""

    moves: tuple[Moved, ...] = ()
    tables: tuple[tuple[Lease, TablePart], ...] = ()
    items: tuple[tuple[Lease, int, int], ...] = ()


def relocate(moves: Sequence[Moved], rules: Sequence[Rules], leases: Mapping[int, Lease]) -> Compaction:
    """Bring the tables of `leases` (by serial number) up to date."""
    changed: dict[tuple[int, int], list[int]] = {}  # (serial, group) -> table indices
    for page, source, _ in moves:
        rule, left = rules[page.group], page.ref
        last = leases.get(page.holder)
        if last is not None:
            left -= _relocate(rule, last, page, source, changed)
        for lease in leases.values() if left else ():
            if lease is not last:
                left -= _relocate(rule, lease, page, source, changed)
                if not left:
                    break
        assert not left, f"{page} has {left} holders that no lease knows of"
    tables = []
    items: dict[tuple[int, int, int], None] = {}
    for (serial, group), indices in changed.items():
        lease, rule = leases[serial], rules[group]
        hold = lease.holds[group]
        if isinstance(rule, ItemRules):
            items.update({(serial, group, rule.item_at(hold, index)): None for index in indices})
        told = [index for index in indices if index < hold.sent]
        if told:
            first, end = min(told), max(told) + 1
            tables.append((lease, TablePart(group, first, tuple(hold.table[first:end]))))
    placed = tuple((leases[serial], group, item) for serial, group, item in items)
    return Compaction(tuple(moves), tuple(tables), placed)


def _relocate(rule: Rules, lease: Lease, page: Page, source: int, changed: dict[tuple[int, int], list[int]]) -> int:
    """How often the lease holds the page."""
    times, indices = rule.relocate(lease.holds[rule.index], page, source)
    if indices:
        changed.setdefault((lease.serial, rule.index), []).extend(indices)
    return times
