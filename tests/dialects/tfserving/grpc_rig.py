"""A whole server inside the test's own loop, and TensorFlow Serving's messages, on either transport."""

from __future__ import annotations

import contextlib
import shutil
import struct
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc.aio
import yaml

from fastserve.demo import demo_repository
from fastserve.protos import load
from fastserve.server import Server
from fastserve.settings import AdminOptions, Listener, Settings
from tests.server.rig import Served

TFS = load("tfserving")
PREDICTION, MODELS = "/tensorflow.serving.PredictionService/", "/tensorflow.serving.ModelService/"
FLOAT = TFS.DataType.Value("DT_FLOAT")
HALF = """
class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        return {"y": inputs["x"] / 2 + 2, "y3": inputs["x"] / 2 + 3}
"""


class TfsServed(Served):
    """A server under test, and a channel to it."""

    channel: grpc.aio.Channel

    @property
    def target(self) -> str:
        return "{}:{}".format(*self.server.front.grpc[0].address)

    async def send(self, path: str, data: bytes, **options: Any) -> bytes:
        """A serialized reply to any bytes. Raises AioRpcError."""
        found: bytes = await self.channel.unary_unary(path)(data, **options)
        return found

    async def ask(self, path: str, request: Any, response: str, **options: Any) -> Any:
        """A message for a message. Raises AioRpcError."""
        reply = await self.send(path, request.SerializeToString(), **options)
        return getattr(TFS, response).FromString(reply)

    async def predict(self, *rows: float, model: str = "twice", **options: Any) -> list[float]:
        """The first number of each row of the answer."""
        reply = await self.ask(
            PREDICTION + "Predict", rows_of(*rows, model=model), "PredictResponse", **options
        )
        return list(reply.outputs["y"].float_val)[::2]


@contextlib.asynccontextmanager
async def serving(folder: Path, **changes: Any) -> AsyncIterator[TfsServed]:
    """An open server; afterwards nothing may be outstanding in any arena."""
    settings: dict[str, Any] = {"model_control": "explicit", "load_models": ("*",), "drain_s": 5.0, **changes}
    settings.setdefault("admin", AdminOptions(reload_config=True))
    here = (Listener("127.0.0.1:0"),)
    server = Server(Settings(repository=str(folder), http=here, grpc=here, **settings))
    await server.open()
    served = TfsServed(server)
    try:
        async with grpc.aio.insecure_channel(served.target) as served.channel:
            yield served
        await served.until(served.is_clean)
    finally:
        await server.drain(5)
        served.close()


def rows_of(*rows: float, model: str = "twice", content: bool = False) -> Any:
    """A PredictRequest for a model of tests.server.rig, two numbers a row."""
    request = TFS.PredictRequest()
    request.model_spec.name = model
    values = [value for row in rows for value in (row, 0.5)]
    fill(request.inputs["x"], FLOAT, (len(rows), 2))
    if content:
        request.inputs["x"].tensor_content = struct.pack(f"<{len(values)}f", *values)
    else:
        request.inputs["x"].float_val.extend(values)
    return request


def fill(tensor: Any, number: int, shape: tuple[int, ...]) -> None:
    """The type and the shape of a TensorProto."""
    tensor.dtype = number
    tensor.tensor_shape.SetInParent()
    for size in shape:
        tensor.tensor_shape.dim.add(size=size)


def write_halves(folder: Path) -> None:
    """`default` and `test_model`, as the vectors have them: y = x / 2 + 2 of any shape, version 123."""
    config = yaml.safe_load((demo_repository() / "half_plus_two" / "model.yaml").read_text())
    config["outputs"]["y3"] = config["outputs"]["y"]
    config["signatures"]["serving_default"] = {"outputs": {"y": "y"}}
    config["signatures"]["classify_x2_to_y3"] = {
        "method": "classify",
        "inputs": {"inputs": "x"},
        "outputs": {"scores": "y3"},
        "features": {"x2": "inputs"},
    }
    for name in ("default", "test_model"):
        (folder / name / "123").mkdir(parents=True)
        (folder / name / "123" / "model.py").write_text(HALF)
        (folder / name / "model.yaml").write_text(yaml.safe_dump(config))


def copy_digits(folder: Path) -> None:
    """The demo's classifier."""
    shutil.copytree(demo_repository() / "digits", folder / "digits")


def status_of(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """Code and text of a call that failed."""
    return error.code().name, error.details() or ""


def as_dict(values: Mapping[str, Any]) -> dict[str, Any]:
    """A map field by name."""
    return {name: values[name] for name in values}
