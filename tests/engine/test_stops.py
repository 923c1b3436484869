"""Stop strings: nothing behind one leaks, nothing before one is lost, however the text is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aengine.engine.stops import StopStrings


def feed(stops: tuple[str, ...], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    checker = StopStrings(stops, include=include)
    out = ""
    for piece in pieces:
        text, hit = checker.push(piece)
        out += text
        if hit is not None:
            return out, hit
    return out + checker.flush(), None


def expected(stops: tuple[str, ...], text: str, *, include: bool) -> tuple[str, str | None]:
    """The first moment at which the text so far holds a stop; then the stop that begins first, the longest of those."""
    for end in range(1, len(text) + 1):
        hits = [(text.find(s, 0, end), -len(s), s) for s in stops if text.find(s, 0, end) >= 0]
        if hits:
            at, _, stop = min(hits)
            return (text[: at + len(stop)] if include else text[:at]), stop
    return text, None


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.text("ab", max_size=30),
    st.booleans(),
)
def test_letter_by_letter_equals_the_plain_search(stops: list[str], text: str, include: bool) -> None:
    assert feed(tuple(stops), list(text), include=include) == expected(tuple(stops), text, include=include)


@given(st.text("abc", min_size=1, max_size=3), st.lists(st.text("abc", max_size=5), max_size=10))
def test_one_stop_does_not_depend_on_how_the_text_is_cut(stop: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    assert feed((stop,), pieces) == expected((stop,), text, include=False)


def test_text_that_only_looks_like_a_stop_comes_out() -> None:
    checker = StopStrings(("END",), include=False)
    assert checker.push("the EN") == ("the ", None)
    assert checker.push("TRY") == ("ENTRY", None)
    assert checker.flush() == ""


def test_a_stop_across_pieces_hides_what_follows() -> None:
    assert feed(("END",), ["a E", "N", "D secret"]) == ("a ", "END")
    assert feed(("END",), ["a E", "N", "D secret"], include=True) == ("a END", "END")


def test_no_stops_pass_everything_through_at_once() -> None:
    assert StopStrings((), include=False).push("abc") == ("abc", None)
