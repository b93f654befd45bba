"""Stop strings: what is found depends on the text alone, nothing of one is ever passed on, and none costs
more than its characters."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.stop_strings import StopStrings, StopTable
from fastserve.serving.text.models import MOST_STOP_CHARACTERS, MOST_STOPS
from tests.effort import examples
from tests.proc import resident

TEXT = st.text("ab", max_size=30)
# Of one, two and four bytes a character in memory: pieces and stop strings are stored at widths of their own.
WIDE = st.text("a\u00e9\u2603\U0001f600", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)
WIDE_STOPS = st.lists(st.text("a\u00e9\u2603\U0001f600", min_size=1, max_size=4), min_size=1, max_size=4)


def first_complete(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of them is complete, looked for after every character; the longest that ends there."""
    for end in range(1, len(text) + 1):
        there = [stop for stop in stops if text[:end].endswith(stop)]
        if there:
            return end, max(there, key=len)
    return None


def longest_beginning(text: str, stops: Sequence[str]) -> str:
    """The longest end of a text that one of them begins with, and is not."""
    starts = {stop[:size] for stop in stops for size in range(1, len(stop))}
    return max((text[i:] for i in range(len(text)) if text[i:] in starts), key=len, default="")


def cut(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


@examples(400)
@given(
    case=st.one_of(st.tuples(TEXT, STOPS), st.tuples(WIDE, WIDE_STOPS)),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    include=st.booleans(),
)
def test_any_pieces_give_what_the_text_gives(
    case: tuple[str, list[str]], cuts: list[int], include: bool
) -> None:
    text, stops = case
    found, passed, came = StopStrings(StopTable(stops), include_stop=include), "", ""
    for piece in cut(text, cuts):
        passed += found.feed(piece)
        came += piece
        if found.found is not None:
            break
        assert not any(stop in passed for stop in stops)
        assert (found.held, passed + found.held) == (longest_beginning(came, stops), came)
    expected = first_complete(text, stops)
    if expected is None:
        assert (found.found, passed + found.flush(), found.held) == (None, text, "")
    else:
        end, stop = expected
        assert (found.found, found.held) == (stop, "")
        assert passed == text[: end if include else end - len(stop)]


def test_sequences_share_a_table() -> None:
    table = StopTable(["END"])
    one, other = StopStrings(table), StopStrings(table)
    assert (one.feed("the E"), other.feed("an EN")) == ("the ", "an ")
    assert (one.feed("ND."), one.found) == ("", "END")
    assert (other.feed("d"), other.found, other.flush()) == ("ENd", None, "")


def test_an_empty_string_is_no_stop_string() -> None:
    with pytest.raises(ValueError, match="no characters"):
        StopTable(["a", ""])


def most_stops(character: str = "a") -> list[str]:
    """As many as may be, as long as they may be: alike up to the last character, so that all of them are
    beginnings of each other's ends."""
    return [character * (MOST_STOP_CHARACTERS - 1) + chr(0x4E00 + i) for i in range(MOST_STOPS)]


def test_a_table_has_a_node_for_each_beginning_once() -> None:
    stops = most_stops()
    assert len(StopTable(stops)) == MOST_STOP_CHARACTERS + MOST_STOPS  # and the root
    assert len(StopTable([f"{i:02d}" + "x" * 1022 for i in range(64)])) == 1 + 7 + 64 * 1023


def test_many_sequences_of_a_request_hold_one_table() -> None:
    stops = [f"{i:02d}" + "x" * (MOST_STOP_CHARACTERS - 2) for i in range(MOST_STOPS)]
    before, began = resident(), time.process_time()
    tracemalloc.start()
    table = StopTable(stops)
    sequences = [StopStrings(table) for _ in range(128)]
    of_python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(sequences) == 128
    assert of_python < 100_000
    assert resident() - before < 5 << 20
    assert time.process_time() - began < 1  # 0.01 s; the beginnings of each would be 140 s


def test_text_costs_its_characters_however_far_back_a_match_may_begin() -> None:
    stops, text = most_stops(), "a" * 1_000_000
    found = StopStrings(StopTable(stops))
    began = time.process_time()
    assert found.feed(text) == text[: -(MOST_STOP_CHARACTERS - 1)]
    for _ in range(10_000):
        assert found.feed("a") == "a"
    assert found.feed("b").endswith("b")
    assert time.process_time() - began < 5  # 0.1 s
