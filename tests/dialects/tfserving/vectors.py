"""The shared vectors by kind, and how their values are written."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from fastserve.dialects.tfserving.errors import TF_NAME
from fastserve.tensor import DTYPE_BY_CODE, DType

FILE = Path(__file__).parents[2] / "vectors" / "tfserving.jsonl"
ALL: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text().splitlines()]
DTYPE_BY_TF_NAME: dict[str, DType] = {name: DTYPE_BY_CODE[code] for code, name in TF_NAME.items()}

Vector = dict[str, Any]


def each(*kinds: str) -> pytest.MarkDecorator:
    """Parametrise a test over every vector of these kinds."""
    chosen = [pytest.param(vector, id=vector["id"]) for vector in ALL if vector["kind"] in kinds]
    return pytest.mark.parametrize("vector", chosen)


def body_of(given: dict[str, Any]) -> bytes:
    """A vector's request or reply body."""
    if "body_b64" in given:
        return base64.b64decode(given["body_b64"])
    body: str = given.get("body", "")
    return body.encode()


def plain(value: Any) -> Any:
    """A value as Python has it: base64 objects and strings as bytes, words of numbers as floats."""
    if isinstance(value, dict):
        return base64.b64decode(value["b64"])
    return value
