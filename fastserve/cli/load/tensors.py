"""Random tensors of a model's inputs, as JSON values and as bytes. No numpy: a command starts at once.

Numbers are printed as clients print them: floats with the 16 to 17 digits of a double.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import click

TEXT_CHARS = 12
# dtype -> struct code. A bfloat16 is the upper half of a float32.
PACKED = {
    "float32": "f", "float64": "d", "float16": "e", "bool": "?",
    "int8": "b", "int16": "h", "int32": "i", "int64": "q",
    "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q",
}  # fmt: skip
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Input:
    """One input: dtype by the name `tensor.DTYPES` has for it, and the shape to send, rows first."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def element_of(dtype: str) -> Callable[[random.Random], Any]:
    """Random elements that any dtype of that name can hold, texts for "bytes".

    Raises ClickException for what has no elements here.
    """
    if dtype in FLOATS:
        return random.Random.random
    if dtype == "bool":
        return lambda rng: rng.random() < 0.5
    if dtype == "bytes":
        return lambda rng: rng.randbytes(TEXT_CHARS // 2).hex()
    if dtype in PACKED:
        return lambda rng: rng.randrange(100)
    raise click.ClickException(f"cannot make random {dtype} values; give a body with --data")


def flat(given: Input, rng: random.Random) -> list[Any]:
    """The elements in row-major order."""
    element = element_of(given.dtype)
    return [element(rng) for _ in range(prod(given.shape))]


def nested(shape: Sequence[int], element: Callable[[random.Random], Any], rng: random.Random) -> Any:
    """The elements as lists in lists."""
    if not shape:
        return element(rng)
    return [nested(shape[1:], element, rng) for _ in range(shape[0])]


def packed(given: Input, rng: random.Random) -> bytes:
    """The elements as little-endian bytes; texts each with their length before them."""
    values = flat(given, rng)
    if given.dtype == "bytes":
        return b"".join(struct.pack("<I", len(text)) + text.encode() for text in values)
    if given.dtype == "bfloat16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{len(values)}{PACKED[given.dtype]}", *values)
