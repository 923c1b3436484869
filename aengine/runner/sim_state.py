"""Recurrent state of the simulated device.

Owns: simulated state pages, each the digest of all tokens up to some number of them.
Does not know: scheduling, block tables of other groups, how tokens are derived.
Invariants: a row's state goes on from what it finds in the page it reads; a page of another count of tokens, or one
that another row of the step writes, spoils it for ever. Page 0 holds the state of no tokens and is never written.
"""

from __future__ import annotations

from collections.abc import Sequence

from aengine.types import Int32s, StepPlan

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x5851F42D4C957F2D
_SPOILED = (-7, 0)

State = tuple[int, int]  # number of tokens, digest of them


def digest(ids: Sequence[int] | Int32s, state: State = (0, 0)) -> State:
    """The state after `ids`, which follow the tokens of `state`."""
    count, value = state
    for token in ids:
        value = (value * _MULTIPLIER + int(token) + 11) & _MASK
    return count + len(ids), value


class SimStates:
    """The pages of one state group."""

    def __init__(self, pages: int) -> None:
        self._pages: list[State] = [(0, 0)] + [_SPOILED] * (pages - 1)
        self._rows: list[list[State]] = []

    def move(self, source: int, target: int) -> None:
        self._pages[target], self._pages[source] = self._pages[source], _SPOILED

    def run(self, plan: StepPlan, table: Int32s, inputs: Sequence[Int32s]) -> None:
        """One step: all rows read, then all write; keeps the states after every position for `after`."""
        pairs = table[plan.slots].tolist()
        before = [self._pages[read] for read, _ in pairs]
        self._rows = []
        for (_, write), state, start, ids in zip(pairs, before, plan.starts.tolist(), inputs, strict=True):
            after = [state if state[0] == start else _SPOILED]
            for token in ids.tolist():
                after.append(digest([token], after[-1]))
            self._rows.append(after)
            if write:
                self._pages[write] = after[-1]
        for (read, write), state, after in zip(pairs, before, self._rows, strict=True):
            overwritten = read != write and self._pages[read] != state
            if overwritten or self._pages[write] != after[-1]:  # two rows of the step share a page they write
                after[:] = [_SPOILED] * len(after)

    def after(self, row: int, tokens: int) -> State:
        """The state of a row of the last step once it has computed its first `tokens` tokens."""
        return self._rows[row][tokens]
