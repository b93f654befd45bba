"""A server in a thread of the test's process, and plain clients for it; afterwards nothing is outstanding."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from fastserve.protos import load
from fastserve.repository.grps_config import read_deployment
from fastserve.server import Server
from fastserve.settings import GrpsOptions, Listener, Settings
from fastserve.settings.grps import grps_overrides
from fastserve.settings.server_settings import load_settings
from tests.running import until

uvloop.run(asyncio.sleep(0))  # libuv opens a pipe with the process's first loop, for good

PREDICT = "/grps/v1/infer/predict"
JSON = {"Content-Type": "application/json"}
BYTES = {"Content-Type": "application/octet-stream"}
GRPS = load("grps")
SERVICE = "/grps.protos.v1.GrpsService/"


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> int:
        return int(self.json["status"]["code"])

    @property
    def message(self) -> str:
        return str(self.json["status"]["msg"])


class Deployed:
    """A server under test."""

    def __init__(self, settings: Settings) -> None:
        self.server = Server(settings)
        self._loop = uvloop.new_event_loop()
        # Of many threads each test that makes one more would leave it behind.
        self._loop.set_default_executor(ThreadPoolExecutor(1))
        self._thread = threading.Thread(target=self._loop.run_forever)

    def open(self) -> None:
        self._thread.start()
        try:
            self.run(asyncio.to_thread(int))  # the thread is there before the first test begins
            self.run(self.server.open())
        except BaseException:
            self._end()
            raise
        self.port = self.server.front.http[0].address[1]
        self.rpc = f"127.0.0.1:{self.server.front.grpc[0].address[1]}" if self.server.front.grpc else ""

    def close(self) -> None:
        self.run(self.server.drain(5))
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(200)

    def is_clean(self) -> bool:
        rings = [hosted.queue.ring for hosted in self.server.host.hosted.values()]
        return all(ring.outstanding() == 0 and ring.slab_pages_used() == 0 for ring in rings)

    def settle(self) -> None:
        until(self.is_clean, "everything was given back")

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, method: str, path: str, body: bytes | None = None, headers: Any = None) -> Reply:
        client = self.connect()
        try:
            client.putrequest(method, path)
            for name, value in (headers or {}).items():
                client.putheader(name, value)
            if body is not None:
                client.putheader("Content-Length", str(len(body)))
            client.endheaders(body)
            response = client.getresponse()
            data = response.read()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, data)
        finally:
            client.close()

    def predict(self, body: Any, query: str = "") -> Reply:
        """A JSON predict."""
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", PREDICT + query, text, JSON)

    def call(self, name: str, **fields: Any) -> Any:
        """One RPC's answer."""
        return GRPS.GrpsMessage.FromString(self.send(name, GRPS.GrpsMessage(**fields).SerializeToString()))

    def send(self, name: str, data: bytes) -> bytes:
        import grpc

        with grpc.insecure_channel(self.rpc, _OPTIONS) as channel:
            return bytes(channel.unary_unary(SERVICE + name)(data, timeout=60))

    def stream(self, **fields: Any) -> list[Any]:
        """Every message of a stream."""
        import grpc

        data = GRPS.GrpsMessage(**fields).SerializeToString()
        with grpc.insecure_channel(self.rpc, _OPTIONS) as channel:
            found = channel.unary_stream(SERVICE + "PredictStreaming")(data, timeout=60)
            return [GRPS.GrpsMessage.FromString(message) for message in found]


_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def settings_of(folder: Path, **options: Any) -> Settings:
    """A deployment's settings, on ports of the system's; `options` are the dialect's."""
    said, _ = grps_overrides(read_deployment(folder).server)
    said |= {"http": [{"address": "127.0.0.1:0", "dialects": ["grps"]}]}
    said |= {"grpc": [{"address": "127.0.0.1:0", "dialects": ["grps"]}]}
    said |= {f"grps.{name}": value for name, value in options.items()}
    return load_settings(None, {**said, "deployment": str(folder), "drain_s": 5, "drain_delay_s": 0})


def repository_of(folder: Path, **options: Any) -> Settings:
    """The settings of an ordinary repository behind the same dialect."""
    listeners = (Listener("127.0.0.1:0", ("grps", "tfserving")),)
    grpc = (Listener("127.0.0.1:0", ("grps",)),)
    return Settings(
        repository=str(folder),
        http=listeners,
        grpc=grpc,
        drain_s=5,
        drain_delay_s=0,
        grps=GrpsOptions(**options),
    )


@contextlib.contextmanager
def deployed(settings: Settings) -> Iterator[Deployed]:
    served = Deployed(settings)
    served.open()
    try:
        yield served
        served.settle()
    finally:
        served.close()
