"""Names for many pages at once.

Owns: giving them, in order.
Does not know: what a name is made of.
Invariants: as `Pool.publish` would, page by page: a name belongs to the page that got it first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from aengine.memory.slabs import Page

if TYPE_CHECKING:
    from aengine.memory.pool import Pool


def publish_all(pool: Pool, index: int, pages: Iterable[Page | None], keys: Iterable[bytes]) -> list[Page]:
    """Name those live pages of a group that have no name yet; returns those that got one."""
    give, named = pool.names[index].setdefault, []
    for page, key in zip(pages, keys, strict=True):
        if page is not None and page.key is None and give(key, page) is page:
            page.key = key
            named.append(page)
    return named


def publish_fresh(pool: Pool, index: int, pages: Iterable[Page], keys: Iterable[bytes]) -> int:
    """Name live pages of a group of which none has a name; returns how many got one."""
    names = pool.names[index]
    before, give = len(names), names.setdefault
    for page, key in zip(pages, keys, strict=True):
        if give(key, page) is page:
            page.key = key
    return len(names) - before
