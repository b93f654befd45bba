"""General JSON to Python objects, against json and orjson: a classify request of 100 examples."""

from __future__ import annotations

import json

import orjson
import pytest

from fastserve._ext.json_value import debug_text, parse

EXAMPLES = [{"age": n, "name": f"n\u00e9 {n}", "ratings": [n / 7, 0.25, 1e-9]} for n in range(100)]
BODY = json.dumps({"signature_name": "classify", "examples": EXAMPLES}).encode()


@pytest.mark.parametrize("read", [parse, json.loads, orjson.loads], ids=["fastserve", "json", "orjson"])
def test_parse(benchmark, read) -> None:  # type: ignore[no-untyped-def]
    value = benchmark(read, BODY)
    assert len(value.get(b"examples") or value.get("examples")) == 100


def test_debug_text(benchmark) -> None:  # type: ignore[no-untyped-def]
    assert benchmark(debug_text, parse(BODY)).startswith('{\n    "signature_name": "classify"')
