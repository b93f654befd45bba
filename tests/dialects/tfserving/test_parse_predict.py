"""Predict bodies: every vector by both readers, and the two readers against each other."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastserve.dialects.tfserving import predict
from fastserve.dialects.tfserving.json_body import read_document, read_tensors
from fastserve.dialects.tfserving.service import SignatureViews
from fastserve.errors import ServeError
from fastserve.net.router import CANONICAL_STATUS
from fastserve.repository.model_config import Signature, parse_model_config
from fastserve.repository.version import Version
from fastserve.tensor import DTYPES, DType, Tensor, TensorSpec
from tests.dialects.tfserving.deviations import is_deviation
from tests.dialects.tfserving.fakes import HALF_PLUS_TWO, to_array
from tests.dialects.tfserving.vectors import ALL, DTYPE_BY_TF_NAME, Vector, body_of, each, plain

WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def version_with(inputs: dict[str, str]) -> Version:
    """A version whose default signature takes these inputs (name -> dtype name)."""
    version = Version("m", 1, Path(), parse_model_config(HALF_PLUS_TWO))
    specs = {name: TensorSpec(name, DTYPES[dtype], None) for name, dtype in inputs.items()}
    names = {name: name for name in specs}
    version.signatures = {"serving_default": Signature("serving_default", "predict", specs, names, {}, {})}
    return version


def signatures_of(vector: Vector) -> SignatureViews:
    inputs = {name: DTYPE_BY_TF_NAME[dtype].name for name, dtype in vector["signature_inputs"].items()}
    return SignatureViews(version_with(inputs))


def dtypes_of(signatures: SignatureViews) -> dict[str, DType]:
    return {alias: spec.dtype for alias, spec in signatures.default.signature.inputs.items()}


def check(expected: dict[str, Any], columnar: bool, tensors: dict[str, Any]) -> None:
    assert columnar == (expected["format"] == "columnar")
    assert tensors.keys() == expected["tensors"].keys()
    for name, wanted in expected["tensors"].items():
        tensor = tensors[name]
        assert tensor.dtype is DTYPE_BY_TF_NAME[wanted["dtype"]]
        assert list(tensor.shape) == wanted["shape"]
        same_values(to_array(tensor).ravel().tolist(), wanted, tensor.dtype.name)


def same_values(got: list[Any], wanted: dict[str, Any], dtype: str) -> None:
    # Narrow integers wrap, and values past the shape are dropped, where the original turns its
    # message into a tensor (spec 2.3, 2.6).
    values = wanted["values"][: math.prod(wanted["shape"])]
    if dtype == "bytes":
        assert got == [value.encode() if isinstance(value, str) else plain(value) for value in values]
        return
    literal = np.int64 if dtype in ("int8", "uint8", "int16", "int32") else np.dtype(dtype)
    exact = np.array([WORDS.get(value, value) for value in values], dtype=literal).astype(dtype)
    np.testing.assert_array_equal(np.array(got, dtype=dtype), exact)
    np.testing.assert_array_equal(np.signbit(np.array(got, dtype=dtype)), np.signbit(exact))


@dataclass(frozen=True)
class Refusal:
    status: str
    http_status: int
    error: str


def outcome(read: Callable[[], Any]) -> Any:
    """Return the result of `read`, or the Refusal that it raises."""
    try:
        return read()
    except ServeError as fault:
        return Refusal(fault.kind.name, CANONICAL_STATUS[fault.kind], fault.message)


@each("parse_predict_request")
def test_vector(vector: Vector) -> None:
    expected = vector["expected"]
    got = outcome(lambda: predict.read_predict(signatures_of(vector), body_of(vector["input"])))
    if is_deviation(vector["id"]):
        assert got.http_status == 400
        assert got.error.startswith("JSON Parse error: Nesting too deep. at offset: ")
    elif expected["status"] == "OK":
        check(expected, got[1], got[2])
    elif "error_contains" in expected:
        assert (got.status, got.http_status) == (expected["status"], expected["http_status"])
        assert expected["error_contains"] in got.error
    else:
        assert got == Refusal(expected["status"], expected["http_status"], expected["error"])


GOOD = [v for v in ALL if v["kind"] == "parse_predict_request" and v["expected"]["status"] == "OK"]
BAD = [v for v in ALL if v["kind"] == "parse_predict_request" and v["expected"]["status"] != "OK"]


@pytest.mark.parametrize("vector", [pytest.param(v, id=v["id"]) for v in GOOD if not is_deviation(v["id"])])
def test_the_exact_reader_takes_what_is_good(vector: Vector) -> None:
    document = read_document(body_of(vector["input"]))
    check(vector["expected"], *read_tensors(document, dtypes_of(signatures_of(vector))))


@pytest.mark.parametrize("vector", [pytest.param(v, id=v["id"]) for v in BAD if not is_deviation(v["id"])])
def test_a_large_body_is_refused_in_short(vector: Vector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "EXPLAIN_BYTES", -1)
    body = body_of(vector["input"])
    got = outcome(lambda: predict.read_predict(signatures_of(vector), body))
    assert got.http_status == 400
    if "JSON Parse error" in vector["expected"]["error"] and body:
        assert got.error == vector["expected"]["error"]


class Token(str):
    """A JSON token as it stands in the text."""


NUMBERS = st.one_of(st.integers(-(2**65), 2**65).map(str), st.floats(width=32).map(lambda x: json.dumps(x)))
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        NUMBERS.map(Token),
        st.text(max_size=3),
        st.sampled_from([{"b64": "aGk="}, {"b64": "!"}, {"b64": None}]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["a", "b", "b64"]), inner, max_size=2)
    ),
    max_leaves=12,
)
DTYPE_NAMES = ["float32", "int32", "uint8", "int64", "bool", "bytes", "float16"]
INPUTS = st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(DTYPE_NAMES), min_size=1)


def text_of(value: Any) -> str:
    """JSON text of nested values and Tokens."""
    if isinstance(value, Token):
        return str(value)
    if isinstance(value, list):
        return "[" + ",".join(map(text_of, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f'"{key}":{text_of(item)}' for key, item in value.items()) + "}"
    return json.dumps(value)


@given(inputs=INPUTS, key=st.sampled_from(["instances", "inputs"]), value=VALUES)
@example(inputs={"a": "float16"}, key="inputs", value=[])
@example(inputs={"a": "bytes", "b": "bytes"}, key="instances", value=[{"b64": "aGk="}])
def test_both_readers_agree(inputs: dict[str, str], key: str, value: Any) -> None:
    body = f'{{"{key}": {text_of(value)}}}'.encode()
    signatures = SignatureViews(version_with(inputs))
    exact = outcome(lambda: read_tensors(read_document(body), dtypes_of(signatures)))
    got = outcome(lambda: predict.read_predict(signatures, body))
    if isinstance(exact, Refusal):
        assert got == exact
        return
    try:
        read = signatures.default.reader.read(body)
    except predict.JSONFault:
        read = None
    assert read is not None or "float16" in inputs.values()
    assert (got[1], contents(got[2])) == (exact[0], contents(exact[1]))


PIECES = [
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b":",
    b'"',
    b"\\",
    b"1",
    b"-0.5",
    b"NaN",
    b"null",
    b'{"b64":"aGk="}',
    b"\xff",
]
CUTS = st.tuples(st.floats(0, 1), st.integers(0, 4), st.sampled_from([b"", *PIECES]))


@given(vector=st.sampled_from([*GOOD, *BAD]), cuts=st.lists(CUTS, min_size=1, max_size=3))
@example(vector=BAD[0], cuts=[(0.0, 0, b'{"signature_name":"')])
def test_both_readers_agree_on_damaged_bodies(vector: Vector, cuts: list[tuple[float, int, bytes]]) -> None:
    body = bytearray(body_of(vector["input"]))
    for place, length, piece in cuts:
        at = int(place * len(body))
        body[at : at + length] = piece
    signatures = signatures_of(vector)
    try:
        read = signatures.default.reader.read(bytes(body))
    except predict.JSONFault:
        read = None
    exact = outcome(lambda: predict.read_plain(signatures, bytes(body)))
    assert (read is None) == isinstance(exact, Refusal)
    if read is not None:
        wanted = {name: (t.dtype.code, t.shape, bytes(t.data)) for name, t in exact[2].items()}
        assert {
            name: (code, shape, bytes(data)) for name, (code, shape, data) in read.tensors.items()
        } == wanted


def contents(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for name, tensor in tensors.items()}
