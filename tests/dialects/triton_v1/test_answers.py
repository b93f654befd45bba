"""The V1 dialect's parts by themselves: headers, texts, classes, words."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from fastserve.dialects.triton_v1.request import InputHeader, RequestHeader, check_strings, read_header
from fastserve.dialects.triton_v1.service import ClassOutput, RawOutput, ResponseHeader, v1_error, write_id
from fastserve.errors import ConfigError, Kind, Reason, ServeError
from fastserve.protos import load
from fastserve.protos.text import print_float, print_line, print_lines
from fastserve.repository.model_config import ModelConfig
from fastserve.repository.version import Version
from fastserve.serving.client_shared_memory import Range
from fastserve.serving.model_view import Class
from fastserve.serving.slow_path import BodyTensors

V1 = load("triton_v1")
FRONT = 'batch_size: 2 input { name: "x" dims: 3 dims: -1 } output { name: "y" cls { count: 2 } }'


def test_a_header_with_every_field() -> None:
    header = read_header(
        'batch_size: 3 input { name: "x" batch_byte_size: 12 '
        'shared_memory { name: "r" offset: 4 byte_size: 12 } } '
        'output { name: "y" } correlation_id: 18446744073709551615 id: 5 flags: 3 priority: 2 '
        "timeout_microseconds: 77"
    )
    assert header.inputs == (InputHeader("x", (), 12, Range("r", 4, 12)),)
    assert (header.correlation_id, header.id, header.flags) == (2**64 - 1, 5, 3)
    assert (header.priority, header.timeout_us) == (2, 77)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.integers(0, 2**32 - 1)
            for name in ("correlation_id", "id", "flags", "priority", "timeout_microseconds")
        },
    )
)
def test_remembered_headers_read_as_protobuf_reads_them(scalars: dict[str, int]) -> None:
    text = " ".join([FRONT, *(f"{name}: {value}" for name, value in scalars.items())])
    message = text_format.Parse(text, V1.InferRequestHeader())
    header = read_header(text)
    assert (header.batch_size, header.inputs[0].dims, header.outputs[0].classes) == (2, (3, -1), 2)
    assert header == RequestHeader(
        2, header.inputs, header.outputs, message.correlation_id, message.id, message.flags, message.priority,
        message.timeout_microseconds,
    )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "batch_size",
        "batch_size: -1",
        "who: 1",
        FRONT + " id: 1 id: 2",
        "id: 3 " + FRONT + " id: 4",
        'input { name: "x',
    ],
)
def test_a_broken_header_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_header(text)


@given(
    st.text(),
    st.floats(width=32, allow_nan=False),
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(-(2**63), 2**63 - 1)),
)
def test_texts_read_back(name: str, value: float, number: int, dims: list[int]) -> None:
    message = V1.InferResponseHeader(model_name=name.encode("utf-8", "replace").decode(), id=number)
    output = message.output.add(name="o")
    output.raw.dims.extend(dims)
    output.batch_classes.add().cls.add(idx=1, value=value)
    for text in (print_line(message), print_lines(message)):
        back = text_format.Parse(text, V1.InferResponseHeader())
        assert back.SerializeToString(deterministic=True) == message.SerializeToString(deterministic=True)


def test_floats_as_the_original_prints_them() -> None:
    found = [
        print_float(v)
        for v in (16.0, 0.5, 1e20, float("-inf"), float("nan"), struct.unpack("f", struct.pack("f", 0.1))[0])
    ]
    assert found == ["16", "0.5", "1e+20", "-inf", "nan", "0.1"]


@given(st.integers(0, 2**64 - 1))
def test_an_id_is_the_last_field(number: int) -> None:
    assert V1.InferResponseHeader.FromString(write_id(number)).id == number


@pytest.mark.parametrize("raw", [b"", b"\1\0\0\0", b"\0\0\0\0" * 3, b"\xff\xff\xff\xffab"])
def test_strings_that_lie(raw: bytes) -> None:
    with pytest.raises(ServeError, match="are not the strings"):
        check_strings(raw, (2,), "x", "m")


def test_a_body_of_the_wrong_length() -> None:
    body = BodyTensors(b"12345", "m")
    assert bytes(body.take("a", 4)) == b"1234"
    with pytest.raises(ServeError, match="unexpected size for input 'b', expecting 3 bytes"):
        body.take("b", 4)
    with pytest.raises(ServeError, match="unexpected additional input data"):
        BodyTensors(b"1", "m").finish()


def test_the_originals_words() -> None:
    full = v1_error(ServeError(Kind.UNAVAILABLE, "full", retry_after_s=1.0, reason=Reason.QUEUE_FULL))
    assert full.message == "Exceeds maximum queue size"
    died = v1_error(ServeError(Kind.UNAVAILABLE, "a worker died", retry_after_s=1.0))
    assert died.message == "a worker died"
    text = "inference request to model 'seq' must specify a non-zero or non-empty correlation ID"
    told = v1_error(ServeError(Kind.INVALID_ARGUMENT, text))
    assert told.message == "inference request to model 'seq' must specify a non-zero correlation ID"


@given(
    st.lists(st.one_of(
        st.builds(RawOutput, st.text(), st.lists(st.integers(0, 2**40)).map(tuple),
                  st.integers(0, 2**64 - 1)),
        st.builds(ClassOutput, st.text(), st.lists(st.lists(st.builds(
            Class, st.integers(0, 2**31 - 1), st.floats(width=32, allow_nan=False), st.text())))),
    )),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_the_three_forms_say_the_same(told: list[RawOutput | ClassOutput], batch_size: int) -> None:
    def clean(text: str) -> str:
        return text.encode("utf-8", "replace").decode()

    told = [replace(one, name=clean(one.name)) for one in told]
    for one in told:
        if isinstance(one, ClassOutput):
            one.rows[:] = [[c._replace(label=clean(c.label)) for c in row] for row in one.rows]
    wanted = V1.InferResponseHeader(model_name="m", model_version=3, batch_size=batch_size)
    for one in told:
        output = wanted.output.add(name=one.name)
        if isinstance(one, RawOutput):
            output.raw.dims.extend(one.dims)
            output.raw.batch_byte_size = one.nbytes
        else:
            for row in one.rows:
                classes = output.batch_classes.add()
                for c in row:
                    classes.cls.add(idx=c.idx, value=c.value, label=c.label)
    version = Version("m", 3, Path(), ModelConfig(backend="onnx"))
    forms = ResponseHeader(version, batch_size, told)
    wanted.id = 7
    assert V1.InferResponseHeader.FromString(forms.binary(7)) == wanted
    assert text_format.Parse(forms.line(7).decode(), V1.InferResponseHeader()) == wanted
    assert text_format.Parse(forms.trailer(7, binary=False).decode(), V1.InferResponseHeader()) == wanted
