"""TensorFlow Serving's REST API: rows as JSON, or one tensor's bytes."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import click

from fastserve.cli.load.requests import Request, Target, Wish, variants
from fastserve.cli.load.tensors import PACKED, Input, element_of, nested, packed
from fastserve.cli.rest import model_path

# TensorFlow's name for a dtype where it is not DT_ and the dtype's own in capitals.
OWN_NAMES = {"DT_FLOAT": "float32", "DT_DOUBLE": "float64", "DT_HALF": "float16", "DT_STRING": "bytes"}


class TFServingRows:
    """Row format: {"instances": [...]}."""

    over_grpc = False
    events = False

    def requests(self, target: Target, wish: Wish) -> list[Request]:
        path = f"{model_path(wish.model)}:predict"
        if wish.data is not None:
            return [Request(path, "application/json", wish.data)]
        inputs = ask_inputs(target, wish)
        return variants(lambda rng: Request(path, "application/json", rows_body(inputs, wish, rng)))

    def close(self) -> None:
        """Nothing is held."""


class TFServingRaw(TFServingRows):
    """The tensor's bytes as the body, for a model with one numeric input."""

    def requests(self, target: Target, wish: Wish) -> list[Request]:
        path = f"{model_path(wish.model)}:predict"
        if wish.data is not None:
            return [Request(path, "application/octet-stream", wish.data)]
        inputs = ask_inputs(target, wish)
        if len(inputs) != 1 or inputs[0].dtype not in PACKED:
            raise click.ClickException(f"{wish.model} has not one numeric input, which a raw body needs")
        return variants(lambda rng: Request(path, "application/octet-stream", packed(inputs[0], rng)))


def ask_inputs(target: Target, wish: Wish) -> list[Input]:
    """The inputs of the wished signature, any-length dimensions filled in."""
    signatures = target.http.signatures(wish.model)
    if wish.signature not in signatures:
        known = ", ".join(sorted(signatures))
        raise click.ClickException(f"{wish.model} has no signature {wish.signature}; it has {known}")
    described = signatures[wish.signature]["inputs"]
    return [
        Input(name, dtype_of(spec["dtype"]), concrete(spec["tensor_shape"], wish))
        for name, spec in described.items()
    ]


def dtype_of(name: str) -> str:
    return OWN_NAMES.get(name, name.removeprefix("DT_").lower())


def concrete(shape: dict[str, Any], wish: Wish) -> tuple[int, ...]:
    """The first dimension is rows when it is open; unknown rank is taken as one number per row."""
    sizes = [int(dim["size"]) for dim in shape.get("dim", [])]
    if not sizes:
        return (wish.rows,)
    first = wish.rows if sizes[0] < 0 else sizes[0]
    return (first, *(wish.length if size < 0 else size for size in sizes[1:]))


def rows_body(inputs: Sequence[Input], wish: Wish, rng: random.Random) -> bytes:
    columns = {given.name: nested(given.shape, json_element(given.dtype), rng) for given in inputs}
    only = next(iter(columns.values())) if len(columns) == 1 else None
    rows = only or [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    body: dict[str, Any] = {"instances": rows}
    if wish.signature != "serving_default":
        body = {"signature_name": wish.signature, **body}
    return json.dumps(body).encode()


def json_element(dtype: str) -> Callable[[random.Random], Any]:
    """Elements as this API writes them: any bytes in base64."""
    if dtype == "bytes":
        return lambda rng: {"b64": base64.b64encode(rng.randbytes(12)).decode()}
    return element_of(dtype)
