"""Clients that read an answer of many parts a byte at a time hold a model from nobody: V2 and grps, over HTTP
and gRPC.

Real sockets, and one real worker that runs one request at a time and ends an answer only when it is told that
nobody waits for it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from fastserve.protos import load
from fastserve.settings import Listener, TextgenOptions
from tests.dialects.text_common.serving import Hosted
from tests.dialects.text_common.test_slow_readers import Dripping
from tests.running import until

pytestmark = pytest.mark.waits

V2, GRPS = load("kserve_v2"), load("grps")
TOO_SLOW = b"the answer is read too slowly"
# Each part is of 64 KiB: 64 of them and what lies on the way are more than sockets keep.
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            asked = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().tolist()
            sender.send(self.response(asked))
            while len(asked) > 1 and not request.is_cancelled():
                sender.send(self.response([7.0] * (1 << 14)))
            sender.send(flags=FINAL)

    def response(self, values):
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(values, np.float32))])
"""
CONFIG = """
name: "m1" backend: "python" max_batch_size: 0 model_transaction_policy { decoupled: true }
input { name: "IN" data_type: TYPE_FP32 dims: -1 }
output { name: "OUT" data_type: TYPE_FP32 dims: -1 }
"""
JSON = "application/json"
GENERATE = "/v2/models/m1/generate_stream"


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    folder: Path = tmp_path_factory.mktemp("slow")
    (folder / "m1/1").mkdir(parents=True)
    (folder / "m1/1/model.py").write_text(MODEL)
    (folder / "m1/config.pbtxt").write_text(CONFIG)
    dialects = ("kserve_v2", "grps")
    grpc = (Listener("127.0.0.1:0", dialects),)
    with Hosted(folder, TextgenOptions(), dialects, grpc=grpc) as opened:
        yield opened


def generate(*numbers: float) -> bytes:
    return json.dumps({"IN": list(numbers)}).encode()


def grps(*numbers: float) -> dict[str, Any]:
    tensor = {"name": "IN", "dtype": "DT_FLOAT32", "shape": [len(numbers)], "flat_float32": list(numbers)}
    return {"model": "m1-1", "gtensors": {"tensors": [tensor]}}


def framed(message: Any) -> bytes:
    data = message.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def infer(*numbers: float) -> Any:
    request = V2.ModelInferRequest(model_name="m1")
    request.inputs.add(name="IN", datatype="FP32", shape=[len(numbers)])
    request.raw_input_contents.append(struct.pack(f"<{len(numbers)}f", *numbers))
    return request


def check_others(at: Hosted) -> None:
    """The model stands, and yet somebody else is answered."""
    (hosted,) = at.server.host.hosted.values()
    until(lambda: hosted.queue.ring.slab_pages_used() >= 64 * 16, "its parts wait to be read")
    reply = at.post(GENERATE, generate(5.0))
    assert reply.status == 200, reply
    assert b'"OUT":5.0' in reply.body, reply


STREAMS = {
    "generate_stream": ("http", GENERATE, generate(1.0, 2.0), JSON),
    "grps over HTTP": (
        "http",
        "/grps/v1/infer/predict?streaming=true",
        json.dumps(grps(1.0, 2.0)).encode(),
        JSON,
    ),
    "ModelStreamInfer": (
        "grpc",
        "/inference.GRPCInferenceService/ModelStreamInfer",
        framed(infer(1.0, 2.0)),
        "application/grpc",
    ),
    "PredictStreaming": (
        "grpc",
        "/grps.protos.v1.GrpsService/PredictStreaming",
        framed(ParseDict(grps(1.0, 2.0), GRPS.GrpsMessage())),
        "application/grpc",
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_windows_of_a_byte(at: Hosted, name: str) -> None:
    where, path, body, content_type = STREAMS[name]
    port = at.port if where == "http" else int(at.deployed.rpc.rpartition(":")[2])
    with contextlib.closing(Dripping(port)) as slow:
        number = slow.ask(path, body, content_type)
        slow.drip(number)
        check_others(at)
        slow.drip(number)
        assert TOO_SLOW in slow.rest(number)
    at.settle()


def test_a_receive_buffer_of_a_few_bytes(at: Hosted) -> None:
    with contextlib.closing(socket.socket()) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", at.port))
        body = generate(1.0, 2.0)
        head = f"POST {GENERATE} HTTP/1.1\r\nHost: a\r\nContent-Type: {JSON}\r\nConnection: close\r\n"
        slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert slow.recv(1) == b"H"
        check_others(at)
        last = b""
        while piece := slow.recv(1 << 16):
            last = last[-1000:] + piece
        assert TOO_SLOW in last
    at.settle()
