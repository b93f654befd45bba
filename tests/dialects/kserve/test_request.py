"""The error of a body with several faults; texts of numbers."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.infer_reply import write_items
from fastserve.dialects.kserve.inference import check_strings
from fastserve.dialects.kserve.request import read_body, read_header
from fastserve.errors import ServeError
from fastserve.serving.client_shared_memory import Range
from fastserve.tensor import DTYPES


def no_region(range: Range) -> None:
    """Every region is a file."""


X = {"name": "x", "datatype": "INT8", "shape": [1]}

BINARY = {"parameters": {"binary_data_size": 9}}

INPUTS = {"inputs": [{**X, "data": [1]}]}


@pytest.mark.parametrize(
    ("body", "told"),
    [({"id": 5, "parameters": 3}, "Unable to parse 'id'"),
     ({"parameters": {"triton_x": 1}}, "parameter keys starting with 'triton_'"),
     ({"parameters": {"priority": 1}}, "Unable to parse 'inputs'"),
     ({"inputs": [{**X, **BINARY}, {}]}, "unexpected size for input 'x', expecting 9"),
     ({"inputs": [{**X, "data": [1]}, {**X, "data": [1]}, {}]}, "[request id: <id_unknown>] input 'x'"),
     ({**INPUTS, "outputs": 3}, "Unable to parse 'outputs'"),
     ({**INPUTS, "outputs": [{"parameters": {"classification": "1"}}]}, "Unable to set 'classification'"),
     ({**INPUTS, "outputs": [{"name": 1}]}, "Unable to parse 'name'")],
)  # fmt: skip
def test_the_first_fault_is_told(body: dict[str, Any], told: str) -> None:
    """Fields before a fault in the JSON are looked at first, also those that its reader does not know."""
    with pytest.raises(ServeError) as caught:
        read_body(read_header(json.dumps(body).encode()), b"", "m", no_region)
    assert caught.value.message.startswith(told)


def test_tensors_behind_the_json_go_before_outputs() -> None:
    body = {**INPUTS, "outputs": [{}]}
    with pytest.raises(ServeError, match="unexpected additional input data for model 'm'"):
        read_body(read_header(json.dumps(body).encode()), b"1", "m", no_region)


def write_double(value: float) -> bytes:
    return write_items(DTYPES["float64"].code, 1, struct.pack("<d", value))


@given(st.floats())
def test_doubles_come_back(value: float) -> None:
    text = write_double(value)
    if math.isnan(value):
        assert text == b"NaN"
    else:
        assert struct.pack("<d", float(text)) == struct.pack("<d", value)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, b"1.0"), (1e-6, b"0.000001"), (1e-7, b"1e-7"), (1e21, b"1e21"), (1e20, b"100000000000000000000.0"),
     (-1.5e-5, b"-0.000015"), (0.1, b"0.1"), (1.25e22, b"1.25e22"), (-0.0, b"-0.0"),
     (-math.inf, b"-Infinity")],
)  # fmt: skip
def test_layout_of_doubles(value: float, text: bytes) -> None:
    assert write_double(value) == text


def packed(*items: bytes) -> bytes:
    return b"".join(len(item).to_bytes(4, "little") + item for item in items)


@given(st.lists(st.binary(max_size=5), max_size=5))
def test_whole(items: list[bytes]) -> None:
    check_strings(packed(*items), len(items), "x", "m", "")


@pytest.mark.parametrize(
    ("data", "count", "words"),
    [
        (b"", 1, "expected 1 string elements for inference input 'x' for model 'm', got 0"),
        (packed(b"a", b"b"), 1, "unexpected number of string elements 2"),
        (packed(b"a") + b"\1\0", 2, "expecting 4 bytes but only 2 bytes available"),
        (packed(b"a") + b"\11\0\0\0ab", 2, "expecting string of length 9 but only 2 bytes available"),
        (b"\377\377\377\377", 1, "expecting string of length 4294967295 but only 0 bytes available"),
        (b"\1", 0, "expecting 4 bytes but only 1 bytes available"),
    ],
)
def test_broken(data: bytes, count: int, words: str) -> None:
    with pytest.raises(ServeError, match=words):
        check_strings(data, count, "x", "m", "")
