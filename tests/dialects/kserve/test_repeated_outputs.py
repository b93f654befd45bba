"""Repeated outputs: a Python model that answers one output twice answers both, in its order, through every
scheduler. As a running Triton 2.51 does: both objects in JSON, both blobs in binary, both messages over gRPC,
and the first from `generate`."""

from __future__ import annotations

import json
import struct
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from fastserve.protos import load
from tests.dialects.kserve.client_models import write_triton
from tests.running import Running

V2 = load("kserve_v2")
SERVICE = "/inference.GRPCInferenceService/"
ANSWERS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        made = [("OUT", value), ("OTHER", value + 1), ("OUT", value + 2)]
        wanted = request.requested_output_names()
        tensors = [pb_utils.Tensor(name, self.make(array)) for name, array in made if name in wanted]
        return pb_utils.InferenceResponse(tensors)

    def make(self, array):
        return array
"""
WORDS = ANSWERS.replace("return array", "return np.array([[str(int(array[0, 0]))]], dtype=object)")
DECOUPLED = (
    ANSWERS
    + """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(self.answer(request))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
)
ASKS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        asked = pb_utils.InferenceRequest(
            model_name="plain", requested_output_names=["OUT", "OTHER"], inputs=request.inputs()
        )
        return pb_utils.InferenceResponse(asked.exec().output_tensors())
"""
SIDES = """max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output [ { name: "OUT" data_type: %s dims: [ 1 ] }, { name: "OTHER" data_type: %s dims: [ 1 ] } ]
"""
FLOATS, STRINGS = (SIDES % (name, name) for name in ("TYPE_FP32", "TYPE_STRING"))
STATEFUL = """sequence_batching {
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
}"""
MODELS = {
    "plain": (ANSWERS, FLOATS),
    "queued": (ANSWERS, FLOATS + "dynamic_batching { }"),
    "cached": (ANSWERS, FLOATS + "response_cache { enable: true }"),
    "queued_and_cached": (ANSWERS, FLOATS + "dynamic_batching { } response_cache { enable: true }"),
    "stateful": (ANSWERS, FLOATS + STATEFUL),
    "asks": (ASKS, FLOATS),
    "decoupled": (DECOUPLED, FLOATS + "model_transaction_policy { decoupled: true }"),
    "words": (WORDS, STRINGS),
}
ORDINARY = [name for name in MODELS if name != "decoupled"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("repeated")
    for name, (source, config) in MODELS.items():
        write_triton(folder / "models", name, source, config)
    settings = folder / "settings.yaml"
    settings.write_text("response_cache_bytes: 1048576\n")
    with Running(folder / "models", folder / "log", "--config", str(settings)) as running:
        yield running


def post(served: Running, path: str, body: dict[str, Any]) -> tuple[Any, bytes]:
    """The reply's headers and its body."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"http://{served.http}/v2/models/{path}", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.headers, reply.read()


def body_of(name: str, value: float, wanted: tuple[str, ...] = (), **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "IN", "shape": [1, 1], "datatype": "FP32", "data": [value]}
    if name == "stateful":
        parameters |= {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
    outputs = {"outputs": [{"name": each} for each in wanted]} if wanted else {}
    return {"inputs": [tensor], "parameters": parameters, **outputs}


def shown(name: str, value: float) -> Any:
    return str(int(value)) if name == "words" else value


@pytest.mark.parametrize("name", ORDINARY)
def test_both_objects_are_in_json(served: Running, name: str) -> None:
    for value in (1.0, 1.0, 5.0):  # the general path, the cache, the fast path
        found = json.loads(post(served, f"{name}/infer", body_of(name, value))[1])["outputs"]
        told = [(output["name"], output["shape"], output["data"]) for output in found]
        wanted = [("OUT", value), ("OTHER", value + 1), ("OUT", value + 2)]
        assert told == [(each, [1, 1], [shown(name, number)]) for each, number in wanted]


@pytest.mark.parametrize("name", [name for name in ORDINARY if name != "asks"])  # it answers what it got
def test_both_come_where_the_output_is_asked_for(served: Running, name: str) -> None:
    for value in (1.0, 1.0, 5.0):
        found = json.loads(post(served, f"{name}/infer", body_of(name, value, ("OUT",)))[1])["outputs"]
        assert [(output["name"], output["data"]) for output in found] == [
            ("OUT", [shown(name, value)]),
            ("OUT", [shown(name, value + 2)]),
        ]
        found = json.loads(post(served, f"{name}/infer", body_of(name, value, ("OTHER",)))[1])["outputs"]
        assert [(output["name"], output["data"]) for output in found] == [("OTHER", [shown(name, value + 1)])]


@pytest.mark.parametrize("name", ORDINARY)
def test_both_blobs_are_behind_the_json(served: Running, name: str) -> None:
    for value in (2.0, 2.0, 6.0):
        headers, reply = post(served, f"{name}/infer", body_of(name, value, binary_data_output=True))
        length = int(headers["Inference-Header-Content-Length"])
        outputs = json.loads(reply[:length])["outputs"]
        assert [output["name"] for output in outputs] == ["OUT", "OTHER", "OUT"]
        assert [output["parameters"]["binary_data_size"] for output in outputs] == [
            len(packed(name, number)) for number in (value, value + 1, value + 2)
        ]
        assert reply[length:] == b"".join(packed(name, number) for number in (value, value + 1, value + 2))


def packed(name: str, value: float) -> bytes:
    if name != "words":
        return struct.pack("<f", value)
    text = shown(name, value).encode()
    return struct.pack("<I", len(text)) + text


def message(name: str, value: float) -> Any:
    request = V2.ModelInferRequest(model_name=name, raw_input_contents=[struct.pack("<f", value)])
    request.inputs.add(name="IN", datatype="FP32", shape=[1, 1])
    if name == "stateful":
        request.parameters["sequence_id"].int64_param = 8
        request.parameters["sequence_start"].bool_param = True
        request.parameters["sequence_end"].bool_param = True
    return request


def told_of(response: Any) -> list[tuple[str, bytes]]:
    names = [output.name for output in response.outputs]
    return list(zip(names, response.raw_output_contents, strict=True))


def in_full(name: str, value: float) -> list[tuple[str, bytes]]:
    wanted = [("OUT", value), ("OTHER", value + 1), ("OUT", value + 2)]
    return [(each, packed(name, number)) for each, number in wanted]


@pytest.mark.parametrize("name", ORDINARY)
def test_both_messages_come_over_grpc(served: Running, name: str) -> None:
    with grpc.insecure_channel(served.grpc) as channel:
        infer = channel.unary_unary(
            SERVICE + "ModelInfer",
            request_serializer=V2.ModelInferRequest.SerializeToString,
            response_deserializer=V2.ModelInferResponse.FromString,
        )
        for value in (3.0, 3.0, 7.0):
            assert told_of(infer(message(name, value), timeout=60)) == in_full(name, value)


@pytest.mark.parametrize("name", MODELS)
def test_both_messages_come_in_a_stream(served: Running, name: str) -> None:
    values = (4.0, 4.0, 8.0)
    with grpc.insecure_channel(served.grpc) as channel:
        stream = channel.stream_stream(
            SERVICE + "ModelStreamInfer",
            request_serializer=V2.ModelInferRequest.SerializeToString,
            response_deserializer=V2.ModelStreamInferResponse.FromString,
        )
        told = list(stream(iter([message(name, value) for value in values]), timeout=60))
        assert [one.error_message for one in told] == [""] * len(values)
        found = [told_of(one.infer_response) for one in told]
        assert sorted(found) == sorted(in_full(name, value) for value in values)


@pytest.mark.parametrize("name", ["plain", "queued", "decoupled", "words"])
def test_generate_shows_the_first(served: Running, name: str) -> None:
    found = json.loads(post(served, f"{name}/generate", {"IN": 9.0})[1])
    assert (found["OUT"], found["OTHER"]) == (shown(name, 9.0), shown(name, 10.0))
