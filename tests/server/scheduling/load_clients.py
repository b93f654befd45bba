"""Closed-loop clients of a running server: each checks its answer, then sends the next request.

    report = asyncio.run(load(running, model, clients=5, seconds=1.0))

A call that is not answered within `limit_s` ends the load with an AssertionError that names the client.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import grpc

from fastserve.protos import load as load_protos
from tests.running import Running
from tests.server.scheduling.load_models import Loaded

LIMIT_S = 30.0
SEQUENCE = 5  # requests from START to END
MESSAGES = load_protos("kserve_v2")
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_numbers = count(1)
# What a killed worker may cost a caller: its request, or its sequence.
LOST = ("died", "is gone, and the sequence's state with it", "no worker of this model")


@dataclass
class Report:
    """The outcome of one load."""

    answered: int = 0
    slowest_s: float = 0.0
    lost: int = 0  # requests that ended with their worker
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Asking:
    """One request: the numbers it brings, where in a sequence it is, and what must come back."""

    numbers: tuple[float, float]
    answers: tuple[tuple[float, ...], ...]
    parameters: dict[str, Any]


class Caller(Protocol):
    """One client's way to the server."""

    async def ask(self, asking: Asking) -> tuple[tuple[tuple[float, ...], ...], str]:
        """The numbers of each response, and the text of an error."""


class HttpCaller:
    """V2 over a connection of its own; decoupled models by server-sent events."""

    def __init__(self, model: Loaded, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        verb = "generate_stream" if model.streams else "infer"
        self._line = f"POST /v2/models/{model.name}/{verb} HTTP/1.1\r\nHost: t\r\n"
        self._reader, self._writer = reader, writer

    @classmethod
    @asynccontextmanager
    async def open(cls, served: Running, model: Loaded) -> AsyncIterator[HttpCaller]:
        host, _, port = served.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield cls(model, reader, writer)
        finally:
            writer.close()

    async def ask(self, asking: Asking) -> tuple[tuple[tuple[float, ...], ...], str]:
        tensor = {"name": "IN", "shape": [1, 2], "datatype": "FP32", "data": asking.numbers}
        whole = {"inputs": [tensor], "parameters": asking.parameters}
        body = json.dumps(whole).encode()
        head = f"{self._line}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        status, reply = await self._read()
        told = json.loads(reply)
        if status != 200:
            return (), str(told.get("error"))
        return (tuple(told["outputs"][0]["data"]),), ""

    async def _read(self) -> tuple[int, bytes]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        size = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        return int(head.split(b" ", 2)[1]), await self._reader.readexactly(size)


class GrpcCaller:
    """V2 over a channel of its own; decoupled models by a stream."""

    def __init__(self, model: Loaded, channel: grpc.aio.Channel) -> None:
        self._model = model
        make, read = MESSAGES.ModelInferRequest.SerializeToString, MESSAGES.ModelInferResponse.FromString
        self._infer = channel.unary_unary(INFER, make, read)
        self._stream = channel.stream_stream(STREAM, make, MESSAGES.ModelStreamInferResponse.FromString)

    @classmethod
    @asynccontextmanager
    async def open(cls, served: Running, model: Loaded) -> AsyncIterator[GrpcCaller]:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(served.grpc, options=options) as channel:
            yield cls(model, channel)

    async def ask(self, asking: Asking) -> tuple[tuple[tuple[float, ...], ...], str]:
        request = MESSAGES.ModelInferRequest(model_name=self._model.name)
        tensor = request.inputs.add(name="IN", datatype="FP32", shape=[1, 2])
        tensor.contents.fp32_contents.extend(asking.numbers)
        for name, given in asking.parameters.items():
            kind = "bool_param" if isinstance(given, bool) else "int64_param"
            setattr(request.parameters[name], kind, given)
        if self._model.streams:
            return await self._ask_stream(request)
        try:
            return (_numbers_of(await self._infer(request)),), ""
        except grpc.aio.AioRpcError as fault:
            return (), str(fault.details())

    async def _ask_stream(self, request: Any) -> tuple[tuple[tuple[float, ...], ...], str]:
        call = self._stream(iter([request]))
        found = []
        async for response in call:
            if response.error_message:
                return tuple(found), str(response.error_message)
            found.append(_numbers_of(response.infer_response))
        return tuple(found), ""


def _numbers_of(response: Any) -> tuple[float, ...]:
    if response.raw_output_contents:
        return tuple(memoryview(response.raw_output_contents[0]).cast("f"))
    return tuple(response.outputs[0].contents.fp32_contents)


async def load(
    served: Running,
    model: Loaded,
    clients: int,
    seconds: float,
    open_caller: Callable[..., Any] = HttpCaller.open,
    limit_s: float = LIMIT_S,
) -> Report:
    """Ask for so long; raises AssertionError for a call that is not answered in time."""
    report = Report()
    until = time.monotonic() + seconds
    working = [_work(served, model, open_caller, until, report) for _ in range(clients)]
    tasks = [asyncio.ensure_future(work) for work in working]
    try:
        _, hanging = await asyncio.wait(tasks, timeout=seconds + limit_s)
        assert not hanging, f"{model.name}: {len(hanging)} of {clients} clients wait for ever, after {report}"
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return report


async def _work(
    served: Running, model: Loaded, open_caller: Callable[..., Any], until: float, report: Report
) -> None:
    async with open_caller(served, model) as caller:
        await _ask_all(caller, model, report)
        while time.monotonic() < until:
            await _ask_all(caller, model, report)


async def _ask_all(caller: Caller, model: Loaded, report: Report) -> None:
    for asking in _sequence(model):
        began = time.monotonic()
        got, error = await caller.ask(asking)
        report.slowest_s = max(report.slowest_s, time.monotonic() - began)
        if any(text in error for text in LOST):
            report.lost += 1
            return
        report.answered += 1
        if got != asking.answers:
            report.wrong.append(f"{model.name}: {asking} was answered {got} {error}")


def _sequence(model: Loaded) -> list[Asking]:
    """The next requests of a client: a sequence of them, or one."""
    number = next(_numbers)
    if not model.sequences:
        numbers = (float(number % 4000), float(number % 7))
        answer = (numbers[0] * 2, numbers[1] * 2)
        parameters = {"priority": number % 4} if "levels" in model.name else {}
        return [Asking(numbers, (answer,) * (1 + model.streams), parameters)]
    found, total = [], 0.0
    for turn in range(SEQUENCE):
        total += turn + number % 100
        flags = {"sequence_start": turn == 0, "sequence_end": turn == SEQUENCE - 1}
        numbers = (float(turn + number % 100), 0.0)
        found.append(Asking(numbers, ((total, 0.0),), {"sequence_id": number, **flags}))
    return found
