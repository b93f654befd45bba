"""A whole server with this dialect alone on its listeners, models in both forms, and plain clients.

`simple` is there twice: in Triton's form (models.py), which the general door serves, and in our own, whose
rows are dense, so that the hot door does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import yaml

from fastserve.config import Listener, Settings
from fastserve.protos import load
from fastserve.server import Server
from tests.dialects.triton_v1 import models
from tests.server.rig import WAIT_S, Served

V1 = load("triton_v1")
Reply = tuple[int, dict[str, str], bytes]
DENSE = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs):
        a, b = inputs["INPUT0"], inputs["INPUT1"]
        return {"OUTPUT0": a + b, "OUTPUT1": a - b}
"""
DENSE_HELD = """
import os, time

class Model:
    def __init__(self, config): self.go = config["parameters"]["go"]
    def run(self, inputs):
        open(self.go + ".running", "w").close()
        until = time.monotonic() + 20
        while inputs["IN"].any() and not os.path.exists(self.go) and time.monotonic() < until:
            time.sleep(0.001)
        return {"OUT": inputs["IN"]}
"""


def write_dense(folder: Path, name: str = "simple") -> None:
    """`simple` of the vectors in our own form; `held` as in models.py."""
    (folder / name / "1").mkdir(parents=True)
    if name == "held":
        one = {"dtype": "int32", "shape": [1]}
        config: dict[str, Any] = {"inputs": {"IN": one}, "outputs": {"OUT": one}, "max_batch_size": 1}
        config["parameters"] = {"go": str(folder / name / "go")}
    else:
        row = {"dtype": "int32", "shape": [16]}
        config = {"inputs": {"INPUT0": row, "INPUT1": row}, "outputs": {"OUTPUT0": row, "OUTPUT1": row}}
        config["max_batch_size"] = 8
    (folder / name / "1" / "model.py").write_text(DENSE_HELD if name == "held" else DENSE)
    (folder / name / "model.yaml").write_text(yaml.safe_dump({"backend": "python", **config}))


class Rig:
    """An open server."""

    def __init__(self, server: Server, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.http = server.front.http[0].address
        self.grpc = Stub(channel)
        self.served = Served(server)

    async def ask(self, method: str, target: str, body: bytes = b"", **headers: str) -> Reply:
        """One request on a connection of its own: status, headers in lower case, body."""
        reader, writer = await asyncio.open_connection(*self.http)
        lines = "".join(f"{k.replace('_', '-')}: {v}\r\n" for k, v in headers.items())
        writer.write(f"{method} {target} HTTP/1.1\r\nHost: t\r\n{lines}".encode())
        writer.write(b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        try:
            head, _, rest = (await asyncio.wait_for(reader.read(-1), WAIT_S)).partition(b"\r\n\r\n")
        finally:
            writer.close()
        first, *others = head.decode().split("\r\n")
        found = {name.lower(): value for name, _, value in (line.partition(": ") for line in others)}
        return int(first.split(" ")[1]), found, rest

    async def infer(self, model: str, header: str, body: bytes = b"") -> Reply:
        return await self.ask("POST", f"/api/infer/{model}", body, NV_InferRequest=header)

    async def refusal(self, model: str, header: str, body: bytes = b"") -> str:
        """Code and text of an inference that must fail."""
        status, headers, rest = await self.infer(model, header, body)
        assert (status, rest, headers["content-type"]) == (400, b"", "application/octet-stream")
        return read_status(headers)

    async def until_running(self, folder: Path, model: str) -> None:
        await self.served.until(lambda: models.is_running(folder, model))


def read_status(headers: dict[str, str]) -> str:
    """NV-Status without what every reply has."""
    text, found, number = headers["nv-status"].partition(' server_id: "inference:0" request_id: ')
    assert found
    assert number.isdigit()
    return text.removeprefix("code: ")


class Stub:
    """Every RPC by its name."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        service = V1.pool.FindServiceByName("nvidia.inferenceserver.GRPCService")
        for method in service.methods:
            kind = channel.stream_stream if method.client_streaming else channel.unary_unary
            call = kind(
                f"/{service.full_name}/{method.name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=getattr(V1, method.output_type.name).FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@contextlib.asynccontextmanager
async def rig(folder: Path, **changes: Any) -> AsyncIterator[Rig]:
    """A server over what stands in `folder`; afterwards nothing may be outstanding in any arena."""
    listeners = (Listener("127.0.0.1:0", ("triton_v1",)),)
    settings = {"model_control": "explicit", "load_models": ("*",), "drain_s": 5.0, "allow_client_shm": True}
    server = Server(
        Settings(repository=str(folder), http=listeners, grpc=listeners, **{**settings, **changes})
    )
    await server.open()
    try:
        place = "{}:{}".format(*server.front.grpc[0].address)
        async with grpc.aio.insecure_channel(place) as channel:
            served = Rig(server, channel)
            yield served
        await served.served.until(served.served.is_clean)
    finally:
        await server.drain(5)
