"""The RPCs of grps.protos.v1.GrpsService (spec 1). A failure is a message too: gRPC's status is OK."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from fastserve.dialects.grps.asking import WORK, Asked, GeneralPredict, read_answer, stream_answers
from fastserve.dialects.grps.codec_grpc import read_message
from fastserve.dialects.grps.errors import NotReady, failure_message, ok_message
from fastserve.dialects.grps.fast_grpc import FastGrpc, failure_of
from fastserve.dialects.grps.metadata import describe_model, describe_server
from fastserve.dialects.grps.routes import RPCS, SERVICE
from fastserve.dialects.grps.service import Service
from fastserve.errors import ServeError, invalid
from fastserve.protos import load
from fastserve.request import InferResponse
from fastserve.serving.exchange import deadline_of, unforeseen
from fastserve.serving.rpc import answer_rpc
from fastserve.wire.grpc import Awaited, Exchange, Method, Rpc

GRPC = "grpc"
NO_NAME = "The model name is empty."


def make_methods(service: Service) -> list[Method]:
    """Every RPC, over bytes."""
    plain: dict[str, Callable[[Service, bytes], bytes]] = {
        "Online": partial(_switch, online=True),
        "Offline": partial(_switch, online=False),
        "CheckLiveness": lambda service, data: ok_message(),
        "CheckReadiness": _check_ready,
        "ServerMetadata": lambda service, data: _text(describe_server(service)),
        "ModelMetadata": _describe_model,
    }
    methods = [_method(name, partial(_answer, service, run)) for name, run in plain.items()]
    predict = Predict(service)
    methods.append(_method("Predict", predict, start=predict.start))
    methods.append(_method("PredictStreaming", partial(stream, service), gives_stream=True))
    return methods


def _method(
    name: str, run: Callable[[bytes, Any], Any], *, gives_stream: bool = False, start: Any = None
) -> Method:
    path = SERVICE + name
    return Method(path, bytes, run, bytes, gives_stream=gives_stream, scope=RPCS[path], start=start)


async def _answer(service: Service, run: Callable[[Service, bytes], bytes], data: bytes, rpc: Rpc) -> bytes:
    try:
        return run(service, data)
    except ServeError as fault:
        return failure_of(service, fault, "")


def _switch(service: Service, data: bytes, *, online: bool) -> bytes:
    service.online.set(GRPC, online)
    return ok_message()


def _check_ready(service: Service, data: bytes) -> bytes:
    if service.online.is_ready(GRPC):
        return ok_message()
    return failure_message(service.options.grpc_not_ready_code, NotReady().message)


def _describe_model(service: Service, data: bytes) -> bytes:
    name = read_message(data).str_data
    if not name:
        raise invalid(NO_NAME)
    return _text(describe_model(service, name))


def _text(text: str) -> bytes:
    return ok_message() + bytes(load("grps").GrpsMessage(str_data=text).SerializeToString())


class Predict:
    """The RPC: the fast path first, and the general one for what it does not take."""

    def __init__(self, service: Service) -> None:
        self._service, self._fast = service, FastGrpc(service)

    def start(self, data: bytes, exchange: Exchange) -> bool:
        """Take a message that the fast path knows, or leave it to the coroutine below."""
        return self._fast.start(data, exchange)

    async def __call__(self, data: bytes, rpc: Rpc) -> bytes:
        """A serialized message, whatever happens."""
        return await answer_rpc(rpc.received_ns, partial(GrpcPredict, self._service, data, rpc, self._fast))


class GrpcPredict(GeneralPredict):
    """One RPC."""

    def __init__(self, service: Service, data: bytes, rpc: Rpc, fast: FastGrpc, exchange: Awaited) -> None:
        self.service, self._exchange, self._data, self._rpc, self._fast = service, exchange, data, rpc, fast

    async def ask(self) -> tuple[Asked, int]:
        asked = await read_asked(self.service, self._data, streaming=False)
        return asked, self.service.sooner_ns(self._rpc.received_ns, deadline_of(self._rpc))

    async def write(self, response: InferResponse) -> None:
        reply = await self.service.apart(WORK * response.nbytes, self._encode, response)
        self._exchange.reply(reply)

    def _encode(self, response: InferResponse) -> bytes:
        return _part(read_answer(self.asked, response))

    def learn(self) -> None:
        self._fast.learn(self._data, self.asked.message, self.request, self.version, self._rpc.patience_ns)

    def refused(self, fault: ServeError) -> None:
        self._exchange.reply(failure_of(self.service, fault, self.model))


async def read_asked(service: Service, data: bytes, *, streaming: bool) -> Asked:
    """A predict's message. Raises ServeError."""
    message = await service.apart(len(data), read_message, data)
    message.ClearField("status")
    told: dict[str, object] = {"streaming": True} if streaming else {}
    return Asked(service.find(message.model), message, told, WORK * len(data))


async def stream(service: Service, data: bytes, rpc: Rpc) -> AsyncIterator[bytes]:
    """A message for each part, as it comes. What goes wrong is one more, and the last."""
    version = None
    try:
        asked = await read_asked(service, data, streaming=True)
        version = asked.version
        deadline_ns = service.sooner_ns(rpc.received_ns, deadline_of(rpc))
        events = await stream_answers(service, asked, deadline_ns, _part)
        async with aclosing(events):
            async for event in events:
                if event.fault is not None:
                    raise event.fault
                yield event.text
    except ServeError as fault:
        yield failure_of(service, fault, version.model if version else "")
    except Exception as error:
        yield failure_of(service, unforeseen(rpc, error), version.model if version else "")
    else:
        service.count(version, rpc.received_ns)


def _part(message: Any) -> bytes:
    return ok_message() + bytes(message.SerializeToString())
