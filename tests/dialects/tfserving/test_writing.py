"""Texts that the dialect writes: predict replies, results, errors, status, metadata, the metrics page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastserve.dialects.tfserving.classify import ResultPlan, write_results
from fastserve.dialects.tfserving.errors import error_body
from fastserve.dialects.tfserving.metadata import join_metadata, tensor_info, write_status
from fastserve.dialects.tfserving.monitoring import (
    LATENCY_BOUNDS_US,
    PageHistogram,
    TFServingMonitor,
    number,
    write_histogram,
    write_series,
)
from fastserve.dialects.tfserving.predict import write_predict
from fastserve.errors import Kind, ServeError
from fastserve.metrics import Registry
from fastserve.net.router import CANONICAL_STATUS
from fastserve.repository.model_config import parse_model_config
from fastserve.repository.version import Version, VersionState
from fastserve.tensor import Tensor
from tests.dialects.tfserving.fakes import HALF_PLUS_TWO, to_tensor
from tests.dialects.tfserving.vectors import DTYPE_BY_TF_NAME, Vector, body_of, each, plain

WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def tensor_of(given: dict[str, Any]) -> Tensor:
    """A vector's tensor; typed fields of dtypes JSON cannot show count for their size only."""
    dtype, shape = DTYPE_BY_TF_NAME[given["dtype"]], tuple(given["shape"])
    if "values" not in given:
        return Tensor(dtype, shape, bytes(dtype.item_bytes * math.prod(shape)))
    if dtype.name == "bytes":
        items = [v.encode() if isinstance(v, str) else plain(v) for v in given["values"]]
        array = np.empty(len(items), dtype=object)
        array[:] = items
        return to_tensor(array.reshape(shape))
    values = [WORDS.get(value, value) if isinstance(value, str) else value for value in given["values"]]
    return to_tensor(np.array(values, dtype=dtype.name).reshape(shape))


def names_of(outputs: dict[str, Any]) -> dict[str, str]:
    return {name: name for name in outputs}


def loads(body: bytes) -> Any:
    """JSON with NaN comparing equal to itself."""
    return json.loads(body, parse_constant=str)


@each("make_json_from_tensors")
def test_predict_reply(vector: Vector) -> None:
    expected = vector["expected"]
    outputs = {name: tensor_of(given) for name, given in vector["input"].items()}
    columnar = vector["format"] == "columnar"
    if expected["status"] != "OK":
        with pytest.raises(ServeError) as caught:
            write_predict(names_of(outputs), outputs, columnar=columnar)
        assert caught.value.kind.name == expected["status"]
        assert caught.value.message == expected["error"]
        return
    body = write_predict(names_of(outputs), outputs, columnar=columnar)
    if "key_order" in expected:
        assert loads(body) == loads(body_of(expected))
    else:
        assert body == body_of(expected)


def test_outputs_of_unequal_rows() -> None:
    outputs = {"a": to_tensor(np.zeros(2, "f4")), "b": to_tensor(np.zeros((3, 1), "f4"))}
    with pytest.raises(ServeError) as caught:
        write_predict(names_of(outputs), outputs, columnar=False)
    assert caught.value.message == "Tensor name: b has inconsistent batch size: 3 expecting: 2"
    assert loads(write_predict(names_of(outputs), outputs, columnar=True))["outputs"]["a"] == [0.0, 0.0]


@each("make_json_from_classification")
def test_classify_reply(vector: Vector) -> None:
    rows = vector["input"]
    if vector["expected"]["status"] != "OK":
        nothing = {"c": to_tensor(np.zeros((0, 0), dtype=object))}
        with pytest.raises(ServeError, match=vector["expected"]["error"]):
            write_results("classify", ResultPlan({"classes": "c"}), nothing, 0, ("results",))
        return
    labels = np.array([[label.encode() for label, _ in row] for row in rows], dtype=object)
    outputs = {"c": to_tensor(labels)}
    wanted = {"classes": "c"}
    if rows[0][0][1] is not None:
        outputs["s"] = to_tensor(np.array([[score for _, score in row] for row in rows], "f4"))
        wanted["scores"] = "s"
    body = write_results("classify", ResultPlan(wanted), outputs, len(rows), ("results",))
    assert body == body_of(vector["expected"])


@each("make_json_from_regression")
def test_regress_reply(vector: Vector) -> None:
    values = [WORDS.get(value, value) if isinstance(value, str) else value for value in vector["input"]]
    outputs = {"o": to_tensor(np.array(values, "f4"))}
    if vector["expected"]["status"] != "OK":
        with pytest.raises(ServeError, match=vector["expected"]["error"]):
            write_results("regress", ResultPlan({"outputs": "o"}), outputs, len(values), ("results",))
        return
    body = write_results("regress", ResultPlan({"outputs": "o"}), outputs, len(values), ("results",))
    assert body == body_of(vector["expected"])


def test_both_result_keys() -> None:
    outputs = {"o": to_tensor(np.array([[1], [2]], "f4"))}
    body = write_results("regress", ResultPlan({"outputs": "o"}), outputs, 2, ("results", "result"))
    assert json.loads(body) == {"results": [1.0, 2.0], "result": [1.0, 2.0]}


@each("make_json_from_status")
def test_error_reply(vector: Vector) -> None:
    if vector["input"]["code"] == 0:
        pytest.skip("there is no error kind for OK")
    assert error_body(vector["input"]["message"]) == body_of(vector["expected"])


@each("status_to_http")
def test_status_code(vector: Vector) -> None:
    kinds = {kind.name: status for kind, status in CANONICAL_STATUS.items()} | {"OK": 200}
    assert kinds.get(vector["input"]["code"], 500) == vector["expected"]["http_status"]


def test_every_kind_has_a_status() -> None:
    assert set(CANONICAL_STATUS) == set(Kind)


@each("rest_status_body")
def test_status_body(vector: Vector) -> None:
    versions = []
    for given in vector["input"]["versions"]:
        version = Version("m", given["version"], Path(), parse_model_config(HALF_PLUS_TWO))
        version.state = VersionState[given["state"]]
        if given["error_code"] != "OK":
            version.error = ServeError(Kind[given["error_code"]], given["error_message"])
        versions.append(version)
    assert json.loads(write_status(versions)) == vector["expected"]["json"]


def test_status_layout() -> None:
    version = Version("m", 1, Path(), parse_model_config(HALF_PLUS_TWO))
    version.state, version.error = VersionState.END, ServeError(Kind.UNKNOWN, "a <b>")
    assert write_status([version]) == (
        b'{\n "model_version_status": [\n  {\n   "version": "1",\n   "state": "END",\n   "status": {\n'
        b'    "error_code": "UNKNOWN",\n    "error_message": "a \\u003cb\\u003e"\n   }\n  }\n ]\n}\n'
    )


def infos(tensors: dict[str, Any]) -> dict[str, Any]:
    shapes = {alias: None if t.get("unknown_rank") else tuple(t["shape"]) for alias, t in tensors.items()}
    return {alias: tensor_info(t["name"], t["dtype"], shapes[alias]) for alias, t in tensors.items()}


@each("rest_metadata_body")
def test_metadata_body(vector: Vector) -> None:
    given = vector["input"]
    defs = {
        name: {
            **{side: infos(signature[side]) for side in ("inputs", "outputs")},
            "method_name": signature["method_name"],
            "defaults": {},
        }
        for name, signature in given["signature_def"].items()
    }
    assert join_metadata(given["model"], given["version"], defs) == body_of(vector["expected"])


@each("prometheus_text")
def test_metric_lines(vector: Vector) -> None:
    given = vector["input"]
    if given["type"] == "histogram":
        spread = PageHistogram([0] * (len(given["bounds"]) + 1))
        lines = write_histogram(given["metric"], given["bounds"], [(given["labels"], spread)])
        assert lines[0] == vector["expected"]["lines"][0]
        return
    lines = write_series(given["metric"], given["type"], [(given["labels"], given["value"])])
    assert lines == vector["expected"]["lines"]


@each("prometheus_bounds")
def test_latency_bounds(vector: Vector) -> None:
    assert [number(bound) for bound in LATENCY_BOUNDS_US] + ["+Inf"] == vector["expected"]["le"]


def test_metrics_page() -> None:
    registry = Registry()
    monitor = TFServingMonitor({"m"}, registry)
    monitor.count("m", "OK")
    monitor.count("nobody 1", "NOT_FOUND")
    monitor.count("nobody 2", "NOT_FOUND")
    monitor.time("m", "predict", 10.0)
    monitor.time("m", "predict", 9.5)
    lines = monitor.write().decode().split("\n")
    registry.close()
    labels = 'model_name="m",API="predict",entrypoint="REST"'
    assert lines[:6] == [
        "# TYPE :tensorflow:serving:request_count counter",
        ':tensorflow:serving:request_count{model_name="",status="NOT_FOUND"} 2',
        ':tensorflow:serving:request_count{model_name="m",status="OK"} 1',
        "# TYPE :tensorflow:serving:request_latency histogram",
        f':tensorflow:serving:request_latency_bucket{{{labels},le="10"}} 1',  # the bound is exclusive
        f':tensorflow:serving:request_latency_bucket{{{labels},le="18"}} 2',
    ]
    assert lines[-4:] == [
        f':tensorflow:serving:request_latency_bucket{{{labels},le="+Inf"}} 2',
        f":tensorflow:serving:request_latency_sum{{{labels}}} 19.5",
        f":tensorflow:serving:request_latency_count{{{labels}}} 2",
        "",
    ]


def test_names_and_labels_are_cleaned() -> None:
    assert write_series("7/a-b", "gauge", [({"a:b": 'x\\"', "1": "y"}, 0.1234567)]) == [
        "# TYPE _7:a:b gauge",
        '_7:a:b{a_b="x\\\\\\"",_1="y"} 0.123457',
    ]
    assert write_series("m", "counter", [({"model_path": "/a\nb"}, 1)])[1] == 'm{model_path="/a\\nb"} 1'
