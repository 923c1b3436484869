"""How one step's token budget is shared among the prompts that are being prefilled.

Owns: `share_budget`, a pure function.
Does not know: slots, pages, requests.
Invariants: the shares add up to at most the budget; the oldest prompt always gets some of it.
"""

from __future__ import annotations

from collections.abc import Sequence


def share_budget(remaining: Sequence[int], budget: int, page_tokens: int) -> list[int]:
    """Chunk sizes for prompts with `remaining` tokens each, given oldest first.

    The oldest is guaranteed half of the budget, so that it cannot starve; the rest goes to those with least to go,
    the oldest among them: that minimises the mean time to first token, lets a short prompt pass a long one, and keeps
    prompts of one length from delaying each other. A chunk that does not end its prompt is cut to whole pages, because
    only full pages can be shared (the caller starts on page borders, save after a hit or a tiny budget).
    """
    shares = [0] * len(remaining)
    if not remaining or budget <= 0:
        return shares
    left = budget
    shares[0] = min(remaining[0], _half(budget, page_tokens) if len(remaining) > 1 else budget)
    left -= shares[0]
    owed = [remaining[0] - shares[0], *remaining[1:]]
    for i in sorted(range(len(remaining)), key=lambda i: (owed[i], i)):
        given = min(owed[i], left)
        shares[i] += given
        left -= given
    return [_whole_pages(share, left, page_tokens) for share, left in zip(shares, remaining, strict=True)]


def _half(budget: int, page_tokens: int) -> int:
    """Half of the budget; of its whole pages if there are two: what a cut chunk loses at a page border nobody gets."""
    pages = budget // page_tokens
    return -(-pages // 2) * page_tokens if pages > 1 else max(1, budget // 2)


def _whole_pages(share: int, remaining: int, page_tokens: int) -> int:
    if share == remaining or share < page_tokens:
        return share
    return share - share % page_tokens
