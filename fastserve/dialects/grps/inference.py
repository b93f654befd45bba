"""A predict as the engine runs it, whichever way it came: one answer, or a stream of them.

a customized model     the whole message goes to it, as one string, and comes back as one
any other              gtensors, a string or bytes become its inputs; its outputs become the like
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from fastserve._ext.flatten import pack_bytes, unpack_bytes
from fastserve.dialects.grps.messages import Sent, read_inputs, write_outputs
from fastserve.dialects.grps.service import GrpsService, speaks_messages
from fastserve.errors import ServeError, internal
from fastserve.protos import load
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.slow_path import SlowRequest
from fastserve.serving.streams import Event, alone, generate
from fastserve.tensor import DTYPES, Tensor

MESSAGE = "message"
WORK = 8  # times what is sent or answered: of other values than floats each becomes an object
Events = AsyncGenerator[Event, None]


@dataclass(slots=True)
class GrpsCall:
    """One predict as read, whichever way it came. `parameters` are a customized model's."""

    version: Version
    sent: Sent
    parameters: dict[str, object] = field(default_factory=dict)
    nbytes: int = 0
    """How large it was as it came."""

    @property
    def message(self) -> Any:
        """Without its tensors' numbers where it is large."""
        return self.sent.message


def make_request(asked: GrpsCall, deadline_ns: int) -> InferRequest:
    """Return the request for the engine. Raises ServeError."""
    version, sent = asked.version, asked.sent
    if not speaks_messages(version):
        inputs = read_inputs(version, sent.message, sent.numbers)
        return InferRequest(inputs, deadline_ns=deadline_ns)
    packed = pack_bytes([sent.serialize()])
    inputs = {MESSAGE: Tensor(DTYPES["bytes"], (1,), packed)}
    return InferRequest(inputs, deadline_ns=deadline_ns, parameters=asked.parameters)


async def prepare(service: GrpsService, asked: GrpsCall, deadline_ns: int) -> InferRequest:
    """Return the request for the engine, made in a thread if it is large. Raises ServeError."""
    return await service.offload(asked.nbytes, make_request, asked, deadline_ns)


class GrpsPredict(SlowRequest):
    """One predict on the general path, for the fast one to learn. `model` is "" until it is known."""

    service: GrpsService
    asked: GrpsCall
    request: InferRequest
    model = ""

    @abstractmethod
    async def ask(self) -> tuple[GrpsCall, int]:
        """Return the call as read, and its deadline in ns. Raises ServeError."""

    @abstractmethod
    def cache_template(self) -> None:
        """It was answered: remember what requests like it are."""

    async def read(self) -> InferRequest:
        self.asked, deadline_ns = await self.ask()
        self.version, self.model = self.asked.version, self.asked.version.model
        self.request = await prepare(self.service, self.asked, deadline_ns)
        return self.request

    def run(self, request: InferRequest) -> Awaitable[InferResponse]:
        return run_once(self.service, self.asked, request)

    def answered(self, took_ns: int) -> None:
        self.service.monitor.took(took_ns)
        self.cache_template()


async def run_once(service: GrpsService, asked: GrpsCall, request: InferRequest) -> InferResponse:
    """The one answer. Raises ServeError in the words of the node that failed, also of a dag."""
    if "http" in asked.parameters and nodes_of(asked.version):
        request = await go_through(service, asked, request.deadline_ns)
    try:
        return await service.engine.infer(asked.version, request)
    except ServeError as fault:
        if fault.step is None:
            raise
        raise fault.step from None


def nodes_of(version: Version) -> list[str]:
    """The models of a dag of several nodes; none for a model."""
    ensemble = version.config.options.ensemble if speaks_messages(version) else None
    return [] if ensemble is None else [step.model for step in ensemble.steps]


async def go_through(service: GrpsService, asked: GrpsCall, deadline_ns: int) -> InferRequest:
    """Run all nodes of a dag but the last, for what an ensemble does not hand on: streams, and HTTP requests.
    What is asked is then of the last; its request. Raises ServeError."""
    catalog = service.engine.catalog  # a client who may use the dag need not be allowed its nodes
    *first, last = [catalog.available(name) or service.find(name) for name in nodes_of(asked.version)]
    own = {name: value for name, value in asked.parameters.items() if name == "http"}
    for version in first:
        step = GrpsCall(version, asked.sent, {**own, "goes_on": True}, asked.nbytes)
        response = await service.engine.infer(version, await prepare(service, step, deadline_ns))
        try:
            asked.sent = Sent(await service.offload(response.nbytes, read_answer, step, response))
            asked.nbytes = response.nbytes
        finally:
            response.release()
    asked.version = last
    return await prepare(service, asked, deadline_ns)


def read_answer(asked: GrpsCall, response: InferResponse) -> Any:
    """The answer's message. Raises ServeError."""
    if not speaks_messages(asked.version):
        return write_outputs(asked.message, response.outputs)
    (tensor,) = response.outputs.values()
    try:
        message = load("grps").GrpsMessage.FromString(unpack_bytes(tensor.data, 1)[0])
    except (DecodeError, ValueError):
        raise internal("the model's answer is no GrpsMessage") from None
    message.ClearField("status")
    return message


async def stream_answers(
    service: GrpsService, asked: GrpsCall, deadline_ns: int, write: Callable[[Any], bytes]
) -> Events:
    """Every part of an answer by `write`, which gets its message. A dag of several nodes streams from its
    last. Raises ServeError for what is wrong with the request."""
    late = bool(nodes_of(asked.version))
    request = InferRequest({}) if late else await prepare(service, asked, deadline_ns)

    async def start_late() -> AsyncGenerator[InferResponse, None]:
        request = await go_through(service, asked, deadline_ns)
        async with aclosing(service.engine.stream(asked.version, request)) as responses:
            async for response in responses:
                yield response

    def start() -> AsyncGenerator[InferResponse, None]:
        if late:
            return start_late()
        if asked.version.config.options.decoupled:
            return service.engine.stream(asked.version, request)
        return alone(lambda: service.engine.infer(asked.version, request))

    return generate(start, lambda response: write(read_answer(asked, response)), service.offload)
