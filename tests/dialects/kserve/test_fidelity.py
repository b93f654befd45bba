"""Answers recorded of Triton 24.10: bytes behind the JSON, verbs, long ids, ensembles' classes."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.dialects.kserve import client_models
from tests.faults.rig import MESSAGES, SERVICE, Answer, Http, mixed
from tests.running import WAIT_S, Running

ROW = {"name": "X", "shape": [1, 16], "datatype": "INT32"}
CLASSES = [{"name": "Y", "parameters": {"classification": 3}}]
SECOND_VALUE = (
    "failed to parse the request JSON buffer: The document root must not be followed by other values. at "
)
TEXT = """input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
SAY = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "text_input") for request in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("text_output", tensor.as_numpy())])
            for tensor in tensors
        ]
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("fidelity") / "models"
    folder.mkdir()
    client_models.write_sums(folder)
    client_models.write_triton(folder, "double", "", client_models.ENSEMBLE)
    client_models.write_triton(folder, "say", SAY, TEXT)
    client_models.write_triton(folder, "lines", SAY, "max_batch_size: 4\n" + TEXT)
    client_models.write_triton(folder, "total", client_models.TOTAL, client_models.SEQUENCES)
    log, alone = folder.parent / "log", "127.0.0.1:0=kserve_v2"
    options = ("--admin-log-settings", "--allow-client-shm", "--no-kserve-replies")
    with Running(folder, log, *options, http=alone) as running:
        yield running


@pytest.fixture
def http(served: Running) -> Iterator[Http]:
    with Http(served) as made:
        yield made


def body(**members: Any) -> dict[str, Any]:
    return {"inputs": [{**ROW, "data": list(range(16))}], **members}


# --- classes and configs of ensembles ---------------------------------------------------------------


def test_classes_of_an_ensemble(http: Http) -> None:
    """`simple` has ten labels, for its first output; the output of `double` is that one."""
    found = http.post("/v2/models/double/infer", body(outputs=CLASSES)).json()["outputs"][0]["data"]
    assert found == ["30:15", "28:14", "26:13"]
    every = [{"name": "Y", "parameters": {"classification": 16}}]
    found = http.post("/v2/models/double/infer", body(outputs=every))
    assert found.json()["outputs"][0]["data"][-2:] == ["2:1:label1", "0:0:label0"]


def test_the_config_of_an_ensemble(http: Http) -> None:
    shown = http.ask("GET", "/v2/models/double/config").json()
    assert shown["model_transaction_policy"] == {"decoupled": False}
    assert list(shown)[-1] == "model_transaction_policy"


# --- what follows the JSON --------------------------------------------------------------------------


@pytest.mark.parametrize("rest", ["trailing", " {}", "\n]", ",", " \t x"])
@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/v2/models/double/infer", body()),
        ("/v2/models/say/generate", {"text_input": "x"}),
        ("/v2/models/say/generate_stream", {"text_input": "x"}),
        ("/v2/trace/setting", {}),
        ("/v2/logging", {}),
        ("/v2/repository/index", {"ready": True}),
    ],
)
def test_bytes_after_the_json(http: Http, path: str, sent: Any, rest: str) -> None:
    for _ in range(2):  # the second may meet what the first has taught
        text = json.dumps(sent)
        answer = http.ask("POST", path, (text + rest).encode())
        at = len(text) + len(rest) - len(rest.lstrip())
        assert (answer.status, answer.error) == (500, f"{SECOND_VALUE}{at}"), answer
        assert answer.headers["content-type"] == "application/json"
        assert http.ask("POST", path, f"{text} \n\t ".encode()).status == 200


@pytest.mark.parametrize(("first", "status"), [(0, 400), (1 << 24, 400), (ord("{"), 500)])
def test_blobs_without_the_length_of_the_json(http: Http, first: int, status: int) -> None:
    """A NUL ends the text, so that a blob that begins with one is only missed."""
    blob = struct.pack("<16i", first, *range(15))
    sent = {"inputs": [{**ROW, "parameters": {"binary_data_size": 64}}]}
    data, length = mixed(sent, blob)
    answer = http.ask("POST", "/v2/models/double/infer", data)
    missing = "unexpected size for input 'X', expecting 64 additional bytes for model 'double'"
    assert (answer.status, answer.error) == (status, missing if status == 400 else f"{SECOND_VALUE}{length}")
    well = http.ask("POST", "/v2/models/double/infer", data, Inference_Header_Content_Length=str(length))
    assert well.status == 200


# --- which fault is told, and how -------------------------------------------------------------------


def test_the_fault_that_is_told(http: Http) -> None:
    """Of outputs the first by name; of a shape [] the shape, whatever the data; raw bytes as `raw_input`."""
    names = [{"name": "Z"}, {"name": "A"}]
    answer = http.post("/v2/models/double/infer", body(outputs=names))
    assert (answer.status, answer.error) == (400, "unexpected inference output 'A' for model 'double'")
    for data in ([], [1, 2], ["x"], 3):
        answer = http.post("/v2/models/double/infer", {"inputs": [{**ROW, "shape": [], "data": data}]})
        assert (answer.status, "input 'X' has no shape" in answer.error) == (400, True), answer
    answer = http.ask("POST", "/v2/models/double/infer", b"abc", Inference_Header_Content_Length="0")
    text = "input byte size mismatch for input 'raw_input' for model 'double'. Expected 64, got 3"
    assert (answer.status, answer.error) == (400, f"[request id: <id_unknown>] {text}")


def test_strings_of_no_rows_are_refused(http: Http) -> None:
    """The original wants the strings of one row for none; with them it runs that row, which is refused
    here."""
    given = {"name": "text_input", "shape": [0, 1], "datatype": "BYTES"}
    text = "expected 1 string elements for inference input 'text_input' for model 'lines', got 0"
    path = "/v2/models/lines/infer"
    for body in ({"data": []}, {"data": ["a"]}, {"parameters": {"binary_data_size": 0}}):
        answer = http.ask("POST", path, json.dumps({"inputs": [given | body]}).encode())
        assert (answer.status, answer.error) == (400, f"[request id: <id_unknown>] {text}")
    head = json.dumps({"inputs": [given | {"parameters": {"binary_data_size": 5}}]}).encode()
    size = str(len(head))
    answer = http.ask("POST", path, head + b"\1\0\0\0a", Inference_Header_Content_Length=size)
    assert (answer.status, answer.error) == (400, "input 'text_input' brings 5 bytes, its shape needs 0")


def test_what_is_done_is_said_as_json(http: Http) -> None:
    for path, kind in (("systemsharedmemory/unregister", "application/json"), ("health/live", "text/plain")):
        answer = http.ask("GET" if kind == "text/plain" else "POST", f"/v2/{path}")
        assert (answer.status, answer.headers["content-type"], answer.body) == (200, kind, b"")


# --- ids of sequences -------------------------------------------------------------------------------

TOO_LONG = "string correlation ID cannot be longer than 128 characters"


@pytest.mark.parametrize("model", ["total", "double"])
def test_long_ids_of_sequences(served: Running, http: Http, model: str) -> None:
    tensor = {"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [1]}
    inputs = [tensor] if model == "total" else body()["inputs"]
    for id in ("x" * 129, "\u00e4" * 65):
        parameters = {"sequence_id": id, "sequence_start": True, "sequence_end": True}
        answer = http.post(f"/v2/models/{model}/infer", {"inputs": inputs, "parameters": parameters})
        assert (answer.status, answer.error) == (501, TOO_LONG)
        request = MESSAGES.ModelInferRequest(model_name=model)
        request.parameters["sequence_id"].string_param = id
        with grpc.insecure_channel(served.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(f"{SERVICE}ModelInfer")(request.SerializeToString(), timeout=WAIT_S)
        assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.UNIMPLEMENTED, TOO_LONG)


# --- generate ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_errors_before_the_first_event(http: Http, verb: str) -> None:
    missing = (
        "[request id: <id_unknown>] expected 1 inputs but got 0 inputs for model 'say'. Got input(s) [], but "
        "missing required input(s) ['text_input']. Please provide all required input(s)."
    )
    answer = http.post(f"/v2/models/say/{verb}", {"nonsense": 1})
    assert (answer.status, answer.error) == (400, missing)
    assert answer.headers["content-type"] == "application/json"
    assert http.post(f"/v2/models/say/{verb}", {"text_input": "x"}).status == 200


# --- verbs ------------------------------------------------------------------------------------------


def send(served: Running, line: str) -> Answer:
    host, _, port = served.http.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as link:
        link.sendall(f"{line} HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n".encode())
        with link.makefile("rb") as file:
            head, _, rest = file.read().partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return Answer(int(lines[0].split()[1]), rest, headers)


@pytest.mark.parametrize("verb", ["FOO", "TRACE", "LINK", "PROPFIND", "BREW"])
def test_unknown_verbs(served: Running, verb: str) -> None:
    for path, status, text in (
        ("/v2/health/live", 405, "Method Not Allowed"),
        ("/v2/models/say/infer", 405, "Method Not Allowed"),
        ("/v2/nope", 404, "Not Found"),
        ("/", 404, "Not Found"),
    ):
        answer = send(served, f"{verb} {path}")
        assert (answer.status, answer.json()) == (status, {"error": text})
        assert answer.headers["content-type"] == "text/plain"


@pytest.mark.parametrize("verb", ["PUT", "DELETE", "PATCH", "OPTIONS"])
def test_other_verbs(http: Http, verb: str) -> None:
    for path, status in (("/v2/health/live", 405), ("/v2/nope", 404)):
        answer = http.ask(verb, path)
        assert (answer.status, answer.headers["content-type"]) == (status, "text/plain")


@pytest.mark.parametrize("verb", ["get", "CONNECT", "F-O", "fOO"])
def test_what_breaks_a_request_line_there(served: Running, verb: str) -> None:
    """It closes the connection without a word; here the wire says why."""
    assert send(served, f"{verb} /v2/health/live").status == 501
