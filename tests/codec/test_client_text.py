"""Numbers that texts of clients begin with."""

from __future__ import annotations

import pytest

from fastserve.codec.json_text import leading_int


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        (" \t\n\v\f\r+12abc", 12),
        ("-3.5", -3),
        ("007", 7),
        ("", None),
        ("x7", None),
        ("- 7", None),
        ("\u00a07", None),  # no space of C's
        ("\u0667", None),  # a digit, and none of C's
        (str(2**63), 2**63),
    ],
)
def test_numbers_are_read_as_c_does(text: str, number: int | None) -> None:
    assert leading_int(text) == number


def test_a_number_of_any_length_costs_nothing() -> None:
    huge = "9" * 100_000
    assert leading_int(huge) > 2**63 - 1
    assert leading_int(f"-{huge}") < -(2**63)
