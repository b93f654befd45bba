"""A dialect over an engine of the test's own, in a thread, and plain clients for it over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fastserve.backends.llm.protocols import TextEngine
from fastserve.dialects.textgen import Textgen
from fastserve.server import Server
from fastserve.serving.dialect import DialectSpec
from fastserve.settings import Listener, Settings, TextgenOptions
from tests.dialects.grps.rig import Deployed
from tests.text_rig import LocalEngine, listening

POST = {"Content-Type": "application/json"}
FOLDER = Path(__file__).parent / "folder"
"""A model's, with nothing but a chat template."""


@dataclass
class Reply:
    """One reply, read whole. `chunks` are the pieces of a chunked one as they came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The payloads of its events."""
        assert self.headers["content-type"].startswith("text/event-stream"), self
        lines = self.body.decode().split("\n\n")
        assert lines.pop() == ""
        return [json.loads(line.removeprefix("data:")) for line in lines]


class Asking:
    """Where a server listens, and how it is asked."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, timeout_s: float = 60) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def ask(self, method: str, path: str, body: bytes | None = None, headers: Any = None) -> Reply:
        with contextlib.closing(self.connect()) as client:
            client.request(method, path, body, dict(headers or {}))
            response = client.getresponse()
            data = response.read()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, data)

    def post(self, path: str, body: Any) -> Reply:
        """JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, data, POST)

    def infer(self, inputs: Any = "hi", stream: bool | None = None, **parameters: Any) -> Reply:
        body = {"inputs": inputs, "parameters": parameters}
        return self.post("/infer", body if stream is None else {**body, "stream": stream})


class Local(Asking):
    """Dialects over one engine, each with options of its own."""

    def __init__(
        self,
        models: dict[str, TextEngine],
        options: TextgenOptions,
        pause_s: float = 0.0,
        *,
        beside: Sequence[DialectSpec[Any]] = (),
        folder: Path = FOLDER,
    ) -> None:
        self.models, self.options, self._pause_s = models, options, pause_s
        self._beside, self._folder = beside, folder
        self.loop = asyncio.new_event_loop()
        # Of many threads each test that makes one more would leave it behind.
        self.loop.set_default_executor(ThreadPoolExecutor(1))
        self._thread = threading.Thread(target=self.loop.run_forever)

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(200)

    async def _open(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self.engine = self._stack.enter_context(LocalEngine())
        self.engine.context.readiness.ready = True
        for name, engine in self.models.items():
            self.engine.add(name, engine, self._folder, pause_s=self._pause_s)
        self.dialect = Textgen(self.engine.context, self.options)
        others = [spec.build(self.engine.context, spec.options()) for spec in self._beside]
        self.port = await self._stack.enter_async_context(listening(self.dialect, *others))

    def __enter__(self) -> Local:
        self._thread.start()
        self.run(asyncio.to_thread(int))
        self.run(self._open())
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.run(self.engine.idle())
        finally:
            self.run(self._stack.aclose())
            self.run(self.loop.shutdown_default_executor())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


class Hosted(Asking):
    """A whole server with the workers of a rig's folder, in a thread of the test's process."""

    def __init__(
        self, folder: Path, options: TextgenOptions, dialects: tuple[str, ...] = ("textgen",), **settings: Any
    ) -> None:
        listener = Listener("127.0.0.1:0", dialects)
        whole = {"http": (listener,), "grpc": (), "drain_s": 5, "drain_delay_s": 0, **settings}
        self.deployed = Deployed(Settings(repository=str(folder), textgen=options, **whole))

    @property
    def server(self) -> Server:
        return self.deployed.server

    def run(self, work: Any) -> Any:
        return self.deployed.run(work)

    def settle(self) -> None:
        """Nothing is outstanding in any arena."""
        self.deployed.settle()

    def __enter__(self) -> Hosted:
        self.deployed.open()
        self.port = self.deployed.port
        return self

    def __exit__(self, kind: Any, *exc: object) -> None:
        try:
            if kind is None:
                self.settle()
        finally:
            self.deployed.close()


RIG_FOLDERS = Path("tests/text/rigs")


def hosted(
    rig: str,
    folder: Path,
    *,
    parameters: dict[str, Any] | None = None,
    frontends: int = 1,
    dialects: tuple[str, ...] = ("textgen",),
    **options: Any,
) -> Hosted:
    """The workers of a rig; `folder` is for a copy of it where its parameters differ."""
    place = RIG_FOLDERS / rig
    if parameters:
        shutil.copytree(place, folder, dirs_exist_ok=True)
        place, config = folder, folder / "m1" / "model.yaml"
        config.write_text(json.dumps({**yaml.safe_load(config.read_text()), "parameters": parameters}))
    return Hosted(place, TextgenOptions(**options), dialects, frontends=frontends)


def local(engine: TextEngine, *, pause_s: float = 0.0, **options: Any) -> Local:
    """One model, m1."""
    return Local({"m1": engine}, TextgenOptions(**options), pause_s)


@contextlib.contextmanager
def served(engine: TextEngine, **options: Any) -> Iterator[Local]:
    with local(engine, **options) as place:
        yield place
