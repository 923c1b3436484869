"""Texts that repeat themselves: where each row reads what it seems to copy, and how far that can be trusted.

Owns: `Copy`, a row's place in its own text; `Copies`, which moves them along; `Odds`, how often they are right.
Does not know: drafts, steps, costs.
Invariants: following is passive: each token that became known moves a copy one place on or sends it to look for
another, whether drafts were made or not, so odds are those of all tokens. A copy may read what it has itself
predicted: a text of period p is followed from its second round on, and without end.
"""

from __future__ import annotations

import numpy as np

from aengine.types import Int32s

WINDOW_TOKENS = 4096  # how far back a copy is looked for
MATCH_MAX = 16  # tokens; a longer agreement says no more
LEVELS = 4  # of how often a row's copies were right lately
RECENT = 1 / 8  # weight of the newest token in that
TRIALS_MAX = 200.0  # beyond which old ones count less
PRIOR_TRIALS = 4.0
CATCH_UP = 64  # tokens that were not followed, beyond which a copy is looked for afresh


class Copy:
    """`source`: where the row's next token should stand already, -1: nowhere. `match`: for how many tokens, at most
    MATCH_MAX, what stands before both is the same. `recent`: how often sources were right lately, 0 to 1."""

    __slots__ = ("handle", "match", "recent", "seen", "source")

    def __init__(self, handle: int, seen: int) -> None:
        self.handle, self.seen = handle, seen
        self.source, self.match, self.recent = -1, 0, 0.5

    @property
    def level(self) -> int:
        return min(int(self.recent * LEVELS), LEVELS - 1)


class Odds:
    """How often the next token was as predicted, by the row's level and by the length of the match."""

    def __init__(self) -> None:
        guess = [[_first_guess(level, match) for match in range(MATCH_MAX + 1)] for level in range(LEVELS)]
        self._right = [[PRIOR_TRIALS * chance for chance in row] for row in guess]
        self._trials = [[PRIOR_TRIALS] * (MATCH_MAX + 1) for _ in range(LEVELS)]

    def tell(self, copy: Copy, right: bool) -> None:
        """Its prediction was `right` or not."""
        rights, trials = self._right[copy.level], self._trials[copy.level]
        match = copy.match
        if trials[match] >= TRIALS_MAX:
            rights[match] /= 2
            trials[match] /= 2
        rights[match] += right
        trials[match] += 1

    def chain(self, copy: Copy, most: int, least: float) -> list[float]:
        """For the next tokens, at most `most`, the chance that each and all before it are as predicted; falling, and
        none below `least`."""
        rights, trials = self._right[copy.level], self._trials[copy.level]
        chance, match = 1.0, copy.match
        made: list[float] = []
        for _ in range(most):
            chance *= rights[match] / trials[match]
            if chance < least:
                break
            made.append(chance)
            match = min(match + 1, MATCH_MAX)
        return made


def _first_guess(level: int, match: int) -> float:
    return (1 + level + match) / (3 + LEVELS + match)


class Copies:
    """The copies of all rows, by slot. `odds` hears of every prediction."""

    def __init__(self, odds: Odds) -> None:
        self._odds = odds
        self._by_slot: dict[int, Copy] = {}

    def of(self, slot: int) -> Copy:
        """As `follow` left it."""
        return self._by_slot[slot]

    def follow(self, slot: int, handle: int, ids: Int32s) -> Copy:
        """The copy of the request `handle` in `slot`, of which `ids` are known now."""
        known = len(ids)
        copy = self._by_slot.get(slot)
        if copy is None or copy.handle != handle or known - copy.seen > CATCH_UP:
            copy = self._by_slot[slot] = Copy(handle, known)
            _look(copy, ids)
            return copy
        while copy.seen < known:
            self._step(copy, ids[: copy.seen + 1])
        return copy

    def _step(self, copy: Copy, ids: Int32s) -> None:
        """One token more, the last of `ids`."""
        copy.seen = len(ids)
        right = False
        if copy.source >= 0:
            right = ids.item(copy.source) == ids.item(-1)
            self._odds.tell(copy, right)
            copy.source += 1
        copy.recent += RECENT * (right - copy.recent)
        if right:
            copy.match = min(copy.match + 1, MATCH_MAX)
        else:
            copy.match = 0
            _look(copy, ids)


def _look(copy: Copy, ids: Int32s) -> None:
    """The latest place that has the last three tokens before it, or else the last two; if there is none, go on where
    the copy was, for often a single token differs."""
    recent = ids[-WINDOW_TOKENS:]
    if len(recent) < 3:
        return
    ends = (recent[1:-1] == recent[-1]).nonzero()[0] + 1
    ends = ends[recent[ends - 1] == recent[-2]]
    if not len(ends):
        return
    longer = ends[ends >= 2]
    longer = longer[recent[longer - 2] == recent[-3]]
    end = int(longer[-1] if len(longer) else ends[-1])
    copy.source = len(ids) - len(recent) + end + 1
    copy.match = _agreement(recent, end)


def _agreement(ids: Int32s, end: int) -> int:
    """How many tokens up to and with ids[end] are the same as the last ones; at most MATCH_MAX."""
    most = min(end + 1, MATCH_MAX)
    differs = (ids[end + 1 - most : end + 1] != ids[len(ids) - most :]).nonzero()[0]
    return most - 1 - int(differs[-1]) if len(differs) else most


def predicted(ids: Int32s, source: int, count: int) -> Int32s:
    """The `count` tokens from `source` on; behind the end of `ids` it goes on with what it has predicted."""
    there = ids[source : source + count]
    if len(there) == count:
        return there
    return np.resize(ids[source:], count)
