"""Errors about values that clients may have sent: short, and found at a cost that has a bound."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from fastserve.errors import ConfigError
from fastserve.settings.fields import convert, fault_text, hint, shown

ENOUGH_S, ENOUGH_BYTES = 1.0, 32 << 20  # msgspec's own error quotes a key whole


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    ids: list[Annotated[int, Meta(ge=0)]] = []
    few: Annotated[list[int], Meta(max_length=3)] = []
    names: dict[str, int] = {}


def cost(work: Callable[[], Any]) -> tuple[float, int]:
    """CPU seconds and peak bytes."""
    started = time.process_time()
    work()
    took = time.process_time() - started
    tracemalloc.start()
    try:
        work()
        return took, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refusal(value: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        convert(value, Inner, "here")
    return str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        {"k" * 10_000_000: 1},
        {"ids": "x" * 10_000_000},
        {"ids": [1] * 1_000_000 + [-1]},
        {"names": {"k" * 10_000_000: "x"}},
        {"ids": ["y" * 10_000_000]},
        [["z" * 1000] * 1000] * 1000,
    ],
    ids=["key", "text", "last", "inner-key", "item", "lists"],
)
def test_fields_refuse_large_values_cheaply_and_shortly(value: Any) -> None:
    assert len(refusal(value)) < 400
    took, peak = cost(lambda: refusal(value))
    assert took < ENOUGH_S
    assert peak < ENOUGH_BYTES


def test_fields_name_the_item_behind_many_good_ones() -> None:
    assert refusal({"ids": [1] * 1000 + [-1]}) == "here: ids[1000]: given -1, allowed: a whole number from 0"


def test_fields_say_how_many_items_a_list_may_have() -> None:
    words = "here: few: given [1, 2, 3, 4], allowed: a list of at most 3 items, each a whole number"
    assert refusal({"few": [1, 2, 3, 4]}) == words


def test_fields_suggest_for_keys_that_may_be_meant() -> None:
    assert hint("name", ["names"]) == ", did you mean names? allowed: names"
    assert hint("name" * 100, ["names"]) == ", allowed: names"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, "b", None]}, '{"a": [1, "b", null]}'),
        ((1, 2.5), "[1, 2.5]"),
        ("é" * 100, '"' + "é" * 76 + "..."),
        ([[[[[[[[[[1]]]]]]]]]], '[[[[[[[["..."]]]]]]]]'),
        ({1: 2}, '{"1": 2}'),
        (b"ab", "b'ab'"),
    ],
)
def test_fields_show_values_as_they_begin(value: Any, text: str) -> None:
    assert shown(value) == text
    assert fault_text("f", value, "x") == f"f: given {text}, allowed: x"
