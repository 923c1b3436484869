"""Shadow KV: a device whose pages hold, instead of numbers, the hash of the prefix each slot should belong to.

Steps run late and in order. Every position a row reads must hold the hash of that row's own prefix; anything else is
aliasing, a wrong hit, stale reuse, an early window free or a table the device was not told about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aengine.memory import PagePlan
from aengine.memory.lifetimes import Media, State

GARBAGE = "garbage"


class Text:
    """A token sequence whose continuation is a function of its prefix, with the hash of each of its prefixes."""

    def __init__(self, namespace: object, prompt: list[int], media: tuple[Any, ...], vocab: int) -> None:
        self.ids = list(prompt)
        self.media = media
        self.namespace = namespace
        self._vocab = vocab
        self._hashes = [hash(("root", str(namespace)))]
        self._items = {item.position: item.digest for item in media}

    def prefix(self, tokens: int) -> int:
        """Hash of the first `tokens` tokens."""
        while len(self._hashes) <= tokens:
            at = len(self._hashes) - 1
            self._hashes.append(self.step(self._hashes[-1], self.id(at), at))
        return self._hashes[tokens]

    def step(self, before: int, token: int, position: int) -> int:
        return hash((before, token, self._items.get(position)))

    def id(self, position: int) -> int:
        while position >= len(self.ids):
            self.ids.append(abs(self.prefix(len(self.ids))) % self._vocab)
        return self.ids[position]


@dataclass
class Row:
    """Positions start .. upto - 1 of a text; `drafts`: the last ids, where they are guesses.

    `columns[g]`: first table column of each media item in group g; `fresh`: (group, item) pairs to compute.
    """

    lease: int
    text: Text
    start: int
    upto: int
    drafts: list[int] = field(default_factory=list)
    columns: dict[int, tuple[int, ...]] = field(default_factory=dict)
    fresh: tuple[tuple[int, int], ...] = ()
    bad: str = ""

    def hashes(self) -> list[int]:
        """hashes()[i]: hash of the prefix that ends with position start + i."""
        out = []
        sure = self.upto - len(self.drafts)
        before = self.text.prefix(self.start)
        for position in range(self.start, self.upto):
            token = self.drafts[position - sure] if position >= sure else self.text.id(position)
            before = self.text.step(before, token, position)
            out.append(before)
        return out


class Shadow:
    """Contents by large page, so that groups that share bytes over time are seen to overwrite each other."""

    def __init__(self, plan: PagePlan) -> None:
        self.plan = plan
        self._large: dict[int, tuple[int, dict[tuple[int, int], Any]]] = {}
        self._tables: dict[int, list[list[int]]] = {}

    def run(
        self, deltas: list[tuple[int, Any]], rows: list[Row], *, moves: Sequence[Any] = (), fails: bool = False
    ) -> None:
        """Execute one step; a row that read anything wrong gets its reason in `bad`, and writes garbage."""
        for page, source, target in moves:
            self._move(page.group, source, target, lost=fails)
        for lease, part in deltas:
            table = self._tables.setdefault(lease, [[] for _ in self.plan.groups])[part.group]
            table.extend([0] * (part.first + len(part.pages) - len(table)))
            table[part.first : part.first + len(part.pages)] = part.pages
        states = [self._read_states(row) for row in rows]
        for row in rows:
            self._write(row, garbage=fails)
        for row, state in zip(rows, states, strict=True):
            row.bad = state or self._check(row)
            if row.bad:
                self._write(row, garbage=True)

    def _move(self, group: int, source: int, target: int, *, lost: bool) -> None:
        """A page's contents go over; nothing stays behind."""
        slots = self.plan.groups[group].slots
        large, small = divmod(source, slots)
        owner, contents = self._large.get(large, (-1, {}))
        taken = {at: contents.pop(at) for at in list(contents) if at[0] == small} if owner == group else {}
        large, small = divmod(target, slots)
        if self._large.get(large, (-1, {}))[0] != group:
            self._large[large] = (group, {})
        self._large[large][1].update({(small, slot): GARBAGE if lost else value for (_, slot), value in taken.items()})

    def _get(self, group: int, page: int, slot: int) -> Any:
        large, small = divmod(page, self.plan.groups[group].slots)
        owner, contents = self._large.get(large, (-1, {}))
        return contents.get((small, slot)) if owner == group else None

    def _put(self, group: int, page: int, slot: int, value: Any) -> None:
        assert page > 0, "the null page is written"
        large, small = divmod(page, self.plan.groups[group].slots)
        assert 0 < large < self.plan.large_pages
        if self._large.get(large, (-1, {}))[0] != group:
            self._large[large] = (group, {})
        self._large[large][1][small, slot] = value

    def _read_states(self, row: Row) -> str:
        for index, planned in enumerate(self.plan.groups):
            if isinstance(planned.spec.lifetime, State) and row.start:
                page = self._tables[row.lease][index][0]
                found = self._get(index, page, 0)
                if found != row.text.prefix(row.start):
                    return f"state group {index} page {page} before position {row.start}: {found}"
        return ""

    def _write(self, row: Row, *, garbage: bool) -> None:
        hashes = row.hashes()
        for index, planned in enumerate(self.plan.groups):
            spec, table = planned.spec, self._tables[row.lease][index]
            if isinstance(spec.lifetime, State):
                self._put(index, table[1], 0, GARBAGE if garbage else hashes[-1])
            elif spec.lifetime.per_item:
                self._write_items(row, index, garbage=garbage)
            else:
                for position, value in enumerate(hashes, row.start):
                    page, slot = divmod(position, spec.tokens_per_page)
                    self._put(index, table[page], slot, GARBAGE if garbage else value)

    def _item_pages(self, row: Row, group: int, item: int) -> list[int]:
        first, spec = row.columns[group][item], self.plan.groups[group].spec
        count = -(-row.text.media[item].tokens // spec.tokens_per_page)
        return self._tables[row.lease][group][first : first + count]

    def _write_items(self, row: Row, group: int, *, garbage: bool) -> None:
        for item in [item for owner, item in row.fresh if owner == group]:
            for index, page in enumerate(self._item_pages(row, group, item)):
                value = (row.text.namespace, row.text.media[item].digest, index)
                self._put(group, page, 0, GARBAGE if garbage else value)

    def _check(self, row: Row) -> str:
        hashes = row.hashes()
        for index, planned in enumerate(self.plan.groups):
            spec, table = planned.spec, self._tables[row.lease][index]
            if isinstance(spec.lifetime, State):
                continue
            if spec.lifetime.per_item:
                bad = self._check_items(row, index)
                if bad:
                    return bad
                continue
            for position in range(spec.lifetime.first_live(row.start), row.upto):
                page, slot = divmod(position, spec.tokens_per_page)
                want = hashes[position - row.start] if position >= row.start else row.text.prefix(position + 1)
                found = self._get(index, table[page], slot)
                if found != want:
                    return f"group {index} position {position} page {table[page]}: {found}, not {want}"
        return ""

    def _check_items(self, row: Row, group: int) -> str:
        passing = isinstance(self.plan.groups[group].spec.lifetime, Media)
        for number, item in enumerate(row.text.media):
            if item.position >= row.upto or (passing and item.position + item.span <= row.start):
                continue
            if row.columns[group][number] < 0:
                return f"group {group} item {number} has no pages"
            for index, page in enumerate(self._item_pages(row, group, number)):
                found = self._get(group, page, 0)
                if found != (row.text.namespace, item.digest, index):
                    return f"group {group} item {number} page {index} ({page}): {found}"
        return ""
