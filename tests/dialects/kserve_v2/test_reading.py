"""Both readers of a body agree; texts of numbers; the choice of a coding; shapes of flat bodies."""

from __future__ import annotations

import json
import math
import struct
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.infer_reply import write_items
from fastserve.dialects.kserve_v2.answers import choose_coding
from fastserve.dialects.kserve_v2.body import read_body, read_header, read_plainly
from fastserve.errors import ServeError
from fastserve.serving.shared_memory import Range
from fastserve.tensor import DTYPES

NUMBERS = {
    "FP32": st.floats(width=32) | st.integers(-9, 9),
    "FP64": st.floats() | st.integers(-(2**63), 2**63 - 1),
    "INT8": st.integers(-(2**40), 2**40),
    "UINT64": st.integers(0, 2**64 - 1),
    "BOOL": st.booleans(),
    "BYTES": st.text(max_size=4),
}


def no_region(range: Range) -> tuple[bytes, None]:
    return bytes(range.byte_size), None


@st.composite
def inputs(draw: Any) -> dict[str, Any]:
    datatype = draw(st.sampled_from(sorted(NUMBERS)))
    data = draw(st.lists(NUMBERS[datatype], max_size=6))
    shape = [max(len(data) + draw(st.sampled_from([0, 0, 0, 0, 1, -1])), 0)]
    part = {"name": draw(st.sampled_from("ab")), "datatype": datatype, "shape": shape}
    form = draw(st.integers(0, 5))
    if form == 0:
        return {**part, "parameters": {"binary_data_size": draw(st.integers(0, 8))}}
    if form == 1:
        place = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
        return {**part, "parameters": place}
    return {**part, "data": [data] if form == 2 else data}


BODIES = st.fixed_dictionaries(
    {"inputs": st.lists(inputs(), max_size=3)},
    optional={
        "id": st.text(max_size=3),
        "parameters": st.dictionaries(
            st.sampled_from(["a", "priority", "sequence_id", "triton_x", "binary_data_output"]),
            st.integers(-1, 3) | st.booleans() | st.none() | st.text(max_size=2),
            max_size=2,
        ),
        "outputs": st.lists(st.fixed_dictionaries({"name": st.text(max_size=2)}), max_size=2),
    },
)


def outcome(read: Any, header: bytes, blobs: bytes) -> object:
    try:
        body = read(header, blobs, "m", no_region)
        for part in body.inputs:
            part.data = bytes(part.data)
        return body
    except ServeError as fault:
        return fault.kind, fault.message


@given(BODIES, st.binary(max_size=12))
def test_both_readers_agree(body: dict[str, Any], blobs: bytes) -> None:
    header = json.dumps(body).encode()
    compiled = partial(read_body, read_header(header))
    assert outcome(compiled, header, blobs) == outcome(read_plainly, header, blobs)


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


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [(b"", "identity"), (b"gzip, deflate, br", "gzip"), (b"deflate, gzip", "deflate"), (b"*", "identity"),
     (b"gzip;q=0.2, deflate;q=0.8", "deflate"), (b"gzip;q=0", "identity"), (b"br", "identity"),
     (b"gzip;q=0.5, identity", "identity"), (b"gzip;q=x", "identity")],
)  # fmt: skip
def test_choice_of_a_coding(accepted: bytes, coding: str) -> None:
    assert choose_coding(accepted) == coding
