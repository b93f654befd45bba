"""The requests a load is made of, one class per protocol, from what the model says of its inputs.

A protocol asks the server for the model's inputs once, then writes a few different requests that
the connections send round and round. Numbers are random and printed as clients print them: floats
with the 16 to 17 digits of a double.
"""

from __future__ import annotations

import base64
import json
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import click

from fastserve.cli.rest import Server, model_path

VARIANTS = 16
VARIANT_BYTES = 8 << 20  # of all variants together


@dataclass(frozen=True)
class Request:
    """One POST: path, content type and body."""

    path: str
    content_type: str
    body: bytes

    def encode(self, host: str) -> bytes:
        head = f"POST {self.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {self.content_type}\r\n"
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(self.body) + self.body


@dataclass(frozen=True)
class Input:
    """One input: dtype in TensorFlow's spelling, and the shape to send, rows first."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Wish:
    """What is asked of the requests: `rows` each, `length` items where the model takes any number."""

    model: str
    rows: int = 1
    length: int = 1
    signature: str = "serving_default"
    data: bytes | None = None  # a body to send as it is


class LoadProtocol(Protocol):
    """How one client protocol asks a model."""

    def requests(self, server: Server, wish: Wish) -> list[Request]: ...


class TFServingRows:
    """TF Serving REST, row format: {"instances": [...]}."""

    def requests(self, server: Server, wish: Wish) -> list[Request]:
        path = f"{model_path(wish.model)}:predict"
        if wish.data is not None:
            return [Request(path, "application/json", wish.data)]
        inputs = ask_inputs(server, wish)
        return variants(lambda rng: Request(path, "application/json", rows_body(inputs, wish, rng)))


class TFServingRaw:
    """The tensor's bytes as the body, for a model with one numeric input."""

    def requests(self, server: Server, wish: Wish) -> list[Request]:
        path = f"{model_path(wish.model)}:predict"
        if wish.data is not None:
            return [Request(path, "application/octet-stream", wish.data)]
        inputs = ask_inputs(server, wish)
        if len(inputs) != 1 or inputs[0].dtype not in PACKED:
            raise click.ClickException(f"{wish.model} has not one numeric input, which a raw body needs")
        return variants(lambda rng: Request(path, "application/octet-stream", raw_body(inputs[0], rng)))


PROTOCOLS: dict[str, Callable[[], LoadProtocol]] = {
    "tfserving": TFServingRows,
    "tfserving-raw": TFServingRaw,
}


def ask_inputs(server: Server, wish: Wish) -> list[Input]:
    """The inputs of the wished signature, any-length dimensions filled in."""
    signatures = server.signatures(wish.model)
    if wish.signature not in signatures:
        known = ", ".join(sorted(signatures))
        raise click.ClickException(f"{wish.model} has no signature {wish.signature}; it has {known}")
    described = signatures[wish.signature]["inputs"]
    return [
        Input(name, spec["dtype"], concrete(spec["tensor_shape"], wish)) for name, spec in described.items()
    ]


def concrete(shape: dict[str, Any], wish: Wish) -> tuple[int, ...]:
    """The first dimension is rows when it is open; unknown rank is taken as one number per row."""
    sizes = [int(dim["size"]) for dim in shape.get("dim", [])]
    if not sizes:
        return (wish.rows,)
    first = wish.rows if sizes[0] < 0 else sizes[0]
    return (first, *(wish.length if size < 0 else size for size in sizes[1:]))


def variants(make: Callable[[random.Random], Request]) -> list[Request]:
    rng = random.Random(7)  # the same load each time
    made = [make(rng)]
    count = min(VARIANTS, max(1, VARIANT_BYTES // max(1, len(made[0].body))))
    return made + [make(rng) for _ in range(count - 1)]


def rows_body(inputs: Sequence[Input], wish: Wish, rng: random.Random) -> bytes:
    columns = {given.name: nested(given.shape, element_of(given.dtype), rng) for given in inputs}
    only = next(iter(columns.values())) if len(columns) == 1 else None
    rows = only or [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    body: dict[str, Any] = {"instances": rows}
    if wish.signature != "serving_default":
        body = {"signature_name": wish.signature, **body}
    return json.dumps(body).encode()


def nested(shape: Sequence[int], element: Callable[[random.Random], Any], rng: random.Random) -> Any:
    if not shape:
        return element(rng)
    return [nested(shape[1:], element, rng) for _ in range(shape[0])]


# TensorFlow's dtype name -> struct code, for what a raw body can carry without numpy.
PACKED = {
    "DT_FLOAT": "f", "DT_DOUBLE": "d", "DT_HALF": "e", "DT_BOOL": "?",
    "DT_INT8": "b", "DT_INT16": "h", "DT_INT32": "i", "DT_INT64": "q",
    "DT_UINT8": "B", "DT_UINT16": "H", "DT_UINT32": "I", "DT_UINT64": "Q",
}  # fmt: skip


def element_of(dtype: str) -> Callable[[random.Random], Any]:
    """Random elements that any dtype of that name can hold; raises ClickException for others."""
    if dtype in {"DT_FLOAT", "DT_DOUBLE", "DT_HALF", "DT_BFLOAT16"}:
        return random.Random.random
    if dtype == "DT_BOOL":
        return lambda rng: rng.random() < 0.5
    if dtype == "DT_STRING":
        return lambda rng: {"b64": base64.b64encode(rng.randbytes(12)).decode()}
    if dtype in PACKED:
        return lambda rng: rng.randrange(100)
    raise click.ClickException(f"cannot make random {dtype} values; give a body with --data")


def raw_body(given: Input, rng: random.Random) -> bytes:
    element = element_of(given.dtype)
    count = prod(given.shape)
    return struct.pack(f"<{count}{PACKED[given.dtype]}", *(element(rng) for _ in range(count)))
