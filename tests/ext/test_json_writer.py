"""The compiled writer against recorded replies of the original and against the plain oracle."""

from __future__ import annotations

import base64
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fastserve._ext import json_writer as writer
from fastserve._ext.json_writer import (
    MODE_SHORTEST,
    MODE_TFS,
    RowWriter,
    WriterCode,
    WriterFault,
    write_classifications,
    write_error,
    write_outputs,
    write_predictions,
    write_regressions,
    write_string,
    write_values,
)
from fastserve.tensor import DTYPES
from tests.oracles import json_writer as oracle

VECTORS = [
    json.loads(text)
    for text in (Path(__file__).parent.parent / "vectors" / "json_writer.jsonl").read_text().splitlines()
]
NUMPY_OF = {
    "DT_BOOL": "bool", "DT_UINT8": "uint8", "DT_INT32": "int32", "DT_INT64": "int64", "DT_UINT64": "uint64",
    "DT_FLOAT": "float32", "DT_DOUBLE": "float64", "DT_HALF": "float16", "DT_COMPLEX64": "complex64",
}  # fmt: skip
WRITABLE = ["bool", "uint8", "uint32", "uint64", "int8", "int16", "int32", "int64", "float32", "float64"]
ERRORS = {
    WriterCode.NO_OUTPUTS: "Cannot convert empty tensor map to JSON",
    WriterCode.NO_RESULTS: "Cannot convert empty RegressionResults to JSON",
    WriterCode.NO_LEADING_DIMENSION: "Tensor name: {name} has no shape information ",
    WriterCode.UNSUPPORTED_DTYPE: "Failed to write JSON value for tensor type: {dtype}",
}


def pack(items: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(item)) + item for item in items)


def output(name: str, array: np.ndarray[Any, Any]) -> tuple[str, int, tuple[int, ...], bytes]:
    if array.dtype == object:
        return name, DTYPES["bytes"].code, array.shape, pack(list(array.ravel()))
    return name, DTYPES[array.dtype.name].code, array.shape, np.ascontiguousarray(array).tobytes()


def recorded_output(name: str, tensor: dict[str, Any]) -> tuple[str, int, tuple[int, ...], bytes]:
    shape, values = tensor["shape"], tensor.get("values")
    if tensor["dtype"] == "DT_STRING":
        items = [base64.b64decode(v["b64"]) if isinstance(v, dict) else v.encode() for v in values]
        return name, DTYPES["bytes"].code, tuple(shape), pack(items)
    dtype = NUMPY_OF[tensor["dtype"]]
    array = np.zeros(shape, dtype) if values is None else np.array(values, dtype).reshape(shape)
    return output(name, array)


def write_recorded(vector: dict[str, Any]) -> bytes:
    kind, given_ = vector["kind"], vector["input"]
    if kind == "make_json_from_tensors":
        write = write_predictions if vector["format"] == "row" else write_outputs
        return write([recorded_output(name, tensor) for name, tensor in given_.items()])
    if kind == "make_json_from_classification":
        labels = pack([label.encode() for row in given_ for label, _ in row])
        scores = np.array([[score for _, score in row] for row in given_], object)
        missing = scores[0, 0] is None
        return write_classifications(
            *scores.shape, labels, None if missing else scores.astype("float32").tobytes()
        )
    if kind == "make_json_from_regression":
        return write_regressions(np.array([float(value) for value in given_], "float32").tobytes())
    if kind == "make_json_from_status":
        return write_error(given_["message"].encode())
    bits = bytes.fromhex(given_["bits_hex"])[::-1]
    return write_values(bits, DTYPES["float32" if len(bits) == 4 else "float64"].code, ())


@pytest.mark.parametrize("vector", [pytest.param(v, id=v["id"]) for v in VECTORS])
def test_recorded(vector: dict[str, Any]) -> None:
    expected = vector["expected"]
    if "error" in expected:
        with pytest.raises(WriterFault) as caught:
            write_recorded(vector)
        fault = caught.value
        dtype = {10: "half", 14: "complex64"}.get(fault.got)
        assert ERRORS[fault.code].format(name=fault.name, dtype=dtype) == expected["error"]
        return
    body = base64.b64decode(expected["body_b64"]) if "body_b64" in expected else None
    assert write_recorded(vector) == (body or expected.get("body", expected.get("text")).encode())


# ---- floats ------------------------------------------------------------------------------------

EDGES32 = [0, 1, 2, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x3C23D70A, 0x4B800000]


def check_floats(bits: Any, width: int) -> None:
    values = np.array(bits, f"u{width}").view(f"f{width}")
    code = DTYPES[f"float{width * 8}"].code
    for mode, text_of in ((MODE_TFS, oracle.tfs_float), (MODE_SHORTEST, oracle.shortest_float)):
        got = write_values(values, code, values.shape, mode).decode()[1:-1].split(", ")
        wrong = [(t, text_of(v)) for t, v in zip(got, values, strict=True) if t != text_of(v)]
        assert not wrong


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_float32_bits(bits: list[int]) -> None:
    check_floats(bits, 4)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=200))
def test_float64_bits(bits: list[int]) -> None:
    check_floats(bits, 8)


@given(st.lists(st.floats(width=32), min_size=1), st.lists(st.floats(), min_size=1))
def test_floats_that_people_write(narrow: list[float], wide: list[float]) -> None:
    check_floats(np.array(narrow, "f4").view("u4"), 4)
    check_floats(np.array(wide, "f8").view("u8"), 8)


@given(st.lists(st.decimals(-10000, 10000, places=4), min_size=1))
def test_decimals(values: list[Any]) -> None:
    check_floats(np.array(values, "f4").view("u4"), 4)
    check_floats(np.array(values, "f8").view("u8"), 8)


def test_float_neighbourhoods() -> None:
    # Where the number of digits, the power of ten or the size of the interval changes.
    around = np.arange(-3, 4)
    edges = np.concatenate(
        [np.arange(1, 255) << 23, EDGES32, np.array([10.0**k for k in range(-38, 39)], "f4").view("u4")]
    )
    check_floats(np.unique((edges[:, None] + around).clip(0).astype("u4")), 4)
    tens = np.array([10.0**k for k in range(-307, 309)]).view("i8")
    edges = np.concatenate([np.arange(0, 2047, dtype="i8") << 52, tens])
    check_floats(np.unique((edges[:, None] + around).clip(0).astype("u8")), 8)


def test_float32_ties_and_samples() -> None:
    # Multiples of 1/4096 end exactly halfway between two ninth digits.
    check_floats((np.arange(4096, dtype="f4") / 4096).view("u4"), 4)
    check_floats((np.arange(4096, dtype="f4") / 128).astype("f8").view("u8"), 8)
    step = int(os.environ.get("FASTSERVE_FLOAT_STEP", "1000003"))  # 1 tries every float32 there is
    for start in range(0, 2**32, step * 4096):
        check_floats(np.arange(start, min(start + step * 4096, 2**32), step, dtype="u8").astype("u4"), 4)


@pytest.mark.parametrize(
    ("name", "bits"), [("float16", [0x3C00, 0x2E66, 1]), ("bfloat16", [0x3F80, 0x3DCD, 1])]
)
def test_sixteen_bit_floats_are_written_as_float32(name: str, bits: list[int]) -> None:
    words = np.array(bits, "u2")
    wide = words.view("f2").astype("f4") if name == "float16" else (words.astype("u4") << 16).view("f4")
    for mode in (MODE_TFS, MODE_SHORTEST):
        got = write_values(words, DTYPES[name].code, words.shape, mode)
        assert got == write_values(wide, DTYPES["float32"].code, wide.shape, mode)


# ---- layouts -----------------------------------------------------------------------------------

NAMES = st.text(max_size=6) | st.sampled_from(["y_bytes", 'a"b', "é\n"])


@st.composite
def arrays(draw: st.DrawFn, leading: int | None = None) -> np.ndarray[Any, Any]:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    if leading is not None:
        shape = (leading, *shape)
    dtype = draw(st.sampled_from([*WRITABLE, "object"]))
    if dtype != "object":
        return draw(hnp.arrays(dtype, shape))
    array = np.empty(shape, object)
    for index in np.ndindex(shape):
        array[index] = draw(st.binary(max_size=9))
    return array


@given(st.data(), st.integers(0, 3), st.sampled_from([MODE_TFS, MODE_SHORTEST]))
def test_predictions(data: st.DataObject, rows: int, mode: int) -> None:
    outputs = data.draw(st.lists(st.tuples(NAMES, arrays(rows)), min_size=1, max_size=3))
    assert write_predictions([output(*o) for o in outputs], mode) == oracle.predictions(outputs, mode)


@given(
    st.lists(st.tuples(NAMES, arrays()), min_size=1, max_size=3), st.sampled_from([MODE_TFS, MODE_SHORTEST])
)
def test_outputs(outputs: list[Any], mode: int) -> None:
    assert write_outputs([output(*o) for o in outputs], mode) == oracle.columns(outputs, mode)


@given(arrays(), st.booleans(), st.sampled_from([MODE_TFS, MODE_SHORTEST]))
def test_values(array: np.ndarray[Any, Any], as_bytes: bool, mode: int) -> None:
    _, code, shape, memory = output("", array)
    got = write_values(memory, code, shape, mode, as_bytes=as_bytes)
    assert got == oracle.line(array, mode, as_bytes, None).encode("latin-1")


@given(arrays(3), st.sampled_from(["y", "y_bytes"]), st.sampled_from([MODE_TFS, MODE_SHORTEST]))
def test_row_writer(array: np.ndarray[Any, Any], name: str, mode: int) -> None:
    _, code, shape, memory = output(name, array)
    rows = RowWriter(name, code, shape[1:], mode)
    body = oracle.predictions([(name, array)], mode)
    assert rows.write(memory, 3) == body
    assert rows.write(memory, 3, b"H\r\n") == b"H\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    for several, whole in ((rows, 3), (RowWriter(name, code, shape, mode), -1)):
        bare = several.write_bare(memory, whole)
        assert bare == write_values(memory, code, shape, mode, as_bytes=name.endswith("_bytes"))
        framed = b"H\r\nContent-Length: %d\r\n\r\n%b" % (len(bare), bare)
        assert several.write_bare(memory, whole, b"H\r\n") == framed


@pytest.mark.parametrize("count", [0, 1, 4, 50, 70, 90, 100, 900, 1000, 1400, 50_000])
def test_row_writer_frames_every_size(count: int) -> None:
    array = np.random.default_rng(count).random(count, np.float32)
    rows = RowWriter("y", DTYPES["float32"].code, (), MODE_TFS)
    body = rows.write(array, count)
    assert body == write_predictions([output("y", array)])
    assert json.loads(body)["predictions"] == [float(oracle.tfs_float(v)) for v in array]
    assert (
        rows.write(array, count, b"x" * 100) == b"x" * 100 + b"Content-Length: %d\r\n\r\n" % len(body) + body
    )


@given(st.binary(max_size=70))
def test_string(data: bytes) -> None:
    assert write_string(data) == oracle.escaped(data).encode("latin-1")


def test_results_under_both_keys() -> None:
    body = write_classifications(2, 1, pack([b"a", b"b"]), None, ("results", "result"))
    value = b'[[["a", 0.0]], [["b", 0.0]]\n    ]'
    assert body == b'{\n    "results": %b,\n    "result": %b\n}' % (value, value)
    assert write_classifications(1, 0, None, None) == b'{\n    "results": [[]\n    ]\n}'
    both = write_regressions(np.float32([1]), ("results", "result"))
    assert both == b'{\n    "results": [1.0],\n    "result": [1.0]\n}'


# ---- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "code", "name", "numbers"),
    [
        ([], WriterCode.NO_OUTPUTS, "", (0, 0)),
        ([("a", 12, (), bytes(4))], WriterCode.NO_LEADING_DIMENSION, "a", (0, 0)),
        ([("a", 12, (2,), bytes(8)), ("b", 12, (3,), bytes(12))], WriterCode.UNEQUAL_ROWS, "b", (3, 2)),
        ([("a", 12, (2,), bytes(8)), ("b", 10, (2,), bytes(4))], WriterCode.UNSUPPORTED_DTYPE, "b", (10, 0)),
        ([("a", 11, (2,), bytes(4))], WriterCode.UNSUPPORTED_DTYPE, "a", (11, 0)),
        ([("a", 3, (2,), bytes(4))], WriterCode.UNSUPPORTED_DTYPE, "a", (3, 0)),
        ([("a", 14, (2,), bytes(16))], WriterCode.UNSUPPORTED_DTYPE, "a", (14, 0)),
        ([("a", 99, (2,), bytes(16))], WriterCode.UNSUPPORTED_DTYPE, "a", (0, 0)),
        ([("a", 12, (2,), bytes(7))], WriterCode.WRONG_SIZE, "a", (12, 0)),
        ([("a", 12, (2,), bytes(12))], WriterCode.WRONG_SIZE, "a", (12, 0)),
        ([("a", 12, (-2,), bytes(8))], WriterCode.WRONG_SIZE, "a", (-2, 0)),
        ([("a", 16, (1,), bytes(3))], WriterCode.BAD_PACKING, "a", (16, 0)),
        ([("a", 16, (1,), b"\5\0\0\0abcd")], WriterCode.BAD_PACKING, "a", (16, 0)),
        ([("a", 16, (1,), b"\3\0\0\0abcd")], WriterCode.BAD_PACKING, "a", (16, 0)),
        ([("a", 12, (2**40, 2**40), b"")], WriterCode.TOO_LARGE, "a", (12, 0)),
        ([("a", 12, (2**61, 1, 0), b"")], WriterCode.TOO_LARGE, "a", (12, 0)),
        ([("a", 12, (1,) * 65, bytes(4))], WriterCode.TOO_LARGE, "a", (65, 64)),
    ],
)
def test_faults(outputs: list[Any], code: WriterCode, name: str, numbers: tuple[int, int]) -> None:
    with pytest.raises(WriterFault) as caught:
        write_predictions(outputs)
    assert (caught.value.code, caught.value.name) == (code, name)
    assert (caught.value.got, caught.value.expected) == numbers


def test_a_dtype_without_elements_is_no_fault() -> None:
    assert write_outputs([("a", 10, (0,), b"")]) == b'{\n    "outputs": []\n}'
    assert write_outputs([("a", 12, (1,) * 64, bytes(4))]).count(b"[") == 64


@pytest.mark.parametrize("rows", [-1, 0, 2, 2**62])
def test_row_writer_refuses_other_sizes(rows: int) -> None:
    with pytest.raises(WriterFault):
        RowWriter("y", DTYPES["float32"].code, (3,)).write(bytes(12), rows)
    if rows >= 0:
        with pytest.raises(WriterFault):
            RowWriter("y", DTYPES["float32"].code, (3,)).write_bare(bytes(12), rows)


def test_row_writer_refuses_an_axis_too_many() -> None:
    assert RowWriter("y", 12, (1,) * 63).write_bare(bytes(4), 1).count(b"[") == 64
    with pytest.raises(WriterFault):
        RowWriter("y", 12, (1,) * 64).write_bare(bytes(4), 1)


def test_results_need_rows() -> None:
    for write in (lambda: write_regressions(b""), lambda: write_classifications(0, 3, None, None)):
        with pytest.raises(WriterFault) as caught:
            write()
        assert caught.value.code == WriterCode.NO_RESULTS
    with pytest.raises(WriterFault):
        write_classifications(2, 2, None, bytes(12))


def test_buffers_are_released() -> None:
    memory = bytearray(12)
    write_predictions([("y", 12, (3,), memory)])
    RowWriter("y", 12, (3,)).write(memory, 1)
    with pytest.raises(WriterFault):
        write_predictions([("y", 12, (3,), memory), ("z", 12, (), memory)])
    memory.append(0)  # BufferError if anything still held it


def test_constants() -> None:
    assert (writer.MODE_TFS, writer.MODE_SHORTEST) == (0, 1)
