"""The general path of an inference over either transport, and the form of its outputs (spec 3.1, 3.2, 5)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Iterable
from math import prod
from typing import Any, NamedTuple

from fastserve.dialects.kserve.request import HeaderForwarding, InferBody, ReplyOptions
from fastserve.dialects.kserve.service import KServeService
from fastserve.dialects.kserve.validation import make_request
from fastserve.errors import unsupported
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.client_memory import OutputBuffer, OutputBuffers
from fastserve.serving.model_view import Class, ModelView, check_order, classify
from fastserve.serving.slow_path import RegionRequest
from fastserve.serving.traces import RequestTrace
from fastserve.tensor import DTYPES, Tensor, kserve_name


class Inference(RegionRequest):
    """One request. `view` is None until its model is found, `request` until it has passed its checks."""

    service: KServeService
    refusal: str
    """The error text for decoupled models."""

    def __init__(
        self, service: KServeService, forwarding: HeaderForwarding | None, traced: RequestTrace | None = None
    ) -> None:
        super().__init__(service)
        self.forwarding, self.traced = forwarding, traced
        self.view: ModelView | None = None
        self.request: InferRequest | None = None
        self.deadline_ns = 0

    # --- the transport ---------------------------------------------------------------------------------

    @abstractmethod
    def find(self) -> ModelView:
        """Return the version it is for. Raises ServeError."""

    @abstractmethod
    async def read_body(self, view: ModelView) -> InferBody:
        """Return the body as sent. Raises ServeError."""

    @abstractmethod
    def sent_headers(self) -> Iterable[tuple[str, str | bytes]]:
        """Return the headers that may become parameters."""

    @abstractmethod
    def encode(self, view: ModelView, response: InferResponse) -> Any:
        """Return the reply, for `send`. Raises ServeError."""

    # --- the steps -------------------------------------------------------------------------------------

    async def read(self) -> InferRequest:
        view = self.view = self.find()
        if view.decoupled and not view.whole:
            raise unsupported(self.refusal)
        return await self.prepare(view)

    async def prepare(self, view: ModelView) -> InferRequest:
        """Read the body, reserve client memory for outputs, check it against the model. Raises ServeError."""
        service, self.version = self.service, view.version
        body = self.body = await self.read_body(view)
        if self.forwarding:
            self.forwarding.add(self.sent_headers(), body.parameters)
        self.options = ReplyOptions.of(body)
        self.hold(self.options.ranges)
        # Work for a thread: strings are checked one by one, and client memory is read.
        parts = (part for part in body.inputs if part.datatype == "BYTES" or part.range is not None)
        work = sum(min(part.nbytes, view.version.config.max_queue_bytes) for part in parts)
        if work:
            await self.charge(service.regions.count_bytes(view.version, (part.range for part in body.inputs)))
        request = await service.offload(work, make_request, view, body, service.regions)
        outside = {part.name: part.lent for part in body.inputs if part.lent is not None}
        self.bring(request, outside)
        request.deadline_ns = self.deadline_ns
        self.request = request
        return request

    def run(self, request: InferRequest) -> Awaitable[InferResponse]:
        return (self.traced or self.service.engine).infer(self.version, request)

    async def write(self, response: InferResponse) -> None:
        assert self.view is not None
        self.reply = await self.service.offload(response.nbytes, self.encode, self.view, response)


class ReplyOutput(NamedTuple):
    """One output of a reply. `outside`: it is in its client's memory already."""

    name: str
    tensor: Tensor
    outside: bool


def show_outputs(
    view: ModelView, options: ReplyOptions, response: InferResponse, rooms: OutputBuffers
) -> list[ReplyOutput]:
    """Return the outputs in the form the client asked for; fill client memory. Raises ServeError."""
    return [_show(view, options, name, t, rooms.get(name)) for name, t in response.in_order()]


def _show(
    view: ModelView, options: ReplyOptions, name: str, tensor: Tensor, room: OutputBuffer | None
) -> ReplyOutput:
    tensor, part = client_tensor(view, name, tensor), options.parts.get(name)
    if part is not None and part.classes:
        tensor = _best_classes(view, name, tensor, part.classes)
    if room is not None:
        room.put(name, tensor.data)
    return ReplyOutput(name, tensor, outside=room is not None)


def client_tensor(view: ModelView, name: str, tensor: Tensor) -> Tensor:
    """Return an output in the shape clients see."""
    shape = view.client_shape(name, tensor.shape)
    return tensor if shape is tensor.shape else Tensor(tensor.dtype, shape, tensor.data)


def _best_classes(view: ModelView, name: str, tensor: Tensor, most: int) -> Tensor:
    """Return the classification (spec 5): `VALUE:INDEX` or `VALUE:INDEX:LABEL` as BYTES [rows?, classes].

    Raises ServeError for a type that has no order.
    """
    check_order(tensor, "output", kserve_name(tensor.dtype))
    rows = classify(tensor, most, view.labels(name), batching=view.batching)
    shape = (len(rows), min(most, prod(tensor.shape[view.batching :])))
    texts = [_describe(one) for row in rows for one in row]
    packed = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return Tensor(DTYPES["bytes"], shape if view.batching else shape[1:], packed)


def _describe(one: Class) -> bytes:
    number = str(one.value) if isinstance(one.value, int) else f"{one.value:f}"
    return f"{number}:{one.idx}:{one.label}".encode() if one.label else f"{number}:{one.idx}".encode()


def reply_parameters(view: ModelView, options: ReplyOptions, response: InferResponse) -> dict[str, Any]:
    """Return the parameters of a reply; an ensemble repeats the request's sequence."""
    own = {key: value for key, value in response.parameters.items() if isinstance(value, str | int | float)}
    if not view.ensemble:
        return own
    names = ("sequence_id", "sequence_start", "sequence_end")
    return {**{name: getattr(options.parameters, name) for name in names}, **own}
