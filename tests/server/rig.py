"""A whole server inside the test's own loop, on ports of its own, and a plain client for it.

The numbers in a request decide what its model does: PLAIN numbers come back doubled; KILL ends the worker;
KILL_ONCE ends it the first time; HOLD runs until the test calls `Held.release`. Every batch that begins to
run is recorded in the folder's `seen` file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import yaml

from fastserve.engine.engine import Engine
from fastserve.request import InferRequest
from fastserve.server import Server
from fastserve.server.front_pool import FrontLink
from fastserve.settings import AdminOptions, Listener, Settings
from fastserve.tensor import DTYPES, Tensor

WAIT_S = 60.0
KILL, KILL_ONCE, HOLD = -1.0, -2.0, -3.0
SOURCE = """
import os, pathlib, signal, time

class Model:
    def __init__(self, config):
        self.folder = pathlib.Path(config["parameters"]["folder"])
        self.add = config["parameters"].get("add", 0)

    def run(self, inputs):
        x = inputs["x"]
        if x.any():
            with open(self.folder / "seen", "a") as seen:
                seen.write(",".join(str(v) for v in x[:, 0]) + "\\n")
        if -1.0 in x or (-2.0 in x and self.first()):
            os.kill(os.getpid(), signal.SIGKILL)
        until = time.monotonic() + 120
        while -3.0 in x and not (self.folder / "go").exists() and time.monotonic() < until:
            time.sleep(0.001)
        return {"y": x * 2 + self.add}

    def first(self):
        try:
            (self.folder / "killed").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
"""


def run(work: Any, limit_s: float = 200.0) -> None:
    """Run a test on the loop the server runs on."""
    uvloop.run(asyncio.wait_for(work, limit_s))


uvloop.run(asyncio.sleep(0))  # libuv opens a pipe with the process's first loop, for good


def write_model(folder: Path, name: str = "twice", numbers: tuple[int, ...] = (1,), **config: Any) -> Path:
    """Write or rewrite a model; its folder. `config` goes over the defaults of model.yaml."""
    model = folder / name
    for number in numbers:
        (model / str(number)).mkdir(parents=True, exist_ok=True)
        (model / str(number) / "model.py").write_text(SOURCE)
    parameters = {"folder": str(folder), **config.pop("parameters", {})}
    tensor = {"dtype": "float32", "shape": [2]}
    whole = {"backend": "python", "inputs": {"x": tensor}, "outputs": {"y": tensor}, "max_batch_size": 4}
    (model / "model.yaml").write_text(yaml.safe_dump({**whole, **config, "parameters": parameters}))
    return model


def seen(folder: Path) -> list[list[float]]:
    """The first number of each row, for every batch that a worker began to run."""
    path = folder / "seen"
    return (
        [[float(v) for v in line.split(",")] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


@contextlib.asynccontextmanager
async def serving(folder: Path, **changes: Any) -> AsyncIterator[Served]:
    """An open server; afterwards nothing may be outstanding in any arena."""
    settings = {"model_control": "explicit", "load_models": ("*",), "drain_s": 5.0, **changes}
    settings.setdefault("admin", AdminOptions(file_overrides=True, log_settings=True))
    settings.setdefault("http", (Listener("127.0.0.1:0"),))
    settings.setdefault("grpc", ())
    server = Server(Settings(repository=str(folder), **settings))
    await server.open()
    served = Served(server)
    try:
        yield served
        await served.until(served.is_clean)
    finally:
        served.close()  # first: a connection that stays open is given a quiet second
        await server.drain(5)


def open_engine(server: Server) -> Engine:
    """Return the engine that `Served.engine` is; tests/server/scheduling replaces this function."""
    return server.front.engine


class Served:
    """A server under test. `engine` takes requests that come over no network."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.engine = open_engine(server)
        self.port = server.front.http[0].address[1]
        self.clients: list[Client] = []

    @property
    def links(self) -> list[FrontLink]:
        return self.server.fronts.links

    @property
    def pids(self) -> list[int]:
        """The workers, 0 where none is."""
        return [pid for hosted in self.server.host.hosted.values() for pid in hosted.group.pids]

    def is_clean(self) -> bool:
        rings = [hosted.queue.ring for hosted in self.server.host.hosted.values()]
        clean = all(ring.outstanding() == 0 and ring.slab_pages_used() == 0 for ring in rings)
        return clean and not any(getattr(self.engine, "holds", ()))

    async def until(self, true: Callable[[], object]) -> None:
        """Let the loop turn until something is so."""
        async with asyncio.timeout(WAIT_S) if hasattr(asyncio, "timeout") else contextlib.nullcontext():
            while not true():
                await asyncio.sleep(0.002)

    async def client(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    async def ask(self, *rows: float, model: str = "twice") -> tuple[int, Any]:
        """Status and body of one predict on a connection of its own."""
        client = await self.client()
        try:
            return await client.predict(*rows, model=model)
        finally:
            client.close()

    def asking(self, *rows: float, model: str = "twice") -> asyncio.Task[tuple[int, Any]]:
        """Begin `ask` in a task."""
        return asyncio.ensure_future(self.ask(*rows, model=model))

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if self.engine is not self.server.front.engine:
            self.engine.close()


class Client:
    """One keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.headers: dict[str, str] = {}

    def send(self, *rows: float, model: str = "twice") -> None:
        body = json.dumps({"instances": [[row, 0.5] for row in rows]}).encode()
        self.writer.write(
            b"POST /v1/models/%b:predict HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b"
            % (model.encode(), len(body), body)
        )

    async def predict(self, *rows: float, model: str = "twice") -> tuple[int, Any]:
        self.send(*rows, model=model)
        return await self.reply()

    async def get(self, target: str) -> tuple[int, bytes]:
        self.writer.write(b"GET %b HTTP/1.1\r\nHost: t\r\n\r\n" % target.encode())
        return await self.page()

    async def post(self, target: str, body: bytes = b"") -> tuple[int, bytes]:
        head = b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % (target.encode(), len(body))
        self.writer.write(head + body)
        return await self.page()

    async def reply(self) -> tuple[int, Any]:
        """The status and the first number of each row, or the error's text."""
        status, body = await self.page()
        answer = json.loads(body)
        return status, [row[0] for row in answer["predictions"]] if status == 200 else answer["error"]

    async def page(self) -> tuple[int, bytes]:
        """A reply as it is; its headers are in `headers`."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WAIT_S)
        first, *lines = head.decode().split("\r\n")[:-2]
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        size = int(self.headers.get("content-length", 0))
        return int(first.split(" ")[1]), await asyncio.wait_for(self.reader.readexactly(size), WAIT_S)

    def close(self) -> None:
        self.writer.close()


async def ask_one(at: Served, model: str, number: int) -> int:
    """OUT of a model that takes one int32 IN, asked of the engine."""
    version = at.server.catalog.available(model)
    assert version is not None
    tensor = Tensor(DTYPES["int32"], (1, 1), np.array([number], np.int32).tobytes())
    response = await at.engine.infer(version, InferRequest({"IN": tensor}))
    found = int(np.frombuffer(response.outputs["OUT"].data, np.int32)[0])
    response.release()
    return found


def release(folder: Path) -> None:
    """Let batches that HOLD finish."""
    (folder / "go").touch()
