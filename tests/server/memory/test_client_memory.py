"""Inputs in client memory: what a request says of them is checked before anything is read, so a file that is
large and empty costs the front nothing. Over V1 and V2, HTTP and gRPC."""

from __future__ import annotations

import http.client
import json
import os
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from google.protobuf import text_format

from fastserve.protos import load
from tests.running import Running

V1, V2 = load("triton_v1"), load("kserve_v2")
REGION_BYTES, QUEUE_BYTES = 1 << 30, 16 << 20
PEAK_BYTES = 24 << 20  # more than all requests of this file may cost the front
SOURCE = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs): return {"y": inputs["x"]}
"""
MODELS = {"fixed": ("float32", [2]), "free": ("float32", [-1]), "text": ("bytes", [-1])}
DATATYPES = {"float32": "FP32", "bytes": "BYTES"}
# model, axes, bytes, where in the region, what is wrong over V2, and over V1
CASES = [
    ("fixed", [2], REGION_BYTES, 0, "Expected 8, got 1073741824", "expecting 8"),
    ("free", [REGION_BYTES // 4], REGION_BYTES, 0, "takes at most 16777216 (max_queue_bytes)", ""),
    ("text", [1], REGION_BYTES, 0, "takes at most 16777216 (max_queue_bytes)", ""),
    ("text", [1], QUEUE_BYTES, 0, "unexpected number of string elements 2", "are not the strings"),
    ("text", [9], QUEUE_BYTES, 4096, "expecting string of length 4294967295", "are not the strings"),
    ("text", [4], 6, 0, "expecting 4 bytes but only 2 bytes available", "are not the strings"),
]


class Client:
    """One server, and its client's region `mine`."""

    def __init__(self, served: Running, key: str) -> None:
        self.served, self.key = served, key
        self.http = http.client.HTTPConnection(served.http)
        self.channel = grpc.insecure_channel(served.grpc)

    def post(self, target: str, body: bytes = b"", **headers: str) -> tuple[int, bytes, Any]:
        self.http.request("POST", target, body, headers)
        reply = self.http.getresponse()
        return reply.status, reply.read(), reply.headers

    def rpc(self, path: str, request: Any, answer: Any) -> Any:
        call = self.channel.unary_unary(path, type(request).SerializeToString, answer.FromString)
        return call(request, timeout=60)

    def over_v2_http(self, model: str, dims: list[int], size: int, offset: int) -> str:
        """Return the server's error, "" for none."""
        place = {"shared_memory_region": "mine", "shared_memory_byte_size": size}
        place |= {"shared_memory_offset": offset} if offset else {}
        given = {
            "name": "x",
            "shape": [1, *dims],
            "datatype": DATATYPES[MODELS[model][0]],
            "parameters": place,
        }
        status, body, _ = self.post(f"/v2/models/{model}/infer", json.dumps({"inputs": [given]}).encode())
        return "" if status == 200 else str(json.loads(body)["error"])

    def over_v2_grpc(self, model: str, dims: list[int], size: int, offset: int) -> str:
        request = V2.ModelInferRequest(model_name=model)
        given = request.inputs.add(name="x", datatype=DATATYPES[MODELS[model][0]], shape=[1, *dims])
        given.parameters["shared_memory_region"].string_param = "mine"
        given.parameters["shared_memory_byte_size"].int64_param = size
        given.parameters["shared_memory_offset"].int64_param = offset
        try:
            self.rpc("/inference.GRPCInferenceService/ModelInfer", request, V2.ModelInferResponse)
        except grpc.RpcError as fault:
            return str(fault.details())
        return ""

    def over_v1_http(self, model: str, dims: list[int], size: int, offset: int) -> str:
        header = v1_header(model, dims, size, offset)
        _, _, headers = self.post(f"/api/infer/{model}", b"", **{"NV-InferRequest": header})
        return str(headers["NV-Status"]).partition('msg: "')[2]

    def over_v1_grpc(self, model: str, dims: list[int], size: int, offset: int) -> str:
        request = V1.InferRequest(model_name=model, model_version=-1)
        text_format.Parse(v1_header(model, dims, size, offset), request.meta_data)
        reply = self.rpc("/nvidia.inferenceserver.GRPCService/Infer", request, V1.InferResponse)
        return str(reply.request_status.msg)

    @property
    def ways(self) -> dict[str, Any]:
        return {
            "V2 HTTP": self.over_v2_http,
            "V2 gRPC": self.over_v2_grpc,
            "V1 HTTP": self.over_v1_http,
            "V1 gRPC": self.over_v1_grpc,
        }

    def peak_bytes(self) -> int:
        """The most memory the front has had."""
        status = Path(f"/proc/{self.served.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10


def v1_header(model: str, dims: list[int], size: int, offset: int) -> str:
    axes = " ".join(f"dims: {size}" for size in dims)
    place = f'shared_memory {{ name: "mine" offset: {offset} byte_size: {size} }}'
    strings = f"batch_byte_size: {size}" if model == "text" else ""
    return f'batch_size: 1 input {{ name: "x" {axes} {strings} {place} }} output {{ name: "y" }}'


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("client_memory")
    for name, (dtype, shape) in MODELS.items():
        (folder / "models" / name / "1").mkdir(parents=True)
        (folder / "models" / name / "1" / "model.py").write_text(SOURCE)
        tensor = {"dtype": dtype, "shape": shape}
        config = {"backend": "python", "inputs": {"x": tensor}, "outputs": {"y": tensor}, "max_batch_size": 4}
        whole = yaml.safe_dump({**config, "max_queue_bytes": QUEUE_BYTES})
        (folder / "models" / name / "model.yaml").write_text(whole)
    key = f"fastserve_test_{uuid.uuid4().hex}"
    file = Path("/dev/shm") / key
    try:
        with file.open("wb") as made:
            made.truncate(REGION_BYTES)
            os.pwrite(made.fileno(), struct.pack("<8I", *[0] * 8), 4096)
            os.pwrite(made.fileno(), struct.pack("<I", 2**32 - 1), 4096 + 32)  # the ninth string
        with Running(folder / "models", folder / "log", "--allow-client-shm") as served:
            found = Client(served, key)
            region = json.dumps({"key": key, "offset": 0, "byte_size": REGION_BYTES}).encode()
            assert found.post("/v2/systemsharedmemory/region/mine/register", region)[0] == 200
            for way in found.ways.values():  # with what the first request of each takes by itself
                assert way("fixed", [2], 8, 0) == ""
                assert way("text", [2], 8, 0) == ""
            yield found
            found.channel.close()
            found.http.close()
    finally:
        file.unlink(missing_ok=True)


@pytest.mark.parametrize("way", ["V2 HTTP", "V2 gRPC", "V1 HTTP", "V1 gRPC"])
def test_inputs_are_checked_before_they_are_read(client: Client, way: str) -> None:
    before = client.peak_bytes()
    for model, dims, size, offset, over_v2, over_v1 in CASES:
        told = client.ways[way](model, dims, size, offset)
        assert (over_v2 if way.startswith("V2") else over_v1 or over_v2) in told, (model, dims, size, told)
    assert client.peak_bytes() - before < PEAK_BYTES
    assert client.ways[way]("text", [4], 16, 4096) == ""
    assert client.ways[way]("free", [5], 20, 0) == ""


def test_inputs_are_read_up_to_what_the_model_can_take(client: Client) -> None:
    for way in client.ways.values():
        assert way("free", [1 << 19], 2 << 20, 0) == ""
        assert way("text", [1 << 18], 1 << 20, 8192) == ""  # as many strings of nothing
