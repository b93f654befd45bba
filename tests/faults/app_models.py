"""A script with a model of each kind, for requests that strangers send."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

import fastserve

Number, Wide, Text = fastserve.Array[np.float32], fastserve.Array[np.float32, -1], fastserve.Array[str]


@fastserve.model
def greet(name: str, times: int = 1) -> str:
    return f"Hello {name}! " * min(times, 10)


@dataclass
class Query:
    words: list[str]
    tags: dict[str, int] = field(default_factory=dict)


@fastserve.model
def know(query: Query) -> int:
    return len(query.words)


@fastserve.model(batch=32)
def rows(x: Wide) -> Wide:
    return x * 2


@fastserve.model(batch=32)
def mix(a: Number, b: Text) -> Number:
    return a * 2


@fastserve.model
def count(to: int) -> Iterator[int]:
    yield from range(min(to, 10))


@fastserve.model(batch=8)
def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]
