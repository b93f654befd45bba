"""Flags of other servers that are not built: they may ask for nothing, in whatever words."""

from __future__ import annotations

import pytest

from fastserve.settings.fields import unbuilt_fault


@pytest.mark.parametrize(
    ("value", "idle"), [("false", "false"), ("False", "false"), ("0", "false"), ("", ""), ("7", "7")]
)
def test_a_flag_that_asks_for_nothing_is_taken(value: str, idle: str) -> None:
    assert unbuilt_fault("flag", value, idle) == ""


@pytest.mark.parametrize(
    ("value", "idle"), [("true", "false"), ("maybe", "false"), ("x", ""), ("8", "7"), ("false", "7")]
)
def test_another_is_named_with_what_it_may_be(value: str, idle: str) -> None:
    fault = unbuilt_fault("flag", value, idle)
    assert "--flag" in fault
    assert value in fault
    assert (idle or "nothing") in fault
