"""The four official clients behind one face: every call is awaited, and noted by name.

async with connected("grpc.aio", served) as client:
    await client.infer("simple", ...)
    assert "infer" in client.called
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import queue
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from tests.running import WAIT_S, Running

tritonclient = pytest.importorskip("tritonclient.utils")
shared_memory = pytest.importorskip("tritonclient.utils.shared_memory")

FLAVOURS = ("http", "grpc", "http.aio", "grpc.aio")
BLOCKING = ("http", "grpc")
COUNT = np.arange(16, dtype=np.int32).reshape(1, 16)
ONES = np.ones((1, 16), dtype=np.int32)
Refused = tritonclient.InferenceServerException


def module_of(flavour: str) -> Any:
    """tritonclient.http, .grpc, .http.aio or .grpc.aio."""
    return importlib.import_module(f"tritonclient.{flavour}")


def methods_of(flavour: str) -> list[str]:
    """Every public method of the flavour's client."""
    found = inspect.getmembers(module_of(flavour).InferenceServerClient, callable)
    return [name for name, _ in found if not name.startswith("_")]


class Client:
    """One client. `module` holds its InferInput and InferRequestedOutput."""

    def __init__(self, flavour: str, served: Running) -> None:
        self.flavour, self.served = flavour, served
        self.kind, _, aio = flavour.partition(".")
        self.aio = bool(aio)
        self.module = module_of(self.kind)
        self.real = module_of(flavour).InferenceServerClient(getattr(served, self.kind))
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: Any, **options: Any) -> Any:
            self.called.add(name)
            found = getattr(self.real, name)(*args, **options)
            return await found if inspect.isawaitable(found) else found

        return call

    async def told(self, name: str, *args: Any, **options: Any) -> Any:
        """Return a call's answer as the values of its JSON."""
        plain = {} if self.kind == "http" else {"as_json": True}
        return await getattr(self, name)(*args, **options, **plain)

    def input(self, name: str, data: Any, datatype: str = "", **options: Any) -> Any:
        """An InferInput that holds `data`."""
        kind = datatype or tritonclient.np_to_triton_dtype(data.dtype)
        made = self.module.InferInput(name, list(data.shape), kind)
        made.set_data_from_numpy(data, **options)
        return made

    def pair(self, first: Any = COUNT, second: Any = ONES, **options: Any) -> list[Any]:
        """The inputs of `simple` and `sums`."""
        return [self.input("INPUT0", first, **options), self.input("INPUT1", second, **options)]

    def numbers(self, *given: int) -> list[Any]:
        """The input of `repeat`, `held` and the like."""
        return [self.input("IN", np.array(given, np.int32))]

    def output(self, name: str, **options: Any) -> Any:
        return self.module.InferRequestedOutput(name, **options)


@contextlib.asynccontextmanager
async def connected(flavour: str, served: Running) -> AsyncIterator[Client]:
    """A client, closed in the end; calling close() before is no fault."""
    client = Client(flavour, served)
    try:
        yield client
    finally:
        closed = client.real.close()
        if inspect.isawaitable(closed):
            await closed


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 200))


def warm_up(served: Running) -> None:
    """Has the clients' libraries open what they keep for good."""

    async def ask(flavour: str) -> None:
        async with connected(flavour, served) as client:
            assert await client.is_server_live()

    for flavour in FLAVOURS:
        run(ask(flavour))
    with region(1):  # starts a process that outlives every region
        pass


class Answers:
    """Arguments that a callback of the blocking gRPC client was given."""

    def __init__(self) -> None:
        self._found: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def __call__(self, result: Any, error: Any) -> None:
        self._found.put((result, error))

    def next(self) -> tuple[Any, Any]:
        return self._found.get(timeout=WAIT_S)

    def empty(self) -> bool:
        """Whether every answer so far was looked at."""
        return self._found.empty()


@contextlib.contextmanager
def region(byte_size: int) -> Iterator[tuple[Any, str, str]]:
    """Memory of the client's: its handle, its name for the server, its key."""
    name = f"fastserve-test-{uuid.uuid4().hex}"
    handle = shared_memory.create_shared_memory_region(name, f"/{name}", byte_size)
    try:
        yield handle, name, f"/{name}"
    finally:
        shared_memory.destroy_shared_memory_region(handle)
