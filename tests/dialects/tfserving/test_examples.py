"""Classify and regress requests: every vector, tf.Example bytes, and features as a model's inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from fastserve.dialects.tfserving.classify import (
    Example,
    Feature,
    decode_feature,
    read_examples,
    serialize_example,
)
from fastserve.errors import ServeError
from fastserve.net.router import CANONICAL_STATUS
from fastserve.tensor import DTYPES, TensorSpec
from tests.dialects.tfserving.fakes import to_array
from tests.dialects.tfserving.vectors import Vector, body_of, each, plain

KINDS = {"int64_list": "int64", "float_list": "float", "bytes_list": "bytes", None: "", "kind_not_set": ""}
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def expected_example(given: dict[str, Any]) -> Example:
    return {name: expected_feature(feature) for name, feature in given.items()}


def expected_feature(given: dict[str, Any]) -> Feature:
    kind, values = KINDS[given["kind"]], given.get("value", [])
    if kind == "bytes":
        return Feature("bytes", [v.encode() if isinstance(v, str) else plain(v) for v in values])
    if kind == "float":
        return Feature("float", np.array([WORDS.get(v, v) for v in values], "f4").tolist())
    return Feature("int64" if kind else "", values)


@each("parse_classify_regress_request")
def test_vector(vector: Vector) -> None:
    expected, body = vector["expected"], body_of(vector["input"])
    if expected["status"] != "OK":
        with pytest.raises(ServeError) as caught:
            read_examples(body)
        assert caught.value.message == expected["error"]
        assert CANONICAL_STATUS[caught.value.kind] == expected["http_status"]
        return
    got = read_examples(body)
    assert got.signature_name == expected.get("signature_name", "")
    assert str(got.examples) == str(aligned(expected["examples"], got.examples))
    assert (got.context is not None) == (expected["input_kind"] == "example_list_with_context")
    if got.context is not None:
        wanted = expected_example(expected.get("context", {}))
        assert got.context == {name: wanted[name] for name in got.context}
        assert got.context.keys() == wanted.keys()


def aligned(expected: list[Any], got: list[Example]) -> list[Example]:
    """The expected examples with features in the order read; as text, so that NaN equals itself."""
    examples = [expected_example(example) for example in expected]
    assert [example.keys() for example in examples] == [example.keys() for example in got]
    return [{name: wanted[name] for name in mine} for wanted, mine in zip(examples, got, strict=True)]


def make_message_class() -> Any:
    """tf.Example in a pool of its own, so that nothing registers beside other copies of it."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    lists = {"BytesList": field.TYPE_BYTES, "FloatList": field.TYPE_FLOAT, "Int64List": field.TYPE_INT64}
    for name, kind in lists.items():
        file.message_type.add(name=name).field.add(name="value", number=1, label=3, type=kind)
    feature = file.message_type.add(name="Feature")
    for number, name in enumerate(lists, 1):
        feature.field.add(name=name.lower(), number=number, label=1, type=11, type_name=f".t.{name}")
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=1, type=field.TYPE_STRING)
    entry.field.add(name="value", number=2, label=1, type=11, type_name=".t.Feature")
    features.field.add(name="feature", number=1, label=3, type=11, type_name=".t.Features.FeatureEntry")
    top = file.message_type.add(name="Example")
    top.field.add(name="features", number=1, label=1, type=11, type_name=".t.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


ExampleMessage = make_message_class()


def test_serialized_examples_read_back() -> None:
    example: Example = {
        "f": Feature("float", [1.5, -0.0]),
        "i": Feature("int64", [0, -1, 2**63 - 1, -(2**63), 300]),
        "b": Feature("bytes", [b"", b"\xff" * 200]),
        "none": Feature(),
    }
    features = ExampleMessage.FromString(serialize_example(example)).features.feature
    assert set(features) == set(example)
    assert list(features["f"].floatlist.value) == [1.5, -0.0]
    assert list(features["i"].int64list.value) == example["i"].values
    assert list(features["b"].byteslist.value) == example["b"].values


def test_context_comes_first_in_serialized_examples() -> None:
    body = b'{"context": {"x": 7, "c": 1.0}, "examples": [{"x": 1}, {}]}'
    first, second = (ExampleMessage.FromString(data) for data in read_examples(body).serialized())
    assert list(first.features.feature["x"].int64list.value) == [1]
    assert list(first.features.feature["c"].floatlist.value) == [1.0]
    assert list(second.features.feature["x"].int64list.value) == [7]


def decode(shape: tuple[int, ...] | None, dtype: str, *features: Feature | None) -> Any:
    examples = [{} if feature is None else {"x": feature} for feature in features]
    return to_array(decode_feature("x", TensorSpec("in", DTYPES[dtype], shape), examples))


def test_features_fill_rows() -> None:
    rows = decode((2,), "float32", Feature("float", [1.0, 2.0]), Feature("float", [3.0, 4.0]))
    assert rows.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert decode((), "bytes", Feature("bytes", [b"a"]), Feature("bytes", [b""])).tolist() == [b"a", b""]
    assert decode((), "int8", Feature("int64", [300]), Feature("int64", [-1])).tolist() == [44, -1]
    assert decode((), "bool", Feature("int64", [2]), Feature("int64", [0])).tolist() == [True, False]


def test_open_axes_are_padded_and_an_unknown_rank_is_not() -> None:
    short, long = Feature("float", [1.0, 2.0]), Feature("float", [1.0, 2.0, 3.0, 4.0])
    assert decode((-1,), "float32", short, long, None).tolist() == [[1, 2, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0]]
    assert decode((-1, 2), "float32", short, long).shape == (2, 2, 2)
    assert decode(None, "float32", short, short).shape == (2, 2)


@pytest.mark.parametrize(
    ("shape", "features", "text"),
    [
        ((), [None], "Name: <unknown>, Feature: x (data type: float) is required but could not be found."),
        (
            None,
            [Feature()],
            "Name: <unknown>, Feature: x (data type: float) is required but could not be found.",
        ),
        (
            (),
            [Feature("int64", [1])],
            "Name: <unknown>, Key: x, Index: 0.  Data types don't match. "
            "Data type: int64 but expected type: float",
        ),
        (
            (3,),
            [Feature("float", [1.0] * 3), Feature("float", [1.0])],
            "Name: <unknown>, Key: x, Index: 1.  Number of float values != expected.  "
            "Values size: 1 but output shape: [3]",
        ),
        (
            (-1, 2),
            [Feature("float", [1.0] * 3)],
            "Name: <unknown>, Key: x, Index: 0.  Number of float values != expected.  "
            "Values size: 3 but output shape: [?,2]",
        ),
    ],
)
def test_features_that_do_not_fit(shape: Any, features: list[Any], text: str) -> None:
    with pytest.raises(ServeError) as caught:
        decode(shape, "float32", *features)
    assert caught.value.message == text
