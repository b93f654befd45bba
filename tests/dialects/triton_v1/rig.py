"""A whole server with the V1 models of the vectors, and plain clients for it. The dialect is on a listener
of its own, beside the server's."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml

from fastserve.config import GrpcOptions, Limits
from fastserve.dialects.kserve_v2.regions import Range, Regions
from fastserve.dialects.triton_v1.control import Control
from fastserve.dialects.triton_v1.dialect import TritonV1
from fastserve.dialects.triton_v1.service import Service
from fastserve.server.server import Server
from fastserve.wire import HttpListener
from fastserve.wire.grpc import GrpcListener
from tests.server.rig import WAIT_S, serving

SIMPLE = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs):
        a, b = inputs["INPUT0"], inputs["INPUT1"]
        return {"OUTPUT0": a + b, "OUTPUT1": a - b}
"""
STRINGS = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs):
        return {"OUT": inputs["IN"]}
"""
HELD = """
import os, time

class Model:
    def __init__(self, config): self.go = config["parameters"]["go"]
    def run(self, inputs):
        until = time.monotonic() + 20
        while inputs["IN"].any() and not os.path.exists(self.go) and time.monotonic() < until:
            time.sleep(0.001)
        return {"OUT": inputs["IN"]}
"""


def write_held(folder: Path) -> Path:
    """`held`, which runs until the file exists whose path is returned."""
    one, go = {"dtype": "int32", "shape": [1]}, folder / "held" / "go"
    config = {"inputs": {"IN": one}, "outputs": {"OUT": one}, "max_batch_size": 1}
    write_model(folder, "held", HELD, {**config, "parameters": {"go": str(go)}})
    return go


def write_models(folder: Path) -> None:
    """`simple` of the vectors, `strings` that come back, and `free` of any length."""
    tensor = {"dtype": "int32", "shape": [16]}
    pair = {"inputs": {"INPUT0": tensor, "INPUT1": tensor}, "outputs": {"OUTPUT0": tensor, "OUTPUT1": tensor}}
    write_model(folder, "simple", SIMPLE, {**pair, "max_batch_size": 8})
    text = {"dtype": "bytes", "shape": [2]}
    write_model(folder, "strings", STRINGS, {"inputs": {"IN": text}, "outputs": {"OUT": text}})
    free = {"dtype": "float32", "shape": [-1]}
    write_model(
        folder,
        "free",
        STRINGS,
        {"inputs": {"IN": free}, "outputs": {"OUT": free}, "max_batch_size": 0, "class_labels": ["a", "b"]},
    )


def write_model(folder: Path, name: str, source: str, config: dict[str, Any]) -> None:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1" / "model.py").write_text(source)
    (folder / name / "model.yaml").write_text(yaml.safe_dump({"backend": "python", **config}))


class Repository:
    """The server's repository as the dialect sees it."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._repository = server.repository
        self._folder = folder
        self.explicit = server.settings.model_control == "explicit"

    async def names(self) -> list[str]:
        return os.listdir(self._folder)

    async def load(self, name: str, override: None) -> None:
        await self._repository.load(name)

    async def unload(self, name: str, dependents: bool) -> None:
        await self._repository.unload(name)


class Places(Regions):
    """The registry under this dialect's names."""

    def regions(self) -> Any:
        return self.list()

    def unregister_all(self) -> None:
        self.unregister()

    def read(self, place: Any) -> bytes:
        return super().read(Range(place.name, place.offset, place.byte_size))

    def hold(self, place: Any) -> Any:
        return self.holding(Range(place.name, place.offset, place.byte_size))


class Rig:
    """The dialect on its own listeners."""

    def __init__(self, service: Service, http: HttpListener, grpc: GrpcListener) -> None:
        self.service = service
        self.http = http
        self.grpc = grpc

    async def ask(
        self, method: str, target: str, body: bytes = b"", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own: status, headers in lower case, body."""
        reader, writer = await asyncio.open_connection(*self.http.address)
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


@contextlib.asynccontextmanager
async def rig(folder: Path, *, alone: bool = True, **settings: Any) -> AsyncIterator[Rig]:
    """A server with the models above."""
    if not (folder / "simple").exists():
        write_models(folder)
    async with serving(folder, **settings) as served:
        front, regions = served.server.front, Places(allowed=True)
        control = Control(front.engine.catalog, Repository(served.server, folder))
        service = Service(front.engine, front.registry, front.readiness, control, regions)
        dialect = TritonV1(service, alone=alone)
        http = HttpListener("127.0.0.1", 0, [dialect], Limits())
        grpc = GrpcListener(
            "127.0.0.1", 0, dialect.grpc_methods(), GrpcOptions(), descriptors=dialect.grpc_descriptors()
        )
        await http.open()
        await grpc.open()
        try:
            yield Rig(service, http, grpc)
        finally:
            await http.drain(1)
            await grpc.close()
            regions.close()
