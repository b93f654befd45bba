"""Stop strings: what is found depends on the text alone, nothing of one is ever passed on."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fastserve.serving.text.stops import StopStrings
from tests.effort import examples

TEXT = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def first_complete(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first of them is complete, looked for after every character; the longest that ends there."""
    for end in range(1, len(text) + 1):
        there = [stop for stop in stops if text[:end].endswith(stop)]
        if there:
            return end, max(there, key=len)
    return None


@examples(400)
@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8), include=st.booleans())
def test_any_pieces_give_what_the_text_gives(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    found, passed = StopStrings(stops, include=include), ""
    for piece in pieces:
        passed += found.feed(piece)
        if found.found is not None:
            break
        assert not any(stop in passed for stop in stops)
        assert text.startswith(passed + found.held)
    expected = first_complete(text, stops)
    if expected is None:
        assert (found.found, passed + found.flush(), found.held) == (None, text, "")
    else:
        end, stop = expected
        assert (found.found, passed) == (stop, text[: end if include else end - len(stop)])


@given(text=TEXT, stops=STOPS)
def test_no_more_is_held_back_than_may_be_a_beginning(text: str, stops: list[str]) -> None:
    found = StopStrings(stops)
    for character in text:
        found.feed(character)
        if found.found is not None:
            return
        held = found.held
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
