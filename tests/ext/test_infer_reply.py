"""infer_reply against its oracle and captured responses."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.infer_reply import InferWriter, UnwritableCode, UnwritableOutput, write_infer, write_items
from fastserve.tensor import DTYPE_BY_KSERVE
from tests.effort import examples
from tests.oracles import infer_json as oracle

VECTORS = Path(__file__).parents[1] / "vectors" / "triton_v2_infer.jsonl"
CASES = [json.loads(line) for line in VECTORS.read_text().splitlines()]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def captured_bytes(case: dict[str, Any]) -> bytes | None:
    """The reply's JSON as it was on the wire; None for errors and for replies that are not whole."""
    expect = case["expect"]
    if expect["status"] != 200:
        return None
    length = int(expect.get("headers", {}).get("Inference-Header-Content-Length", 0)) or None
    if "body_b64" in expect:
        return base64.b64decode(expect["body_b64"])[:length]
    if "body_raw" in expect:
        return str(expect["body_raw"]).encode()[:length]
    if "body" not in expect:
        return None
    text = json.dumps(expect["body"], separators=(",", ":"), ensure_ascii=False)
    return text.replace("e+", "e").encode("utf-8", "surrogateescape")  # Python's exponents


def memory_of(leaves: list[Any], datatype: str) -> bytes:
    if datatype == "BYTES":
        raw = [one if isinstance(one, bytes) else one.encode("utf-8", "surrogateescape") for one in leaves]
        return b"".join(struct.pack("<I", len(one)) + one for one in raw)
    return np.array(leaves, oracle.DTYPES[datatype]).tobytes()


WIRE = [(case["id"], captured) for case in CASES if (captured := captured_bytes(case))]


@pytest.mark.parametrize(("case", "wire"), WIRE, ids=[case for case, _ in WIRE])
def test_captured(case: str, wire: bytes) -> None:
    reply = json.loads(wire.decode("utf-8", "surrogateescape"))
    outputs = [
        (
            one["name"],
            DTYPE_BY_KSERVE[one["datatype"]].code,
            one["shape"],
            memory_of(one["data"], one["datatype"]) if "data" in one else None,
            one.get("parameters"),
        )
        for one in reply["outputs"]
    ]
    got = write_infer(
        reply["model_name"],
        reply["model_version"],
        outputs,
        id=reply.get("id", ""),
        parameters=reply.get("parameters"),
    )
    assert got == wire


LEAVES = {
    "BOOL": st.booleans(),
    "FP32": st.floats(width=32),
    "FP64": st.floats(),
    "BYTES": st.one_of(st.binary(max_size=20), st.text(max_size=8).map(str.encode)),
    **{f"INT{w}": st.integers(-(2 ** (w - 1)), 2 ** (w - 1) - 1) for w in (8, 16, 32, 64)},
    **{f"UINT{w}": st.integers(0, 2**w - 1) for w in (8, 16, 32, 64)},
}
names = st.one_of(st.just("y"), st.text(st.characters(exclude_categories=["Cs"]), max_size=5))
scalars = st.one_of(st.booleans(), st.integers(-(2**63), 2**64), st.floats(), names)
parameters = st.one_of(st.none(), st.dictionaries(names, scalars, max_size=3))


@st.composite
def outputs(draw: st.DrawFn) -> Any:
    """An output for the oracle: (name, datatype, shape, leaves or None, parameters)."""
    datatype = draw(st.sampled_from([*LEAVES]))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = int(np.prod(shape))
    leaves = draw(st.one_of(st.none(), st.lists(LEAVES[datatype], min_size=count, max_size=count)))
    return draw(names), datatype, shape, leaves, draw(parameters)


def given_to_writer(output: Any) -> Any:
    name, datatype, shape, leaves, its_parameters = output
    memory = None if leaves is None else memory_of(leaves, datatype)
    return name, DTYPE_BY_KSERVE[datatype].code, tuple(shape), memory, its_parameters


@examples(150)
@given(names, st.lists(outputs(), max_size=3), names, parameters)
def test_agrees_with_oracle(model: str, found: list[Any], identity: str, its_parameters: Any) -> None:
    got = write_infer(model, "3", [given_to_writer(o) for o in found], id=identity, parameters=its_parameters)
    narrowed = [(n, d, s, as_stored(leaves, d), p) for n, d, s, leaves, p in found]
    assert got == oracle.write(model, "3", narrowed, identity, its_parameters)
    framed = write_infer(
        model, "3", [given_to_writer(o) for o in found], id=identity, parameters=its_parameters, head=HEAD
    )
    assert framed == HEAD + b"Content-Length: %d\r\n\r\n" % len(got) + got


@examples(100)
@given(outputs())
def test_items_are_what_stands_in_data(output: Any) -> None:
    _, code, shape, memory, _ = given_to_writer(output)
    if memory is not None:
        whole = write_infer("m", "3", [("y", code, shape, memory, None)])
        assert write_items(code, int(np.prod(shape)), memory) == whole.partition(b'"data":[')[2][:-4]


def as_stored(leaves: list[Any] | None, datatype: str) -> list[Any] | None:
    return list(np.array(leaves, "f4")) if leaves is not None and datatype == "FP32" else leaves


def check_floats(array: np.ndarray[Any, Any]) -> None:
    datatype = "FP32" if array.dtype == np.float32 else "FP64"
    got = write_infer("m", "1", [("y", DTYPE_BY_KSERVE[datatype].code, array.shape, array, None)])
    texts = got.partition(b'"data":[')[2][:-4].decode().split(",")
    assert texts == [oracle.float_text(float(value)) for value in array.ravel()]


@examples(150)
@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=100),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100),
)
def test_float_bits(wide: list[int], narrow: list[int]) -> None:
    check_floats(np.array(wide, "u8").view("f8"))
    check_floats(np.array(narrow, "u4").view("f4"))


def test_float_neighbourhoods() -> None:
    tens = np.array([m * 10.0**p for p in range(-12, 25) for m in (1, 1.5, 9.999999, 1.2345678901234567)])
    powers = 2.0 ** np.arange(-1074, 1024)
    wide = np.concatenate([tens, -tens, np.nextafter(tens, 0), np.nextafter(tens, np.inf), powers])
    check_floats(wide)
    with np.errstate(over="ignore"):
        check_floats(wide.astype("f4"))
    check_floats(np.random.default_rng(0).random(20_000, np.float32))


FORMS = st.sampled_from(["json", "json", "binary", "outside"])


@examples(150)
@given(names, st.lists(st.tuples(outputs(), FORMS), max_size=4), names, parameters)
def test_prepared_agrees_with_general(model: str, drawn: Any, identity: str, its_parameters: Any) -> None:
    given, prepared, memories, blobs = [], [], [], []
    for (name, datatype, shape, leaves, _), wish in drawn:
        form = "json" if datatype == "BYTES" and wish == "binary" else wish
        code = DTYPE_BY_KSERVE[datatype].code
        blank = bytes(int(np.prod(shape)) * (DTYPE_BY_KSERVE[datatype].item_bytes or 4))  # of empty strings
        memory = memory_of(leaves, datatype) if leaves is not None else blank
        size = {"binary_data_size": len(memory)} if form == "binary" else None
        given.append((name, code, tuple(shape), memory if form == "json" else None, size))
        prepared.append((name, code, tuple(shape), form))
        memories.append(memory)
        blobs.append(memory if form == "binary" else b"")
    text = write_infer(model, "1", given, id=identity, parameters=its_parameters)
    writer = InferWriter(model, "1", prepared, its_parameters)
    assert writer.write_body(memories, identity) == (len(text), text + b"".join(blobs))
    lines = b"Content-Length: %d\r\n\r\n" % len(text + b"".join(blobs))
    assert writer.binary == any(blobs)
    if writer.binary:
        lines = b"Inference-Header-Content-Length: %d\r\n" % len(text) + lines
    assert writer.write(memories, identity, HEAD) == HEAD + lines + text + b"".join(blobs)


def test_large_blobs() -> None:
    array = np.random.default_rng(0).standard_normal(400_000).astype(np.float32)
    writer = InferWriter("m", "1", [("y", 12, (400_000,), "binary"), ("z", 12, (2,), "json")])
    reply = writer.write([array, array[:2]], "", HEAD)
    head, _, body = reply.partition(b"\r\n\r\n")
    length = int(head.rpartition(b"Inference-Header-Content-Length: ")[2].split(b"\r")[0])
    assert f"Content-Length: {len(body)}".encode() in head
    assert body[length:] == array.tobytes()
    assert json.loads(body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 1_600_000}


def test_large_replies() -> None:
    array = np.random.default_rng(0).standard_normal(400_000).astype(np.float32)
    got = write_infer("m", "1", [("y", 12, (400, 1000), array, None)] * 2)
    reply = json.loads(got)
    assert len(got) > 4 << 20  # beyond what a thread keeps
    for one in reply["outputs"]:
        np.testing.assert_array_equal(np.array(one["data"], np.float32), array)


@pytest.mark.parametrize(
    ("datatype", "shape", "memory", "code"),
    [
        ("FP16", (1,), b"\0\0", UnwritableCode.UNSUPPORTED_DTYPE),
        ("BF16", (1,), b"\0\0", UnwritableCode.UNSUPPORTED_DTYPE),
        ("FP32", (2,), bytes(4), UnwritableCode.WRONG_SIZE),
        ("FP32", (2**40, 2**40), bytes(4), UnwritableCode.WRONG_SIZE),
        ("FP32", (-1,), bytes(4), UnwritableCode.WRONG_SIZE),
        ("BYTES", (2,), b"\1\0\0\0a", UnwritableCode.BAD_PACKING),
        ("BYTES", (1,), b"\2\0\0\0a", UnwritableCode.BAD_PACKING),
        ("BYTES", (1,), b"\1\0\0\0ab", UnwritableCode.BAD_PACKING),
    ],
)
def test_unwritable(datatype: str, shape: Any, memory: bytes, code: UnwritableCode) -> None:
    good = ("x", 12, (1,), bytes(4), None)
    with pytest.raises(UnwritableOutput) as caught:
        write_infer("m", "1", [good, ("y", DTYPE_BY_KSERVE[datatype].code, shape, memory, None)])
    assert (caught.value.code, caught.value.name, caught.value.datatype) == (code, "y", datatype)
    with pytest.raises(UnwritableOutput) as caught:
        write_items(DTYPE_BY_KSERVE[datatype].code, int(np.prod([float(size) for size in shape])), memory)
    assert (caught.value.code, caught.value.datatype) == (code, datatype)


def test_what_has_no_datatype() -> None:
    with pytest.raises(UnwritableOutput):
        write_infer("m", "1", [("y", 14, (1,), bytes(8), None)])
    for code, form in ((DTYPE_BY_KSERVE["FP16"].code, "json"), (DTYPE_BY_KSERVE["BYTES"].code, "binary")):
        with pytest.raises(UnwritableOutput):
            InferWriter("m", "1", [("y", code, (1,), form)])
    for form in ("json", "binary"):
        for memory in (bytes(4), bytes(12)):
            with pytest.raises(UnwritableOutput):
                InferWriter("m", "1", [("y", 12, (2,), form)]).write_body([memory])
    with pytest.raises(ValueError, match="1 outputs, not 2"):
        InferWriter("m", "1", [("y", 12, (2,), "json")]).write([bytes(8)] * 2)
    with pytest.raises(ValueError, match="at most 64"):
        InferWriter("m", "1", [("y", 12, (2,), "json")] * 65)
    with pytest.raises(TypeError, match="may not be"):
        write_infer("m", "1", [], parameters={"a": None})  # type: ignore[dict-item]
    body = write_infer("m", "1", [("y", DTYPE_BY_KSERVE["FP16"].code, (1,), None, {"binary_data_size": 2})])
    assert json.loads(body)["outputs"][0]["parameters"] == {"binary_data_size": 2}


def test_buffers_are_released() -> None:
    memory = bytearray(4)
    before = sys.getrefcount(memory)
    good = ("x", 12, (1,), memory, None)
    for other in (good, ("y", 12, (2,), memory, None), ("y", 12, (1,), 5, None)):
        with contextlib.suppress(UnwritableOutput, TypeError):
            write_infer("m", "1", [good, other])  # type: ignore[list-item]
    del other
    assert sys.getrefcount(memory) == before + 1
    memory.append(0)
