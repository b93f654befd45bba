"""Odd bodies and queries of a predict, over HTTP, on a model that gives back what it is given (spec 3)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.dialects.grps import deployments
from tests.dialects.grps.rig import Deployed, deployed, settings_of


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployed(settings_of(deployments.write(tmp_path_factory.mktemp("edges") / "d"))) as server:
        yield server


def tensor(dtype: object, shape: object, **values: Any) -> dict[str, Any]:
    return {"gtensors": {"tensors": [{"dtype": dtype, "shape": shape, **values}]}}


def floats(*values: object, shape: list[int]) -> dict[str, Any]:
    return tensor("DT_FLOAT32", shape, flat_float32=list(values))


# What is sent -> what comes back beside the status; the same if nothing is said.
GOOD: list[tuple[Any, Any]] = [
    ({"ndarray": 0}, tensor("DT_FLOAT32", None, flat_float32=[0.0])),
    ({"ndarray": []}, tensor("DT_FLOAT32", [0])),
    ({"ndarray": [[], []]}, tensor("DT_FLOAT32", [2, 0])),
    (b'{"ndarray":[NaN,-Infinity]}', floats("NaN", "-Infinity", shape=[2])),
    (b'{"ndarray":[1]} \r\n', floats(1.0, shape=[1])),
    (b'{"gtensors":{"tensors":[{"dtype":7,"shape":[1],"flat_float32":[NaN]}]}}', floats("NaN", shape=[1])),
    (floats("1.5", 1e39, shape=[2]), floats(1.5, "Infinity", shape=[2])),
    (tensor(99, [1], flat_int32=[1]), None),
    (tensor("DT_UINT8", [1], flat_uint8=[300]), None),  # a model with tensors of its own refuses it
    (tensor("DT_INT64", ["2"], flat_int64=[-5, "7"]), tensor("DT_INT64", [2], flat_int64=["-5", "7"])),
    (tensor(None, [1]), tensor(None, [1])),
    (
        tensor("DT_FLOAT64", [1], flatDouble=[1], flat_float64=[2]),
        tensor("DT_FLOAT64", [1], flat_float64=[2.0]),
    ),
    ({"gtensors": {"tensors": None}}, {"gtensors": {}}),
    (
        {"gmap": {"sI32": {"i": "5"}, "sB": {"b": "__-_"}}},
        {"gmap": {"s_b": {"b": "//+/"}, "s_i32": {"i": 5}}},
    ),
    ({"gmap": {"s_f": {"f": "NaN"}, "s_d": {"d": 1e300}}}, None),
    ({"gmap": {"s_s": None}}, {"gmap": {}}),
    ({"gmap": {"s_i64": {"": -1}}}, {"gmap": {"s_i64": {"": "-1"}}}),
    ({"strData": "x", "status": 5, "model": None, "other": [{}]}, {"str_data": "x"}),
    ({"str_data": "a\u0000b", "gmap": None}, {"str_data": "a\u0000b"}),
]


@pytest.mark.parametrize(("sent", "wanted"), GOOD, ids=str)
def test_read(served: Deployed, sent: Any, wanted: Any) -> None:
    for _ in range(2):  # by either path
        reply = served.predict(sent)
        assert reply.status == 200, reply
        found = reply.json
        del found["status"]
        assert found == strip(wanted or sent)


def strip(value: Any) -> Any:
    """Without what an answer leaves out."""
    if isinstance(value, dict):
        return {key: strip(item) for key, item in value.items() if item is not None}
    return [strip(item) for item in value] if isinstance(value, list) else value


BAD: list[tuple[Any, str]] = [
    (b'{"str_data":"a"} {}', "Bad Request, err: Parse json failed: "),
    (b'{"ndarray":[1]} ]', "Bad Request, err: Parse json failed: "),
    (b'{"ndarray":[1]} }', "Bad Request, err: Parse json failed: "),
    (None, "Bad Request, err: the json body is not an object."),
    ({"ndarray": [["a"]]}, "Parse NDArray failed: text where a number is expected at [0][0]"),
    ({"ndarray": [1, None]}, "Parse NDArray failed: null where a number is expected at [1]"),
    ({"ndarray": {"a": 1}}, "Parse NDArray failed: an object where a number is expected"),
    ({"ndarray": [True]}, "Parse NDArray failed: a boolean where a number is expected at [0]"),
    ({"str_data": "", "gtensors": {}}, "Bad Request, err: more than one of "),
    ({"str_data": None}, "Have no legal member in json body."),
    ({"binData": "aa"}, "bin_data should use application/octet-stream format."),
    (tensor("DT_INT32", [-1]), "gtensors.tensors[0].shape: given -1, allowed: 0 to 4294967295"),
    (
        tensor("DT_INT8", [1], flat_int8=[1 << 31]),
        "gtensors.tensors[0].flat_int8: given 2147483648, allowed: ",
    ),
    (
        tensor("DT_STRING", [1], flat_string=[5]),
        "gtensors.tensors[0].flat_string: given a number, allowed: text",
    ),
    ({"gmap": {"s_b": {"b": "a"}}}, "gmap.s_b.b: Fail to decode base64."),
    ({"gmap": {"s_i32": {"i": 1.5}}}, "gmap.s_i32.i: given a number, allowed: whole numbers"),
    ({"model": 5, "str_data": "a"}, "model: given a number, allowed: text"),
]


@pytest.mark.parametrize(("sent", "words"), BAD, ids=str)
def test_refused(served: Deployed, sent: Any, words: str) -> None:
    reply = served.predict(sent)
    assert (reply.status, reply.code) == (400, 400)
    assert reply.message.startswith(words)


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        ({"ndarray": 5}, 5.0),
        ({"ndarray": []}, []),
        ({"ndarray": [[], []]}, [[], []]),
        (b'{"ndarray":[NaN, 0.1]}', ["NaN", 0.1]),
        (floats(1, 2, shape=[2, 1]), [[1.0], [2.0]]),
    ],
    ids=str,
)
def test_returned_as_ndarray(served: Deployed, sent: Any, wanted: Any) -> None:
    assert served.predict(sent, "?return-ndarray=TRUE").json["ndarray"] == wanted


SHAPES = [[2, 2], [], [0], [1 << 31, 0], [1 << 16, 1 << 16, 0], [4], [1] * 65 + [3]]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape)[:40])
def test_shapes_that_are_no_ndarray(served: Deployed, shape: list[int]) -> None:
    """The model gives back what it is given: a shape of its client's, that its values do not have, or that
    would be a text of gigabytes."""
    values = [] if 0 in shape and shape != [0] else [1.0, 2.0, 3.0]
    reply = served.predict(floats(*values, shape=shape), "?return-ndarray=true")
    assert (reply.status, reply.code) == (500, 500)
    assert reply.message.startswith(f"Output of shape {json.dumps(shape[:8])[:-1]}")
    assert reply.message.endswith(f"with {len(values)} values. Cannot convert to ndarray.")


def test_scripts_of_the_originals_page(served: Deployed) -> None:
    for name in ("jquery_min", "flot_min"):
        reply = served.ask("GET", f"/grps/v1/js/{name}")
        assert (reply.status, reply.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
        assert served.ask("POST", f"/grps/v1/js/{name}", b"").status == 405
