"""Large messages of known requests are read out of the socket into the rows of a batch, in every dialect that
has a `take`, from a client that fills its frames."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from fastserve.net.http2 import arrived_bodies
from fastserve.net.http2.arrived_bodies import ArrivedFrames
from fastserve.protos import load
from fastserve.server import Server
from fastserve.settings import Listener, Settings
from tests.net.grpc.peer import Peer
from tests.net.kit import WAIT_S

V2, TFS, GRPS = load("kserve_v2"), load("tfserving"), load("grps")
VALUES = 3 << 16  # under a stream's first window, and more than two reads
MODEL = """
class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        return {"y": inputs["x"][:, ::65536].copy()}
"""
CONFIG = f"""
backend: python
max_batch_size: 4
inputs: {{x: {{dtype: float32, shape: [{VALUES}]}}}}
outputs: {{y: {{dtype: float32, shape: [3]}}}}
"""


def v2(x: np.ndarray[Any, Any]) -> bytes:
    request = V2.ModelInferRequest(model_name="large")
    request.inputs.add(name="x", datatype="FP32", shape=x.shape)
    request.raw_input_contents.append(x.tobytes())
    return bytes(request.SerializeToString())


def predict(x: np.ndarray[Any, Any], *, content: bool) -> bytes:
    request = TFS.PredictRequest(model_spec={"name": "large"})
    tensor = request.inputs["x"]
    tensor.dtype = TFS.DataType.Value("DT_FLOAT")
    for size in x.shape:
        tensor.tensor_shape.dim.add(size=size)
    if content:
        tensor.tensor_content = x.tobytes()
    else:
        tensor.float_val.extend(x.ravel())
    return bytes(request.SerializeToString())


def grps(x: np.ndarray[Any, Any]) -> bytes:
    message = GRPS.GrpsMessage(model="large-1")
    message.gtensors.tensors.add(name="x", dtype="DT_FLOAT32", shape=x.shape, flat_float32=x.ravel())
    return bytes(message.SerializeToString())


def raw(reply: bytes) -> bytes:
    return bytes(V2.ModelInferResponse.FromString(reply).raw_output_contents[0])


def floats(reply: bytes) -> bytes:
    values = TFS.PredictResponse.FromString(reply).outputs["y"].float_val
    return struct.pack(f"<{len(values)}f", *values)


def flat(reply: bytes) -> bytes:
    (tensor,) = GRPS.GrpsMessage.FromString(reply).gtensors.tensors
    return struct.pack(f"<{len(tensor.flat_float32)}f", *tensor.flat_float32)


Way = tuple[str, Callable[[np.ndarray[Any, Any]], bytes], Callable[[bytes], bytes]]
TFS_PATH = "/tensorflow.serving.PredictionService/Predict"
WAYS: list[Way] = [
    ("/inference.GRPCInferenceService/ModelInfer", v2, raw),
    (TFS_PATH, lambda x: predict(x, content=True), floats),
    (TFS_PATH, lambda x: predict(x, content=False), floats),
    ("/grps.protos.v1.GrpsService/Predict", grps, flat),
]


async def ask(peer: Peer, path: str, message: bytes) -> bytes:
    number = peer.begin(path)
    data = struct.pack(">BI", 0, len(message)) + message
    await peer.read(lambda: peer.h2.local_flow_control_window(number) >= len(data))
    for at in range(0, len(data), 16384):
        peer.h2.send_data(number, data[at : at + 16384], end_stream=at + 16384 >= len(data))
    peer.flush()
    await peer.read(lambda: peer.answers[number].ended)
    answer = peer.answers.pop(number)
    assert answer.status == (0, "")
    return answer.messages[0]


def test_known_requests_are_read_into_the_rows_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request of each kind teaches the server what it is like. Which of the next ones wait in the
    socket as a whole, the kernel decides."""
    (tmp_path / "large" / "1").mkdir(parents=True)
    (tmp_path / "large" / "1" / "model.py").write_text(MODEL)
    (tmp_path / "large" / "model.yaml").write_text(CONFIG)
    found: list[bool] = []
    read = ArrivedFrames._read

    def noting(body: ArrivedFrames, places: list[memoryview]) -> int:
        got = read(body, places)
        found.append(got == body.left)
        return got

    monkeypatch.setattr(ArrivedFrames, "_read", noting)
    monkeypatch.setattr(arrived_bodies, "WAIT_S", WAIT_S)

    async def work() -> None:
        at = (Listener("127.0.0.1:0", ("kserve_v2", "tfserving")), Listener("127.0.0.1:0", ("grps",)))
        server = Server(Settings(repository=str(tmp_path), grpc=at))
        await server.open()
        try:
            for path, build, read_reply in WAYS:
                host, port = server.front.grpc["grps" in path].address
                reader, writer = await asyncio.open_connection(host, port)
                peer = Peer(reader, writer)
                found.clear()
                for seed in range(40):
                    x = np.random.default_rng(seed).random((1, VALUES), np.float32)
                    answer = await ask(peer, path, build(x))
                    assert read_reply(answer) == x[:, ::65536].tobytes()
                    if sum(found) == 3:
                        break
                writer.close()
                assert sum(found) == 3, path
        finally:
            await server.drain(5)

    uvloop.run(work())
