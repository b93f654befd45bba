"""Version folders and policies, against plain restatements of spec section 5."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.repository.version import missing_versions, policy_text, version_number, wanted_versions
from fastserve.settings import PolicyChoice

NUMBERS = st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 9), max_size=12)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("1", 1),
        ("00000123", 123),
        ("0", 0),
        ("9223372036854775807", 2**63 - 1),
        ("9223372036854775808", None),
        ("9" * 1000, None),
        ("abc", None),
        ("v1", None),
        ("tmp", None),
        ("", None),
        ("-1", None),
        ("+1", None),
        ("1.0", None),
        ("1 ", None),
        ("1\n", None),
        ("\u0661", None),
    ],
)
def test_folder_names(name: str, number: int | None) -> None:
    assert version_number(name) == number


@given(NUMBERS)
def test_all_wants_everything(numbers: list[int]) -> None:
    assert wanted_versions("all", numbers) == sorted(set(numbers))


@given(NUMBERS, st.integers(0, 15))
def test_latest_wants_the_highest(numbers: list[int], count: int) -> None:
    wanted = wanted_versions(PolicyChoice(latest=count), numbers)
    assert len(wanted) == min(max(count, 1), len(set(numbers)))
    assert wanted == sorted(wanted)
    left_out = set(numbers) - set(wanted)
    assert not wanted or all(number < wanted[0] for number in left_out)


@given(NUMBERS, st.lists(st.integers(0, 9), min_size=1))
def test_specific_wants_what_is_there_and_names_what_is_not(numbers: list[int], specific: list[int]) -> None:
    policy = PolicyChoice(specific=specific)
    wanted, missing = wanted_versions(policy, numbers), missing_versions(policy, numbers)
    assert set(wanted) == set(numbers) & set(specific)
    assert set(wanted) | set(missing) == set(specific)
    assert not set(missing) & set(numbers)


def test_policies_in_words() -> None:
    assert policy_text("all") == "all versions"
    assert policy_text(PolicyChoice(latest=0)) == "the latest version"
    assert policy_text(PolicyChoice(latest=2)) == "the latest 2 versions"
    assert policy_text(PolicyChoice(specific=[3, 1])) == "versions 1, 3"
