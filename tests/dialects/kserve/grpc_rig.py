"""A whole server inside the test's own loop, and stubs of the protobuf library for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import uvloop

from fastserve.engine.engine import scheduler_of
from fastserve.protos import load
from fastserve.server import Server
from fastserve.settings import AdminOptions, Listener, Settings
from tests.server.rig import Served, write_model

V2 = load("kserve_v2")
SERVICE = "/inference.GRPCInferenceService/"
Refused = grpc.aio.AioRpcError


class GrpcServed(Served):
    """A server under test, and a channel to it."""

    channel: grpc.aio.Channel

    @property
    def target(self) -> str:
        return "{}:{}".format(*self.server.front.grpc[0].address)

    async def send(self, data: bytes, **options: Any) -> Any:
        """One ModelInfer of any bytes; a ModelInferResponse. Raises AioRpcError."""
        call = self.channel.unary_unary(
            SERVICE + "ModelInfer", response_deserializer=V2.ModelInferResponse.FromString
        )
        return await call(data, **options)

    async def infer(self, *rows: float, model: str = "twice", id: str = "", **options: Any) -> list[float]:
        """The first number of each row of the answer."""
        return first_numbers(await self.send(numbers(*rows, model=model, id=id), **options))

    def stream(self, requests: Any, **options: Any) -> Any:
        """ModelStreamInfer."""
        call = self.channel.stream_stream(
            SERVICE + "ModelStreamInfer", response_deserializer=V2.ModelStreamInferResponse.FromString
        )
        return call(requests, **options)


class Shared:
    """One open server for many tests, on a loop of its own. Its models are `twice`, and `slow`, which has no
    fast path."""

    def __init__(self, folder: Path) -> None:
        write_model(folder)
        write_model(folder, "slow")
        self._loop = uvloop.new_event_loop()
        self._serving = serving(folder)

    def __enter__(self) -> Shared:
        self.served = self._loop.run_until_complete(self._serving.__aenter__())
        slow: Any = self.served.server.catalog.available("slow")
        scheduler: Any = scheduler_of(slow)
        scheduler.fast_queue = scheduler.cache_stage = lambda: None
        return self

    def __exit__(self, *fault: Any) -> None:
        try:
            self._loop.run_until_complete(self._serving.__aexit__(*fault))
        finally:
            self._loop.close()

    def run(self, work: Callable[[GrpcServed], Awaitable[None]]) -> None:
        """A test; afterwards nothing may be outstanding."""

        async def to_its_end() -> None:
            await work(self.served)
            await self.served.until(self.served.is_clean)

        self._loop.run_until_complete(asyncio.wait_for(to_its_end(), 90))


@contextlib.asynccontextmanager
async def serving(
    folder: Path, channel_options: Sequence[tuple[str, int]] = (), **changes: Any
) -> AsyncIterator[GrpcServed]:
    """An open server; afterwards nothing may be outstanding in any arena."""
    settings: dict[str, Any] = {"model_control": "explicit", "load_models": ("*",), "drain_s": 5.0, **changes}
    settings.setdefault("admin", AdminOptions(file_overrides=True, log_settings=True))
    here = (Listener("127.0.0.1:0"),)
    server = Server(Settings(repository=str(folder), http=here, grpc=here, **settings))
    await server.open()
    served = GrpcServed(server)
    try:
        async with grpc.aio.insecure_channel(served.target, options=[*channel_options]) as served.channel:
            yield served
        await served.until(served.is_clean)
    finally:
        await server.drain(5)
        served.close()


def numbers(*rows: float, model: str = "twice", id: str = "") -> bytes:
    """A request for a model of tests.server.rig, serialized."""
    request = V2.ModelInferRequest(model_name=model, id=id)
    request.inputs.add(name="x", datatype="FP32", shape=[len(rows), 2])
    request.raw_input_contents.append(pack([value for row in rows for value in (row, 0.5)]))
    data: bytes = request.SerializeToString()
    return data


def pack(values: Sequence[float]) -> bytes:
    tensor = V2.InferTensorContents(fp32_contents=values)  # packed: tag, length, then as a raw tensor
    data: bytes = tensor.SerializeToString()
    return data[-4 * len(values) :]


def first_numbers(reply: Any) -> list[float]:
    return [float(value) for value in memoryview(reply.raw_output_contents[0]).cast("f")[::2]]


async def refused(work: Any) -> tuple[str, str]:
    """Code and text of a call that must fail."""
    with pytest.raises(Refused) as caught:
        await work
    return caught.value.code().name, caught.value.details()
