"""Lifetimes against a simulation of one sequence that prefills in chunks and decodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.memory import Chunk, Cross, Full, Lifetime, Media, State, Window


@pytest.mark.parametrize(
    ("tokens", "live"),
    [(0, 0), (1, 0), (7, 0), (8, 1), (9, 2), (100, 93)],
)
def test_window_reads_its_last_positions(tokens: int, live: int) -> None:
    assert Window(8).first_live(tokens) == live


@pytest.mark.parametrize(("tokens", "live"), [(0, 0), (7, 0), (8, 8), (15, 8), (16, 16)])
def test_chunk_reads_its_own_chunk(tokens: int, live: int) -> None:
    assert Chunk(8).first_live(tokens) == live


def test_window_of_one_reads_only_itself() -> None:
    assert Window(1).first_live(5) == 5


@pytest.mark.parametrize("kind", [Window, Chunk])
@pytest.mark.parametrize("tokens", [0, -3])
def test_empty_spans_are_refused(kind: type[Window], tokens: int) -> None:
    with pytest.raises(ValueError, match=str(tokens)):
        kind(tokens)


def test_labels() -> None:
    labels = [life.label for life in (Full(), Window(4), Chunk(8), State(), Cross(), Media())]
    assert labels == ["full", "window(4)", "chunk(8)", "state", "cross", "media"]


spans = st.one_of(st.just(Full()), st.builds(Window, st.integers(1, 40)), st.builds(Chunk, st.integers(1, 40)))


@given(spans, st.integers(0, 200))
def test_first_live_never_falls_and_never_leads(lifetime: Lifetime, tokens: int) -> None:
    assert 0 <= lifetime.first_live(tokens) <= lifetime.first_live(tokens + 1)
    assert lifetime.first_live(tokens) <= tokens


@given(spans, st.integers(1, 120), st.integers(1, 9), st.integers(1, 12))
def test_peak_bounds_what_a_sequence_holds(lifetime: Lifetime, total: int, page: int, chunk: int) -> None:
    """Pages are let go of only when a page border is passed, as late as a scheduler may."""
    peak = lifetime.peak_pages(total, page, chunk)
    computed, base, held = 0, 0, 0
    while computed < total:
        upto = min(total, computed + chunk)
        held = -(-upto // page)
        assert held - base <= peak
        if upto // page > computed // page:
            base = max(base, min(lifetime.first_live(upto) // page, held))
        computed = upto
    assert peak <= lifetime.peak_pages(total, page, None) == -(-total // page)


def test_state_holds_the_page_read_and_the_page_written() -> None:
    assert State().peak_pages(10_000, 16, None) == 2
    assert State().peak_pages(1, 16, None) == 1
