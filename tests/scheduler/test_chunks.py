"""The token budget: never exceeded, never wasted, nobody starves, short prompts first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aengine.scheduler.chunks import share_budget


@given(st.lists(st.integers(1, 3000), max_size=20), st.integers(0, 2048))
def test_shares_stay_within_budget_and_need(remaining: list[int], budget: int) -> None:
    shares = share_budget(remaining, budget, 16)
    assert len(shares) == len(remaining)
    assert sum(shares) <= budget
    assert all(0 <= share <= left for share, left in zip(shares, remaining, strict=True))
    if remaining and budget:
        assert shares[0] > 0


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.integers(16, 2048))
def test_at_most_a_page_per_prompt_is_left_over(remaining: list[int], budget: int) -> None:
    shares = share_budget(remaining, budget, 16)
    assert sum(shares) > min(budget, sum(remaining)) - 16 * len(remaining)


def test_unfinished_chunks_are_whole_pages() -> None:
    assert share_budget([1000, 900], 100, 16) == [48, 48]


def test_prompts_of_one_length_do_not_delay_each_other() -> None:
    assert share_budget([1000, 1000, 1000], 256, 16) == [256, 0, 0]


def test_a_short_prompt_passes_a_long_one() -> None:
    assert share_budget([5000, 20, 4000], 512, 16) == [256, 20, 224]


def test_the_oldest_gets_what_others_leave() -> None:
    assert share_budget([5000, 20], 512, 16) == [480, 20]


def test_a_budget_below_a_page_still_moves() -> None:
    assert share_budget([100, 100], 5, 16) == [5, 0]
