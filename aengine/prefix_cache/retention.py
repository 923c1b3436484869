"""Which points of a sequence are worth resuming from, for groups that do not keep everything.

Owns: the retention points of one sequence: prompt end, junction, grid. (The release point keeps itself: what is held
then stays.)
Does not know: pages, groups, leases.
Invariants: a pure function of lengths; points are multiples of the asking group's page.
"""

from __future__ import annotations

from dataclasses import dataclass

UNBOUNDED = 2**62
GRID_TOKENS = 4096  # replaying conversations: the dense hit rate but for half a point, at 2.4 points a request


@dataclass(slots=True)
class RetentionPoints:
    """`prompt_tokens`: prompt, and output so far when resumed; an identical one can hit up to its last token.
    `junction`: where another sequence with the same beginning went its own way, 0: none known. `grid_tokens` 0: no
    grid.
    """

    prompt_tokens: int
    grid_tokens: int
    junction: int = 0

    def after(self, tokens: int, page_tokens: int) -> int:
        """The first point beyond `tokens`; UNBOUNDED when there is none."""
        best = UNBOUNDED
        if self.grid_tokens:
            grid = -(-self.grid_tokens // page_tokens) * page_tokens
            best = (tokens // grid + 1) * grid
        for point in (self.prompt_tokens - 1, self.junction):
            aligned = point - point % page_tokens
            if tokens < aligned < best:
                best = aligned
        return best

    def has(self, tokens: int, page_tokens: int) -> bool:
        return tokens > 0 and self.after(tokens - 1, page_tokens) == tokens
