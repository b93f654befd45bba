"""A whole server with this dialect alone on its listeners, models in both forms, and plain clients.

`simple` is there twice: in Triton's form (models.py), which the general path serves, and in our own, whose
rows are dense, so that the fast path does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import yaml
from google.protobuf import text_format

from fastserve.protos import load
from fastserve.server import Server
from fastserve.settings import Listener, Settings
from tests.dialects.triton_v1 import models
from tests.server.rig import WAIT_S, Served

V1 = load("triton_v1")
Reply = tuple[int, dict[str, str], bytes]


@dataclass
class Result:
    """The outcome of an inference over any transport. `status` is "SUCCESS", or code and text."""

    status: str
    header: Any
    raws: list[bytes]


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
        until = time.monotonic() + 60
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

    @property
    def ways(self) -> list[Ask]:
        """How an inference is asked for: `ask(model, header, input bytes...)`."""
        return [self.over_http, self.over_grpc, self.over_stream]

    async def over_http(self, model: str, header: str, *inputs: bytes) -> Result:
        status, headers, body = await self.ask(
            "POST", f"/api/infer/{model}?format=binary", b"".join(inputs), NV_InferRequest=header
        )
        told = text_format.Parse(headers["nv-inferresponse"], V1.InferResponseHeader())
        if status == 400:
            assert body == b""
            return Result(read_status(headers), told, [])
        assert (status, read_status(headers)) == (200, "SUCCESS")
        raws, at = [], 0
        asked = text_format.Parse(header, V1.InferRequestHeader())
        for output, wanted in zip(told.output, asked.output, strict=True):
            size = 0 if wanted.HasField("shared_memory") else output.raw.batch_byte_size
            raws.append(body[at : at + size])
            at += size
        assert V1.InferResponseHeader.FromString(body[at:]) == told
        return Result("SUCCESS", told, raws)

    async def over_grpc(self, model: str, header: str, *inputs: bytes) -> Result:
        return read_response(await self.grpc.Infer(make_request(model, header, *inputs)))

    async def over_stream(self, model: str, header: str, *inputs: bytes) -> Result:
        replies = self.grpc.StreamInfer(iter([make_request(model, header, *inputs)]))
        (reply,) = [reply async for reply in replies]
        return read_response(reply)

    async def until_running(self, folder: Path, model: str) -> None:
        await self.served.until(lambda: models.is_running(folder, model))


Ask = Callable[..., Awaitable[Result]]


def make_request(model: str, header: str, *inputs: bytes) -> Any:
    request = V1.InferRequest(model_name=model, model_version=-1, raw_input=inputs)
    text_format.Parse(header, request.meta_data)
    return request


def read_response(reply: Any) -> Result:
    status = reply.request_status
    assert status.server_id == "inference:0"
    word = V1.RequestStatusCode.Name(status.code)
    text = f'{word} msg: "{status.msg}"' if status.msg else word
    return Result(text, reply.meta_data, list(reply.raw_output))


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
