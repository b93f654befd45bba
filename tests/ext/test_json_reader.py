"""json_reader against its oracle and the vectors, through both ways in, and bodies meant to break it."""

from __future__ import annotations

import base64
import json
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.json_reader import Fault, JSONFault, PredictReader
from fastserve.tensor import DTYPES
from tests.effort import examples
from tests.ext.json_strategies import (
    at_edge,
    broken,
    listed,
    named,
    number_texts,
    string_texts,
    values,
)
from tests.oracles import json_reader as oracle
from tests.oracles import json_value

VECTORS = Path(__file__).parents[1] / "vectors" / "tfserving.jsonl"
CASES = [c for c in map(json.loads, VECTORS.read_text().splitlines()) if c["kind"] == "parse_predict_request"]
WORDS = {"DT_FLOAT": "float32", "DT_DOUBLE": "float64", "DT_STRING": "bytes", "DT_HALF": "float16"}


def reader_of(inputs: dict[str, str], **options: Any) -> PredictReader:
    codes = [(name, DTYPES[dtype].code) for name, dtype in inputs.items()]
    return PredictReader(codes, b"serving_default", **{"is_default": True, **options})


def ours(body: Any, inputs: dict[str, str]) -> Any:
    try:
        got = reader_of(inputs).read(body)
    except JSONFault as fault:
        return ("syntax", fault.offset) if fault.code < 32 else "meaning"
    return got.columnar, {name: (shape, memory) for name, (_, shape, memory) in got.tensors.items()}


def theirs(body: bytes, inputs: dict[str, str]) -> Any:
    try:
        return oracle.read(body, inputs)
    except json_value.Refused as fault:
        return "syntax", fault.offset
    except oracle.NotTensor:
        return "meaning"


def memory_of(values: list[Any], dtype: str) -> bytes:
    if dtype == "bytes":
        texts = [base64.b64decode(v["b64"]) if isinstance(v, dict) else v.encode() for v in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    numbers = [float(v) if isinstance(v, str) else v for v in values]
    wide = np.array(numbers, np.float64 if dtype.startswith("f") else object)
    return (
        np.array(
            wide if dtype.startswith("f") else [int(n) % 2**64 for n in numbers],
            "f8" if dtype.startswith("f") else "u8",
        )
        .astype(dtype)
        .tobytes()
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_vectors(case: dict[str, Any]) -> None:
    raw = case["input"]
    body = raw["body"].encode() if "body" in raw else base64.b64decode(raw["body_b64"])
    inputs = {name: WORDS.get(dtype, dtype[3:].lower()) for name, dtype in case["signature_inputs"].items()}
    got, expected = ours(body, inputs), case["expected"]
    if case["id"] == "pp-deep-nesting-ignored-key":
        assert got == ("syntax", 126)  # deeper than this server takes, on purpose
    elif expected["status"] != "OK":
        assert got == "meaning" or got[0] == "syntax"
    else:
        assert got[0] == (expected["format"] == "columnar")
        assert got[1].keys() == expected["tensors"].keys()
        for name, want in expected["tensors"].items():
            shape, memory = got[1][name]
            items = (
                want["values"][:1] if case["id"] == "pp-doc-12" else want["values"]
            )  # the decoder keeps one
            assert list(shape) == want["shape"]
            assert memory == memory_of(items, inputs[name])


INPUTS = st.sampled_from(
    [
        {"x": "float32"},
        {"x": "float64"},
        {"x": "int32"},
        {"x": "int64"},
        {"x": "uint64"},
        {"x": "uint8"},
        {"x": "bool"},
        {"x": "bytes"},
        {"x": "float16"},
        {"b64": "bytes"},
        {"x": "int32", "y": "bytes"},
        {},
    ]
)
tensor_texts = st.one_of(
    number_texts,
    listed(number_texts),
    listed(listed(number_texts)),
    listed(string_texts),
    listed(st.sampled_from(["1", "2", "3", "300", "-1", "1.0"])),
    listed(listed(st.just("1"))),
    listed(st.sampled_from(["true", "false"])),
    listed(st.sampled_from(['"a"', '{"b64": "aGk="}', '{"b64": "a G\\/"}', '{"b64": "aGk==="}'])),
    listed(named(st.sampled_from(["1", "[1, 2]", '"a"', '{"b64": ""}']), st.sampled_from(['"x"', '"y"']))),
    values,
)
KEYS = st.sampled_from(
    ['"instances"', '"instances"', '"inputs"', '"signature_name"', '"other"', r'"\u0069nputs"']
)
bodies = st.lists(
    st.tuples(KEYS, st.one_of(tensor_texts, st.just('"serving_default"'))), min_size=1, max_size=3
).map(lambda members: "{" + ", ".join(f"{key}: {value}" for key, value in members) + "}")


@examples(300)
@given(broken(st.one_of(bodies, values)), INPUTS)
def test_agrees_with_oracle(body: bytes, inputs: dict[str, str]) -> None:
    assert ours(body, inputs) == theirs(body, inputs)


@examples(200)
@given(broken(bodies), INPUTS)
def test_stays_inside(body: bytes, inputs: dict[str, str]) -> None:
    with at_edge(body) as view:
        assert ours(view, inputs) == ours(body, inputs)


FORMS = [
    '{"instances":%s}',
    '{"instances": %s , "signature_name":"serving_default"} tail',
    ' { "signature_name" : "serving_default", "instances" : %s}',
    '{"instances":%s,"more":1}',
    '{"signature_name":"other","instances":%s}',
    '\ufeff{"instances":%s',
]


@examples(200)
@given(
    st.sampled_from(FORMS),
    st.sampled_from(["float32", "float64", "int64", "int32", "uint32", "int8", "bool"]),
    st.lists(st.sampled_from([0, 1, 2, 3]), max_size=2).map(tuple),
    st.integers(0, 3),
    st.data(),
)
def test_read_into_agrees_with_read(
    form: str, dtype: str, row_shape: Any, rows: int, data: st.DataObject
) -> None:
    leaf = st.integers(-9, 300).map(str) if "int" in dtype else number_texts
    leaf = st.sampled_from(["true", "false", "1"]) if dtype == "bool" else leaf
    nested = np.array(
        data.draw(
            st.lists(leaf, min_size=rows * int(np.prod(row_shape)), max_size=rows * int(np.prod(row_shape)))
        ),
        object,
    )
    text = str(nested.reshape(rows, *row_shape).tolist()).replace("'", "")
    reader, body = reader_of({"x": dtype}), data.draw(broken(st.just(form % text)))
    out = bytearray(rows * int(np.prod(row_shape)) * DTYPES[dtype].item_bytes)
    with at_edge(body) as view:
        counted = reader.count_rows(view, int(np.prod(row_shape)))
        assert 0 <= counted <= len(body)
        if reader.read_into(view, out, row_shape, rows) != 0:
            return
    got = reader.read(body)
    assert not got.columnar
    assert got.tensors == {"x": (DTYPES[dtype].code, (rows, *row_shape), bytes(out))}


@pytest.mark.parametrize("form", FORMS[:3])
@pytest.mark.parametrize("shape", [(1, 4), (3, 784), (1000,), (2, 5, 7, 3), (20_000, 1)])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_common_forms_are_taken_by_read_into(
    form: str, shape: tuple[int, ...], separators: tuple[str, str]
) -> None:
    array = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    body = (form % json.dumps(array.tolist(), separators=separators)).encode()
    out = np.zeros_like(array)
    reader = reader_of({"x": "float32"})
    assert reader.count_rows(body, array[0].size) == len(array)
    assert reader.read_into(body, out, shape[1:], len(array)) == 0
    np.testing.assert_array_equal(out, array)


@examples(300)
@given(
    st.one_of(number_texts, st.floats(width=32, allow_nan=False).map(repr)),
    st.sampled_from(["float32", "float64", "int64", "int32"]),
)
def test_hurried_numbers_agree_with_careful_ones(text: str, dtype: str) -> None:
    def item(body: str) -> Any:
        out = bytearray(2 * DTYPES[dtype].item_bytes)
        fault = reader_of({"x": dtype}).read_into(body.encode(), out, (), 2)
        return fault or bytes(out)

    careful = item(f'{{"instances":[{text},1]}}')
    hurried = item(f'{{"instances":[{text},1]}}{" " * 100}')
    assert hurried == careful
    if dtype.startswith("float") and isinstance(careful, bytes):
        with np.errstate(over="ignore"):
            want = np.array([float(text), 1.0]).astype(dtype) if "I" not in text and "N" not in text else None
        assert want is None or text == "-0" or want.tobytes() == careful


NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)


DECIMALS = st.one_of(
    st.tuples(
        st.sampled_from(["", "-"]),
        st.one_of(st.just("0"), st.integers(1, 10**17).map(str)),
        st.one_of(st.just(""), st.text("0123456789", min_size=1, max_size=22).map(lambda d: "." + d)),
    ).map("".join),
    number_texts,
).filter(lambda text: text != "-0" and NUMBER.fullmatch(text) is not None)


@examples(200)
@given(
    st.lists(DECIMALS, min_size=2, max_size=40),
    st.sampled_from([",", ", ", " ,\n"]),
    st.sampled_from(["float32", "float64"]),
)
def test_runs_of_numbers_are_the_nearest_floats(texts: list[str], comma: str, dtype: str) -> None:
    with np.errstate(over="ignore"):
        want = np.array([float(text) for text in texts]).astype(dtype)
    out = np.zeros_like(want)
    body = f'{{"instances":[{comma.join(texts)}]}}{" " * 100}'.encode()
    fault = reader_of({"x": dtype}).read_into(body, out, (), len(texts))
    if np.isfinite([float(text) for text in texts]).all():
        assert fault == 0
        assert out.tobytes() == want.tobytes()
    else:
        assert fault


def test_numbers_beside_the_middle_of_two_floats_are_rounded_once() -> None:
    draw = np.random.default_rng(0)
    below = draw.integers(100 << 23, 150 << 23, 4000, np.uint32)  # from 2**-27 up
    ends = [bits.view(np.float32).astype(np.float64) for bits in (below, below + 1)]
    offs = np.where(np.arange(4000) % 2, draw.integers(-3, 4, 4000), draw.integers(-(1 << 18), 1 << 18, 4000))
    doubles = (((ends[0] + ends[1]) / 2).view(np.int64) + offs).view(np.float64)
    texts = [np.format_float_positional(double, trim="0") for double in doubles.tolist()]
    out = np.zeros(4000, np.float32)
    body = f'{{"instances":[{",".join(texts)}]}}'.encode()
    assert reader_of({"x": "float32"}).read_into(body, out, (), 4000) == 0
    np.testing.assert_array_equal(out, np.array([float(text) for text in texts]).astype(np.float32))


def test_every_cut_is_refused() -> None:
    body = b'{"signature_name": "serving_default", "instances": [{"x": [1.5, -2e3], "y": "a\\u00e9"}]}'
    inputs = {"x": "float32", "y": "bytes"}
    assert isinstance(ours(body, inputs)[1], dict)
    for length in range(len(body)):
        with at_edge(body[:length]) as view:
            assert ours(view, inputs)[0] == "syntax"


def test_other_signature_is_named() -> None:
    reader = reader_of({"x": "float32"})
    with pytest.raises(JSONFault) as caught:
        reader.read(b'{"instances": ["text"], "signature_name": "\\u0061b"}')
    assert (caught.value.code, caught.value.signature) == (Fault.OTHER_SIGNATURE, b"ab")
    named_reader = reader_of({"x": "float32"}, is_default=False)
    with pytest.raises(JSONFault) as caught:
        named_reader.read(b'{"instances": [1]}')
    assert (caught.value.code, caught.value.signature) == (Fault.OTHER_SIGNATURE, None)
    assert named_reader.read_into(b'{"instances": [1]}', bytearray(4), (), 1) == Fault.OTHER_FORM
    assert reader.read(b'{"inputs": 1, "signature_name": ""}').signature == b""


@pytest.mark.parametrize(
    "head", [b"[", b'{"a":', b'{"instances":', b'{"inputs":[', b'{"instances":[{"x":', b'{"z":']
)
def test_depth(head: bytes) -> None:
    reader = reader_of({"x": "float32"})
    for body in (head + b"[" * 500_000, head + b'{"a":' * 500_000, head + b"[" * 100):
        start = time.thread_time()
        with pytest.raises(JSONFault) as caught:
            reader.read(body)
        assert caught.value.code == Fault.TOO_DEEP
        assert time.thread_time() - start < 0.1
    deep = b'{"instances":' + b"[" * 99 + b"1" + b"]" * 99 + b"}"
    assert reader.read(deep).tensors["x"][1] == (1,) * 99


@pytest.mark.parametrize(
    "text", [b"1" * 10**6, b"0." + b"3" * 10**6, b"1e400", b"0." + b"0" * 10**6 + b"1e1000001"]
)
def test_long_numbers(text: bytes) -> None:
    start = time.thread_time()
    got = ours(b'{"instances":[' + text + b"]}", {"x": "float64"})
    assert got == (("syntax", 14) if text.startswith(b"1") else got)
    assert ours(b'{"skip":[' + text + b"]}", {"x": "float64"}) == (
        ("syntax", 9) if text.startswith(b"1") else "meaning"
    )
    assert time.thread_time() - start < 0.5


def test_wrong_buffer_is_a_programming_error() -> None:
    reader = reader_of({"x": "float32"})
    with pytest.raises(ValueError, match="need 8 bytes"):
        reader.read_into(b'{"instances":[1,2]}', bytearray(7), (), 2)
    with pytest.raises(ValueError, match="max_depth"):
        reader_of({"x": "float32"}, max_depth=0)
    assert reader.read_into(b'{"instances":[]}', bytearray(0), (), 0) == Fault.OTHER_FORM
    assert reader.count_rows(b'{"instances":[]}', 0) == 0


def test_memory_is_bounded() -> None:
    script = (
        "import resource; from fastserve._ext.json_reader import PredictReader\n"
        "body = b'{\"instances\":[' + b'1,' * 8_000_000 + b'1]}'\n"
        "reader = PredictReader([('x', 13)], b's', is_default=True)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "got = reader.read(body)\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "assert grown * 1024 < 10 * len(body), grown"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


MEMBERS = [
    '{"x":%s}',
    ' { "x" : %s } ',
    '\ufeff{"x":%s}\n',
    '{"x":%s,"y":1}',
    '{"x":%s,"x":%s}',
    '{"x":%s}}',
    '{"x":%s},"y":1',
    '{"y":%s}',
    '{"x":%s',
    "[%s]",
]
NUMBERS = {"float32": (int, float), "int64": (int,)}


def object_of(text: bytes, names: set[str]) -> dict[str, Any] | None:
    """The twin of `read_inputs`: the members, once each, of a body that is one object of these names."""
    try:
        pairs = json.loads(text.decode("utf-8-sig"), object_pairs_hook=list)
    except (ValueError, RecursionError):
        return None
    named = isinstance(pairs, list) and bool(pairs) and all(isinstance(pair, tuple) for pair in pairs)
    return dict(pairs) if named and sorted(name for name, _ in pairs) == sorted(names) else None


@examples(300)
@given(
    st.sampled_from(MEMBERS),
    st.sampled_from(["float32", "int64"]),
    st.lists(st.sampled_from([0, 1, 2, 3]), max_size=2).map(tuple),
    st.lists(st.sampled_from([0, 1, 2, 3]), max_size=3).map(tuple),
    st.data(),
)
def test_members_alone_agree_with_the_twin(
    form: str, dtype: str, row_shape: Any, shape: Any, data: st.DataObject
) -> None:
    array = np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
    text = form.replace("%s", json.dumps(array.tolist()))
    body = data.draw(broken(st.just(text)))
    reader, twin = reader_of({"x": dtype}), object_of(body, {"x"})
    with at_edge(body) as view:
        try:
            (_, got_shape, memory) = reader.read_inputs(view).tensors["x"]
        except JSONFault:
            assert twin is None or not is_tensor(twin["x"], dtype)
            got_shape, memory = None, b""
        else:
            assert twin is not None
            made = np.array(twin["x"], dtype)
            assert (got_shape, memory) == (made.shape, made.tobytes())
        rows = reader.count_member(view, row_shape)
        assert -1 <= rows <= len(body)
        if rows == 0:
            return
        whole = row_shape if rows < 0 else (rows, *row_shape)
        out = bytearray(int(np.prod(whole)) * DTYPES[dtype].item_bytes)
        if reader.read_member(view, out, row_shape, rows) == 0:
            assert (got_shape, memory) == (whole, bytes(out))


def is_tensor(value: Any, dtype: str) -> bool:
    try:
        made = np.array(value, object)
    except ValueError:
        return False
    return bool(made.size == 0 or all(type(item) in NUMBERS[dtype] for item in made.reshape(-1)))


@pytest.mark.parametrize("form", MEMBERS[:3])
@pytest.mark.parametrize("shape", [(1, 4), (3, 784), (1000,), (2, 5, 7, 3)])
def test_common_members_are_taken_by_read_member(form: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    body = (form % json.dumps(array.tolist())).encode()
    out, reader = np.zeros_like(array), reader_of({"x": "float32"})
    assert reader.count_member(body, shape[1:]) == shape[0]
    assert reader.read_member(body, out, shape[1:], shape[0]) == 0
    np.testing.assert_array_equal(out, array)
    out[:] = 0
    assert reader.count_member(body, shape) == -1
    assert reader.read_member(body, out, shape, -1) == 0
    np.testing.assert_array_equal(out, array)


def test_two_inputs_are_read_by_name_once_each() -> None:
    reader = reader_of({"x": "int32", "y": "bytes"})
    got = reader.read_inputs(b'{"y": ["a"], "x": [1]}').tensors
    assert (got["x"][1], got["y"][1]) == ((1,), (1,))
    for body in (b'{"x":[1]}', b'{"x":[1],"y":["a"],"x":[1]}', b'{"x":[1],"y":["a"]}{}', b"", b"[]"):
        with pytest.raises(JSONFault):
            reader.read_inputs(body)
