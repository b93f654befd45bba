"""Whole calls through the real dialect and a fake engine: vectors, extensions, and the order of checks."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastserve.dialects.tfserving import classify, predict
from fastserve.dialects.tfserving.service import RowReader
from fastserve.dialects.tfserving.spec import TFServing
from fastserve.errors import Kind, ServeError
from fastserve.net.http1.large_bodies import ArrivedBody
from fastserve.repository.version import VersionState
from fastserve.request import InferRequest, InferResponse
from fastserve.settings import Limits, TFServingOptions
from fastserve.tensor import DTYPES
from tests.dialects.tfserving.fakes import (
    HALF_PLUS_TWO,
    FakeCall,
    FakeEngine,
    ask,
    context_of,
    dialect_of,
    half_plus_two,
    standard_engine,
)
from tests.dialects.tfserving.vectors import Vector, body_of, each

DENSE: dict[str, Any] = {
    "backend": "python",
    "max_batch_size": 8,
    "inputs": {"x": {"dtype": "float32", "shape": [2]}},
    "outputs": {"y": {"dtype": "float32", "shape": [2]}, "total": {"dtype": "float32", "shape": []}},
    "class_labels": ["first", "second"],
    "signatures": {
        "double": {"outputs": {"result": "y"}},
        "named": {"method": "classify", "outputs": {"scores": "y"}},
        "sum": {"method": "regress", "outputs": {"outputs": "total"}},
    },
}


def doubled(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"y": inputs["x"] * np.float32(2), "total": inputs["x"].sum(axis=1)}


def dense_engine() -> FakeEngine:
    engine = FakeEngine()
    engine.serve("dense", DENSE, doubled)
    return engine


def error_of(body: bytes) -> str:
    error: str = json.loads(body)["error"]
    return error


@each("rest_e2e")
def test_vector(vector: Vector) -> None:
    given, expected, engine = vector["input"], vector["expected"], standard_engine()
    reply = ask(dialect_of(engine), given["method"], given["path"], body_of(given))
    assert reply.status == expected["http_status"]
    assert reply.content_type == b"application/json"
    assert engine.open_responses == 0
    if "json" in expected:
        assert json.loads(reply.body) == expected["json"]
    else:
        assert error_of(reply.body) == expected["error"]


def test_results_under_both_keys_by_default() -> None:
    dialect = TFServing(context_of(standard_engine()), TFServingOptions())
    body = '{"signature_name": "regress_x_to_y", "examples": [{"x": 2.0}]}'
    assert json.loads(ask(dialect, "POST", "/v1/models/m:regress", body).body) == {
        "results": [3.0],
        "result": [3.0],
    }


def test_methods_are_looked_at_when_asked_for() -> None:
    dialect = dialect_of(standard_engine(), check_methods=True)
    for verb, noun in (("classify", "classification"), ("regress", "regression")):
        own = "classify_x_to_y" if verb == "classify" else "regress_x_to_y"
        other = "regress_x_to_y" if verb == "classify" else "classify_x_to_y"
        body = {"examples": [{"x": 2.0}]}
        good = ask(dialect, "POST", f"/v1/models/m:{verb}", json.dumps({**body, "signature_name": own}))
        assert good.status == 200
        reply = ask(dialect, "POST", f"/v1/models/m:{verb}", json.dumps({**body, "signature_name": other}))
        wrong = other.partition("_")[0]
        assert json.loads(reply.body)["error"] == (
            f"Expected {noun} signature method_name to be tensorflow/serving/{verb}. "
            f"Was: tensorflow/serving/{wrong}"
        )


def test_signatures_choose_inputs_and_outputs() -> None:
    engine = dense_engine()
    dialect = dialect_of(engine)
    named = '{"instances": [[1.0, 2.0]], "signature_name": "double"}'
    for _ in range(2):  # the second time, `double` is the signature tried first
        assert json.loads(ask(dialect, "POST", "/v1/models/dense:predict", named).body) == {
            "predictions": [[2.0, 4.0]]
        }
    assert engine.seen[-1].outputs == ("y",)
    reply = ask(dialect, "POST", "/v1/models/dense:predict", '{"instances": [[1.0, 2.0]]}')
    assert json.loads(reply.body) == {"predictions": [{"y": [2.0, 4.0], "total": 3.0}]}
    assert engine.seen[-1].outputs == ()


def test_one_endpoint_serves_signatures_in_turn() -> None:
    endpoint = dialect_of(dense_engine()).route("POST", "/v1/models/dense:predict").endpoint
    assert endpoint is not None

    def send(body: bytes) -> Any:
        call = FakeCall("POST", "/v1/models/dense:predict", body)
        asyncio.run(endpoint(call))  # type: ignore[arg-type]
        assert call.answer is not None
        return json.loads(call.answer.body)

    double, default = b'{"signature_name": "double", "inputs": [[1, 2]]}', b'{"inputs": [[1, 2]]}'
    for _ in range(2):
        assert send(double) == {"outputs": [[2.0, 4.0]]}
        assert send(default) == {"outputs": {"y": [[2.0, 4.0]], "total": [3.0]}}
        assert "not found in signature def" in send(b'{"signature_name": "no", "inputs": 1}')["error"]


def test_class_labels_come_from_the_config() -> None:
    dialect = dialect_of(dense_engine())
    body = '{"signature_name": "named", "examples": [{"x": [1.0, 2.0]}]}'
    reply = ask(dialect, "POST", "/v1/models/dense:classify", body)
    assert json.loads(reply.body) == {"results": [[["first", 2.0], ["second", 4.0]]]}
    body = '{"signature_name": "sum", "context": {"x": [1.0, 2.0]}, "examples": [{}, {"x": [3.0, 4.0]}]}'
    reply = ask(dialect, "POST", "/v1/models/dense:regress", body)
    assert json.loads(reply.body) == {"results": [3.0, 7.0]}


@pytest.mark.parametrize(
    ("verb", "signature", "text"),
    [
        ("classify", "sum", "Expected classification signature outputs to contain at least one of"),
        ("regress", "named", "No regression outputs found in SignatureDef: "),
        ("classify", "", "No classification inputs found in SignatureDef: "),
        ("regress", "", "Expected one output Tensor."),
        ("regress", "double", "No regression inputs found in SignatureDef: "),
        ("classify", "nope", "No signature was found with the name: nope"),
    ],
)
def test_signatures_of_another_kind(verb: str, signature: str, text: str) -> None:
    body = json.dumps({"signature_name": signature, "examples": [{"x": [1.0, 2.0]}]})
    reply = ask(dialect_of(dense_engine()), "POST", f"/v1/models/dense:{verb}", body)
    assert reply.status == 400
    assert error_of(reply.body).startswith(text)


SHAPE_ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("classify", {"s": np.zeros(1, "f4")}, "Expected Tensor shape: [batch_size num_classes] but got [1]"),
    ("classify", {"s": np.zeros((1, 2), "f8")}, "Expected scores Tensor of DT_FLOAT. Got: DT_DOUBLE"),
    ("classify", {"s": np.zeros((2, 2), "f4")}, "Expected scores output batch size of 1. Got: 2"),
    (
        "classify",
        {"s": np.zeros((1, 2), "f4"), "c": np.array([[b"a"]], dtype=object)},
        "Tensors class and score should match in dim_size(1). Got 1 vs. 2",
    ),
    ("classify", {"c": np.zeros((1, 2), "i4")}, "Expected classes Tensor of DT_STRING. Got: DT_INT32"),
    (
        "regress",
        {"o": np.zeros((1, 2), "f4")},
        "Expected output Tensor shape to be either [batch_size] or [batch_size, 1] but got [1,2]",
    ),
    ("regress", {"o": np.zeros(3, "f4")}, "Input batch size did not match output batch size: 1 vs. 3"),
    ("regress", {"o": np.zeros(1, "i8")}, "Expected output Tensor of DT_FLOAT.  Got: DT_INT64"),
]


@pytest.mark.parametrize(("verb", "outputs", "text"), SHAPE_ERRORS)
def test_outputs_that_are_no_results(verb: str, outputs: dict[str, Any], text: str) -> None:
    aliases = {"s": "scores", "c": "classes", "o": "outputs"}
    config = {
        "backend": "python",
        "inputs": {"inputs": {"dtype": "bytes", "shape": []}},
        "outputs": {name: {"dtype": "float32", "shape": None} for name in outputs},
        "signatures": {"s": {"method": verb, "outputs": {aliases[name]: name for name in outputs}}},
    }
    engine = FakeEngine()
    engine.serve("odd", config, lambda _: outputs)
    body = '{"signature_name": "s", "examples": [{"x": 1}]}'
    reply = ask(dialect_of(engine), "POST", f"/v1/models/odd:{verb}", body)
    assert (reply.status, error_of(reply.body)) == (400, text)
    assert engine.open_responses == 0


def test_serialized_examples_are_fed_to_a_string_input() -> None:
    config = {
        "backend": "python",
        "inputs": {"inputs": {"dtype": "bytes", "shape": []}},
        "outputs": {"outputs": {"dtype": "float32", "shape": []}},
        "signatures": {"size": {"method": "regress"}},
    }
    engine = FakeEngine()
    engine.serve(
        "raw", config, lambda given: {"outputs": np.array([len(x) for x in given["inputs"]], np.float32)}
    )
    body = '{"signature_name": "size", "examples": [{"x": "a"}, {}]}'
    reply = ask(dialect_of(engine), "POST", "/v1/models/raw:regress", body)
    # Example{Features{"x": bytes_list{"a"}}}: 2 + 2 + 3 + 2 + 2 + 3 bytes, and an empty Features.
    assert json.loads(reply.body) == {"results": [14.0, 2.0]}


# ---- the order of checks (spec 1.6)


@pytest.mark.parametrize(
    ("target", "body", "status", "text"),
    [
        ("/v1/models/nope:predict", "{bad", 400, "JSON Parse error: "),
        ("/v1/models/nope:predict", "[]", 400, "JSON Value: [] Is not object"),
        ("/v1/models/nope:predict", '{"signature_name": 1}', 400, "JSON Value: "),
        ("/v1/models/nope:predict", '{"instances": 1}', 404, "Servable not found"),
        ("/v1/models/nope/labels/l:predict", '{"instances": 1}', 400, "Unrecognized servable version"),
        ("/v1/models/m:predict", '{"signature_name": "s", "instances": 1}', 400, "Serving signature name"),
        ("/v1/models/nope:classify", "{}", 400, "JSON Value: {} When method is classify"),
        (
            "/v1/models/nope:classify",
            '{"examples": [{}]}',
            404,
            "Servable not found for request: Latest(nope)",
        ),
        ("/v1/models/m:classify", '{"examples": [{"x": [[]]}]}', 400, "Feature: x has element"),
        ("/v1/models/m:classify", '{"examples": [{}]}', 400, "No classification inputs found"),
        (
            "/v1/models/m:regress",
            '{"signature_name": "regress_x_to_y", "examples": [{}]}',
            400,
            "Name: <unkn",
        ),
    ],
)
def test_order_of_checks(target: str, body: str, status: int, text: str) -> None:
    reply = ask(dialect_of(standard_engine()), "POST", target, body)
    assert reply.status == status
    assert error_of(reply.body).startswith(text)


# ---- versions


def test_versions_come_and_go_under_one_endpoint() -> None:
    engine = FakeEngine()
    engine.serve("m", HALF_PLUS_TWO, half_plus_two, [1, 2])
    dialect = dialect_of(engine)
    endpoint = dialect.route("POST", "/v1/models/m:predict").endpoint
    assert endpoint is not None
    two = engine.catalog.models["m"].versions[2]
    engine.catalog.move(two, VersionState.UNLOADING)
    call = FakeCall("POST", "/v1/models/m:predict", b'{"instances": [2.0]}')
    asyncio.run(endpoint(call))  # type: ignore[arg-type]
    assert call.answer is not None
    assert call.answer.status == 200
    reply = ask(dialect, "POST", "/v1/models/m/versions/2:predict", b'{"instances": [2.0]}')
    assert error_of(reply.body) == "Servable not found for request: Specific(m, 2)"
    states = json.loads(ask(dialect, "GET", "/v1/models/m").body)["model_version_status"]
    assert [(s["version"], s["state"]) for s in states] == [("2", "UNLOADING"), ("1", "AVAILABLE")]


def test_metadata_describes_every_signature() -> None:
    body = json.loads(ask(dialect_of(dense_engine()), "GET", "/v1/models/dense/metadata").body)
    assert body["model_spec"] == {"name": "dense", "signature_name": "", "version": "1"}
    described = body["metadata"]["signature_def"]["signature_def"]
    assert set(described) == {"serving_default", "double", "named", "sum"}
    assert described["double"]["inputs"]["x"]["tensor_shape"] == {
        "dim": [{"size": "-1", "name": ""}, {"size": "2", "name": ""}],
        "unknown_rank": False,
    }
    assert described["double"]["outputs"]["result"]["name"] == "y:0"
    assert described["named"]["method_name"] == "tensorflow/serving/classify"


# ---- raw rows


RAW = {"Content-Type": "application/octet-stream"}


def test_raw_rows_that_are_still_in_the_socket_are_counted_where_they_cannot_be_json() -> None:
    """The beginning of a body says that it is no JSON, or that it may be some."""
    rows = RowReader(DTYPES["float32"], (2,), 8, batching=True)
    texts = [b' \n{ \t"instances": []}', b"{}", b" " * 8, b"{ x", b"[1]", b"\0\1\2", b"{\n\n", b"x{"]
    for text in texts:
        whole = text + b" " * (-len(text) % 8)
        for at in range(1, len(whole)):
            found = rows.count_arrived(ArrivedBody(-1, whole[:at], len(whole) - at))
            assert found in (0, rows.count(whole))
    assert rows.count_arrived(ArrivedBody(-1, b"\0", 15)) == 2
    assert rows.count_arrived(ArrivedBody(-1, b"\0", 14)) == 0
    single = replace(rows, batching=False)
    assert [single.count_arrived(ArrivedBody(-1, b"\0", size)) for size in (7, 15)] == [1, 0]


def test_raw_rows() -> None:
    dialect = dialect_of(dense_engine())
    rows = np.array([[1, 2], [3, 4]], "<f4")
    reply = ask(dialect, "POST", "/v1/models/dense:predict", rows.tobytes(), RAW)
    assert json.loads(reply.body)["predictions"][1] == {"y": [6.0, 8.0], "total": 7.0}


@pytest.mark.parametrize(
    ("body", "headers", "text"),
    [
        (b"\0" * 7, RAW, "JSON Parse error"),
        (b"", RAW, "JSON Parse error: The document is empty"),
        (b"\0" * 8, {}, "JSON Parse error"),
        (b'{"a": 1}', RAW, "Missing 'inputs' or 'instances' key"),
        (b' {\t"a":1', RAW, "JSON Parse error"),
    ],
)
def test_what_is_not_raw_is_json(body: bytes, headers: dict[str, str], text: str) -> None:
    reply = ask(dialect_of(dense_engine()), "POST", "/v1/models/dense:predict", body, headers)
    assert reply.status == 400
    assert error_of(reply.body).startswith(text)


def test_a_model_without_fixed_rows_takes_no_raw_body() -> None:
    reply = ask(dialect_of(standard_engine()), "POST", "/v1/models/m:predict", b"\0" * 8, RAW)
    assert error_of(reply.body).startswith("JSON Parse error")


# ---- headers, limits, failures


def test_gzip_beyond_a_limit_is_an_empty_body() -> None:
    body = gzip.compress(b'{"instances": [1.0]}' + b" " * 100_000)
    headers = {"Content-Encoding": "gzip"}
    small = TFServing(context_of(standard_engine(), limits=Limits(inflated_bytes=1000)), TFServingOptions())
    reply = ask(small, "POST", "/v1/models/m:predict", body, headers)
    assert error_of(reply.body) == "JSON Parse error: The document is empty"
    assert ask(dialect_of(standard_engine()), "POST", "/v1/models/m:predict", body, headers).status == 200


def test_cors_headers_are_on_every_api_reply() -> None:
    dialect = dialect_of(standard_engine(), cors=True)
    for method, target in (
        ("POST", "/v1/models/m:predict"),
        ("GET", "/v1/models/m"),
        ("GET", "/v1/models/m/versions/99999999999999999999"),
        ("PUT", "/v1/x"),
        ("OPTIONS", "/v1/x"),
    ):
        assert (b"Access-Control-Allow-Origin", b"*") in ask(dialect, method, target).headers


def test_the_deadline_is_the_rest_timeout() -> None:
    engine = standard_engine()
    ask(dialect_of(engine), "POST", "/v1/models/m:predict", '{"instances": [1]}')
    ask(dialect_of(engine, rest_timeout_ms=0), "POST", "/v1/models/m:predict", '{"instances": [1]}')
    assert engine.seen[0].deadline_ns > 0
    assert engine.seen[1].deadline_ns == 0


class FailingEngine(FakeEngine):
    async def infer(self, version: Any, request: InferRequest) -> InferResponse:
        raise ServeError(Kind.UNAVAILABLE, "The batch scheduling queue is full", retry_after_s=0.2)


def test_errors_of_the_engine_reach_the_client() -> None:
    engine = FailingEngine()
    engine.serve("m", HALF_PLUS_TWO, half_plus_two)
    reply = ask(dialect_of(engine), "POST", "/v1/models/m:predict", '{"instances": [1]}')
    assert (reply.status, error_of(reply.body)) == (503, "The batch scheduling queue is full")
    assert reply.headers == [(b"Retry-After", b"1")]


def test_a_reply_that_cannot_be_written_is_released() -> None:
    engine = FakeEngine()
    engine.serve("m", HALF_PLUS_TWO, lambda _: {"y": np.float32(1)})
    reply = ask(dialect_of(engine), "POST", "/v1/models/m:predict", '{"instances": [1]}')
    assert error_of(reply.body) == "Tensor name: y has no shape information "
    assert engine.open_responses == 0


def test_bodies_are_bounded_before_they_become_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    dialect = dialect_of(standard_engine())
    monkeypatch.setattr(classify, "EXAMPLES_BYTES", 10)
    reply = ask(dialect, "POST", "/v1/models/m:classify", '{"examples": []}')
    assert error_of(reply.body) == "Request body of 16 bytes is over the limit of 10 for examples"
    monkeypatch.setattr(predict, "EXPLAIN_BYTES", 10)
    reply = ask(dialect, "POST", "/v1/models/m:predict", '{"instances": [[1], 2]}')
    assert error_of(reply.body) == "A list has another size or shape than the ones before it at offset: 20"
    assert ask(dialect, "POST", "/v1/models/nope:predict", '{"instances": [1]').status == 404


@pytest.mark.parametrize("depth", [101, 500_000])
def test_deep_nesting(depth: int) -> None:
    dialect = dialect_of(standard_engine())
    for verb, body in (
        ("predict", b'{"instances": ' + b"[" * depth),
        ("predict", b'{"other": ' + b"[" * depth + b"]" * depth + b', "instances": [1]}'),
        ("classify", b'{"examples": ' + b"[" * depth),
    ):
        reply = ask(dialect, "POST", f"/v1/models/m:{verb}", body)
        assert reply.status == 400
        assert error_of(reply.body).startswith("JSON Parse error: Nesting too deep. at offset: ")


@pytest.mark.parametrize("digits", [b"9" * 1_000_000, b"0." + b"9" * 1_000_000, b"1e" + b"9" * 1_000_000])
def test_numbers_of_a_million_digits(digits: bytes) -> None:
    dialect = dialect_of(standard_engine())
    fits = digits.startswith(b"0.")
    reply = ask(dialect, "POST", "/v1/models/m:predict", b'{"instances": [%b]}' % digits)
    assert reply.status == (200 if fits else 400)
    body = b'{"signature_name": "regress_x_to_y", "examples": [{"x": %b}]}' % digits
    assert ask(dialect, "POST", "/v1/models/m:regress", body).status == (200 if fits else 400)


def test_numbers_in_errors_are_printed_as_the_original_reads_them() -> None:
    """Its parser goes on in doubles behind the digits of a uint64; values are the nearest doubles."""
    dialect, long = dialect_of(standard_engine()), "123456789012345678901234567890"
    for path, body, told in (
        ("m:predict", f"[{long}]", "JSON Value: [1.2345678901234566e29] Is not object"),
        ("m:predict", f'{{"instances": [{long}, "a"]}}', 'JSON Value: "a" Type: String'),
        ("m:predict", f'{{"instances": [{long}, [{long}]]}}', "Expecting shape"),
    ):
        reply = ask(dialect, "POST", f"/v1/models/{path}", body)
        assert (reply.status, told in error_of(reply.body)) == (400, True), reply.body
    body = f'{{"signature_name": "regress_x_to_y", "examples": [{{"x": {long}}}, {{"x": 1.0}}]}}'
    results = json.loads(ask(dialect, "POST", "/v1/models/m:regress", body).body)["results"]
    assert [np.float32(result) for result in results] == [np.float32(long) / 2 + 2, 2.5]


def test_a_depth_of_100_is_read() -> None:
    body = '{"x": ' + "[" * 99 + "1" + "]" * 99 + ', "instances": [1]}'
    assert ask(dialect_of(standard_engine()), "POST", "/v1/models/m:predict", body).status == 200


# ---- the metrics page


def test_the_metrics_page_is_opt_in_and_exact() -> None:
    path = "/monitoring/prometheus/metrics"
    assert dialect_of(standard_engine(), monitoring=False).route("GET", path) is None
    dialect = TFServing(context_of(standard_engine()), TFServingOptions(monitoring=True))
    ask(dialect, "POST", "/v1/models/m:predict", '{"instances": [1]}')
    ask(dialect, "GET", "/v1/models/nobody")
    for method in ("GET", "POST", "DELETE"):
        reply = ask(dialect, method, path)
        assert (reply.status, reply.content_type) == (200, b"text/plain")
    assert b'request_count{model_name="m",status="OK"} 1\n' in reply.body
    assert b'request_count{model_name="",status="NOT_FOUND"} 1\n' in reply.body
    assert b'request_latency_count{model_name="m",API="predict",entrypoint="REST"} 1\n' in reply.body
    assert dialect.route("GET", path + "x") is None
    assert ask(dialect, "GET", path + "?a=1").status == 400


def test_uint16_is_refused_when_it_is_read() -> None:
    """As the original does, which has no way from JSON to it; a list of nothing passes."""
    engine = FakeEngine()
    short = {"dtype": "uint16", "shape": [-1]}
    config = {"backend": "python", "max_batch_size": 4, "inputs": {"x": short}, "outputs": {"y": short}}
    engine.serve("short", config, lambda inputs: {"y": inputs["x"]})
    dialect = dialect_of(engine)

    def predict(document: Any) -> tuple[int, Any]:
        reply = ask(dialect, "POST", "/v1/models/short:predict", json.dumps(document).encode())
        return reply.status, json.loads(reply.body)

    text = "Conversion of JSON Value: 1 to type: uint16"
    wrapped = f"Failed to process element: 0 of 'instances' list. Error: UNIMPLEMENTED: {text}"
    assert predict({"instances": [[1, 2]]}) == (400, {"error": wrapped})
    assert predict({"inputs": [[1, 2]]}) == (501, {"error": text})
    assert not engine.seen
    assert predict({"instances": [[], []]})[0] == 200
    assert engine.seen[0].inputs["x"].dtype is DTYPES["uint16"]
    large = predict({"instances": [[1] * (1 << 17)]})
    assert large[0] == 400
    assert "The type of an input cannot be written in JSON" in large[1]["error"]
