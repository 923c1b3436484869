"""What the scheduler knows of a grammar: one matcher per structured sequence.

Owns: the `Matcher` protocol.
Does not know: grammars, text, masks.
Invariants: a matcher has accepted exactly the output tokens that its sequence knows. Same tokens, same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Matcher(Protocol):
    """Follows one output through its grammar."""

    @property
    def ended(self) -> bool:
        """Nothing may follow: the output is complete."""
        ...

    @property
    def error(self) -> str | None:
        """Why this matcher can go no further, and the output must fail."""
        ...

    def accept(self, token: int) -> bool:
        """The next token of the output. One that the grammar does not allow is an `error`. Whether the output goes on:
        it has not `ended`, and there is no `error`."""
        ...

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, as far as there is no choice; they are not accepted yet."""
        ...
