"""Shapes larger than the data sent: every dialect, transport and scheduler refuses them, and no other client
notices. A tensor without elements costs nothing to send, whatever its other axes say."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import product

import grpc as grpcio
import pytest

from fastserve.protos import load
from tests.dialects.kserve import client_models
from tests.faults.bystander import Bystander
from tests.faults.rig import MESSAGES, SERVICE, Grpc, Http, leaks, message, mixed, tensor
from tests.running import WAIT_S, Running

MAX = 2**63 - 1
V1, TFS, GRPS = (load(name) for name in ("triton_v1", "tfserving", "grps"))
EVERY = "tfserving,kserve_v2,triton_v1,grps"
BACK = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs):
        return {"y": inputs["x"]}
"""
TRITON_BACK = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        found = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]) for array in found]
"""
STREAM_BACK = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("y", array)])
            request.get_response_sender().send(answer, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SIDES = """input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
BATCHED = "max_batch_size: 64\n" + SIDES
SEQUENCES = """sequence_batching { direct { } control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ] }
"""
ENSEMBLE = """platform: "ensemble"
ensemble_scheduling { step [ { model_name: "free" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } ] }
"""
SCHEDULED = {
    "plain": BATCHED + "dynamic_batching { }\n",
    "ranked": BATCHED + "dynamic_batching { priority_levels: 2 default_priority_level: 1 }\n",
    "cached": BATCHED + "dynamic_batching { }\nresponse_cache { enable: true }\n",
    "sequenced": BATCHED + SEQUENCES,
    "unbatched": SIDES,
}
MODELS = ("free", "any", "streamed", "ensemble", *SCHEDULED)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("counts") / "models"
    folder.mkdir()
    for name, rank, rows in (("free", [-1], 64), ("any", None, 0)):
        side = {"dtype": "float32", "shape": rank}
        client_models.write_native(
            folder, name, BACK, inputs={"x": side}, outputs={"y": side}, max_batch_size=rows
        )
    side = {"dtype": "bytes", "shape": [-1]}
    client_models.write_native(folder, "texts", BACK, inputs={"x": side}, outputs={"y": side})
    for name, config in SCHEDULED.items():
        client_models.write_triton(folder, name, TRITON_BACK, config)
    client_models.write_triton(folder, "streamed", STREAM_BACK, SIDES + client_models.DECOUPLED)
    client_models.write_triton(folder, "ensemble", "", BATCHED + ENSEMBLE)
    every = f"127.0.0.1:0={EVERY}"
    cache = ("--response-cache-bytes", "1000000")
    with Running(folder, folder.parent / "log", *cache, http=every, grpc=every) as running:
        yield running


@pytest.fixture
def http(server: Running) -> Iterator[Http]:
    """A client whose mischief nobody else feels, and that leaves the server alive without an error logged."""
    before = server.holds()
    with Http(server) as made, Bystander(server):
        yield made
    assert server.alive
    server.settles(before)


SHAPES = [
    [MAX, 0], [0, MAX], [2**62, 0], [2**40, 0], [2_000_000, 0], [MAX, MAX], [2**32, 2**32], [-1, 0], [-1, -1],
    [1] * 300,
]  # fmt: skip
IDS = [str(shape)[:30] for shape in SHAPES]


@pytest.mark.parametrize("model", [name for name in MODELS if name != "streamed"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_v2_over_http(server: Running, http: Http, model: str, shape: list[int]) -> None:
    """As JSON, and as no bytes behind it."""
    path = f"/v2/models/{model}/infer"
    said = {"parameters": {"sequence_id": 1, "sequence_start": True}} if model == "sequenced" else {}
    answer = http.post(path, {"inputs": [tensor("x", shape, [], "FP32")], **said})
    assert answer.status in (400, 500)
    assert not leaks(server, answer)
    body, length = mixed({"inputs": [tensor("x", shape, None, "FP32", binary_data_size=0)], **said})
    answer = http.ask("POST", path, body, Inference_Header_Content_Length=str(length))
    assert answer.status in (400, 500)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_v2_over_grpc(server: Running, http: Http, shape: list[int]) -> None:
    """Raw and typed; and a stream goes on after it."""
    made = [message(model, ("x", "FP32", shape, b"")) for model in MODELS]
    for one in list(made):
        typed = MESSAGES.ModelInferRequest()
        typed.CopyFrom(one)
        del typed.raw_input_contents[:]
        typed.inputs[0].contents.SetInParent()
        made.append(typed)
    with Grpc(server) as grpc:
        for one in made:
            if one.model_name != "streamed":
                assert grpc.infer(one).status == 3
    good = message("free", ("x", "FP32", [1, 1], struct.pack("<f", 1.5)))
    with grpcio.insecure_channel(server.grpc) as channel:
        call = channel.stream_stream(f"{SERVICE}ModelStreamInfer")
        found = list(call((one.SerializeToString() for one in [*made, good]), timeout=WAIT_S))
    replies = [MESSAGES.ModelStreamInferResponse.FromString(one) for one in found]
    assert len(replies) == len(made) + 1
    wrong = [one.error_message for one in replies if one.error_message]
    assert len(wrong) == len(made)


@pytest.mark.parametrize("shape", [[MAX, 3], [MAX, 1], [1, MAX], [MAX, 0], [2**62, 4], [2**31, 2**32]])
@pytest.mark.parametrize("packed", [b"", struct.pack("<I", 1) + b"a"], ids=["none", "one"])
def test_strings(server: Running, http: Http, shape: list[int], packed: bytes) -> None:
    """As JSON, as bytes, over gRPC, and in a stream, which goes on."""
    texts = ["a"] if packed else []
    path = "/v2/models/texts/infer"
    answer = http.post(path, {"inputs": [tensor("x", shape, texts, "BYTES")]})
    assert answer.status == 400
    assert not leaks(server, answer)
    given = {"inputs": [tensor("x", shape, None, "BYTES", binary_data_size=len(packed))]}
    body, length = mixed(given, packed)
    assert http.ask("POST", path, body, Inference_Header_Content_Length=str(length)).status == 400
    raw = message("texts", ("x", "BYTES", shape, packed))
    typed = message("texts", ("x", "BYTES", shape, None))
    typed.inputs[0].contents.bytes_contents.extend([b"a"] if packed else [])
    typed.inputs[0].contents.SetInParent()
    with Grpc(server) as grpc:
        assert [grpc.infer(one).status for one in (raw, typed)] == [3, 3]
    good = message("texts", ("x", "BYTES", [1, 1], struct.pack("<I", 1) + b"a"))
    with grpcio.insecure_channel(server.grpc) as channel:
        call = channel.stream_stream(f"{SERVICE}ModelStreamInfer")
        found = list(call((one.SerializeToString() for one in (raw, typed, good)), timeout=WAIT_S))
    errors = [bool(MESSAGES.ModelStreamInferResponse.FromString(one).error_message) for one in found]
    assert errors == [True, True, False]


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_tfserving_over_grpc(server: Running, http: Http, shape: list[int]) -> None:
    """Without values, with raw ones, with one."""
    with grpcio.insecure_channel(server.grpc) as channel:
        predict = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        for model, values in product(MODELS, ({}, {"tensor_content": b""}, {"float_val": [1.0]})):
            request = TFS.PredictRequest(model_spec={"name": model})
            sent = request.inputs["x"]
            sent.CopyFrom(TFS.TensorProto(dtype=1, **values))
            for size in shape:
                sent.tensor_shape.dim.add(size=size)
            with pytest.raises(grpcio.RpcError) as caught:
                predict(request.SerializeToString(), timeout=WAIT_S)
            assert caught.value.code() is grpcio.StatusCode.INVALID_ARGUMENT, (model, values)


@pytest.mark.parametrize("shape", [one for one in SHAPES if all(0 <= size < 2**32 for size in one)])
def test_grps(server: Running, http: Http, shape: list[int]) -> None:
    """Its axes have 32 bits. Over HTTP, over gRPC and in streams."""
    with grpcio.insecure_channel(server.grpc) as channel:
        predict = channel.unary_unary("/grps.protos.v1.GrpsService/Predict")
        stream = channel.unary_stream("/grps.protos.v1.GrpsService/PredictStreaming")
        for model, values in product(MODELS, ([], [1.0])):
            said = {"name": "x", "shape": shape, "flat_float32": values}
            message = GRPS.GrpsMessage(model=f"{model}-1")
            message.gtensors.tensors.add(dtype="DT_FLOAT32", **said)
            data = message.SerializeToString()
            for reply in (predict(data, timeout=WAIT_S), *stream(data, timeout=WAIT_S)):
                assert GRPS.GrpsMessage.FromString(reply).status.code == 400, (model, values)
            body = {"gtensors": {"tensors": [{"dtype": "DT_FLOAT32", **said}]}}
            headers = {"Content_Type": "application/json"}
            answer = http.post(f"/grps/v1/infer/predict?model={model}-1", body, **headers)
            assert answer.status == 400, answer.body


@pytest.mark.parametrize("key", ["instances", "inputs"])
@pytest.mark.parametrize("model", ["free", "any", "plain"])
def test_tfserving(server: Running, http: Http, model: str, key: str) -> None:
    """Six megabytes of lists with nothing in them, as rows and as a column."""
    body = b'{"%b": [%b[]]}' % (key.encode(), b"[]," * 2_000_000)
    answer = http.ask("POST", f"/v1/models/{model}:predict", body)
    assert answer.status == 400
    assert "empty lists" in answer.error
    body = b'{"%b": [%b[]]}' % (key.encode(), b"[]," * 5000)
    answer = http.ask("POST", f"/v1/models/{model}:predict", body)
    assert answer.status == (200 if model == "any" else 400), answer.error
    if model == "free":
        assert answer.error == "5001 rows without a single element, allowed: up to 1024 (max_queue_rows)"


@pytest.mark.parametrize(
    "dims", [f"dims: {MAX} dims: 0", f"dims: {MAX}", f"dims: {2**60} dims: 0", "dims: 0 " * 300, "dims: -1"]
)
@pytest.mark.parametrize("model", MODELS)
def test_v1(server: Running, http: Http, model: str, dims: str) -> None:
    """Over HTTP and gRPC."""
    header = f'batch_size: 1 input {{ name: "x" {dims} }} output {{ name: "y" }}'
    answer = http.ask("POST", f"/api/infer/{model}", b"", NV_InferRequest=header)
    assert answer.status in (400, 500)
    request = V1.InferRequest(model_name=model, model_version=-1)
    request.meta_data.batch_size = 1
    numbers = [int(word) for word in dims.split() if word != "dims:"]
    request.meta_data.input.add(name="x", dims=numbers)
    request.meta_data.output.add(name="y")
    request.raw_input.append(b"")
    with grpcio.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary("/nvidia.inferenceserver.GRPCService/Infer")
        reply = V1.InferResponse.FromString(infer(request.SerializeToString(), timeout=WAIT_S))
    assert reply.request_status.code != 1


def test_rows_without_elements(server: Running) -> None:
    """As many as may wait are answered, split over batches; one more is not. They fill the queue, so nobody
    else asks meanwhile."""
    with Http(server) as http:
        path = "/v2/models/free/infer"
        answer = http.post(path, {"inputs": [tensor("x", [1024, 0], [], "FP32")]})
        assert (answer.status, answer.json()["outputs"][0]["shape"]) == (200, [1024, 0])
        answer = http.post(path, {"inputs": [tensor("x", [1025, 0], [], "FP32")]})
        assert (answer.status, answer.error) == (
            400,
            "1025 rows without a single element, allowed: up to 1024 (max_queue_rows)",
        )
        answer = http.post(path, {"inputs": [tensor("x", [1025, 1], [2] * 1025, "FP32")]})
        assert (answer.status, answer.json()["outputs"][0]["data"]) == (200, [2] * 1025)


def test_generate(server: Running, http: Http) -> None:
    for model in MODELS:
        body = json.dumps({"x": []}).encode()
        answer = http.ask("POST", f"/v2/models/{model}/generate", body)
        assert answer.status in (200, 400), answer.error
