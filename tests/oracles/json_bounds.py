"""The results of _ext.json_bounds, by the standard library: all of it is made, then walked."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

LONE_HIGH = re.compile(r"[\ud800-\udbff]")


class Size(NamedTuple):
    """Of a document, under the names of Bounds."""

    depth: int
    values: int
    numbers: int
    object_keys: int
    key_bytes: int
    longest_key: int
    keys: int


class Pairs(list[Any]):
    """An object: its keys, twice where they are given twice."""


def read(text: str) -> Any:
    """The document. Raises ValueError."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    found = json.loads(
        text, object_pairs_hook=Pairs, parse_constant=refuse, parse_int=float, parse_float=float
    )
    _refuse_halves(found)
    return found


def _refuse_halves(value: Any) -> None:
    """The first half of a surrogate pair, which is alone: the library joins those that are not."""
    if isinstance(value, str) and LONE_HIGH.search(value):
        raise ValueError("half of a surrogate pair")
    if isinstance(value, list):
        for item in value:
            for part in item if isinstance(value, Pairs) else [item]:
                _refuse_halves(part)


def measure(value: Any) -> Size:
    """How large it is. Keys are measured as `json.dumps` sends them."""
    if isinstance(value, float):
        return Size(0, 0, 1, 0, 0, 0, 0)
    if not isinstance(value, list):
        return Size(0, 1, 0, 0, 0, 0, 0)
    keys = [len(json.dumps(key)) - 2 for key, _ in value] if isinstance(value, Pairs) else []
    inner = [measure(item[1] if isinstance(value, Pairs) else item) for item in value]
    return Size(
        1 + max((each.depth for each in inner), default=0),
        1 + sum(each.values for each in inner),
        sum(each.numbers for each in inner),
        max([len(keys), *(each.object_keys for each in inner)]),
        sum(keys) + sum(each.key_bytes for each in inner),
        max([0, *keys, *(each.longest_key for each in inner)]),
        len(keys) + sum(each.keys for each in inner),
    )
