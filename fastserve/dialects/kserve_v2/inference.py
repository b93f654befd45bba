"""The general path of an inference, for both transports (spec 3). These say how it is read and written."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Iterable
from typing import Any

from fastserve.dialects.kserve_v2.checks import make_request
from fastserve.dialects.kserve_v2.errors import unsupported
from fastserve.dialects.kserve_v2.parameters import Forwarding
from fastserve.dialects.kserve_v2.request import Asked, InferBody
from fastserve.dialects.kserve_v2.service import Service
from fastserve.dialects.kserve_v2.traces import Traced
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.model_view import ModelView
from fastserve.serving.shared_memory import Rooms, hold_rooms
from fastserve.serving.slow_path import SlowRequest


class Inference(SlowRequest):
    """One request. `view` is None until its model is found, `request` until it has passed its checks."""

    refusal: str
    """Of models that answer several times."""

    def __init__(self, service: Service, forwarding: Forwarding, traced: Traced | None = None) -> None:
        self.service, self.forwarding, self.traced = service, forwarding, traced
        self.view: ModelView | None = None
        self.request: InferRequest | None = None
        self.rooms = Rooms()
        self.deadline_ns = 0

    # --- what a transport says -------------------------------------------------------------------------

    @abstractmethod
    def find(self) -> ModelView:
        """The version it is for. Raises ServeError."""

    @abstractmethod
    async def read_body(self, view: ModelView) -> InferBody:
        """What was sent. Raises ServeError."""

    @abstractmethod
    def sent_headers(self) -> Iterable[tuple[str, str | bytes]]:
        """Those that may become parameters."""

    @abstractmethod
    def encode(self, view: ModelView, response: InferResponse) -> Any:
        """The reply, for `send`. Raises ServeError."""

    # --- the steps -------------------------------------------------------------------------------------

    async def read(self) -> InferRequest:
        view = self.view = self.find()
        if view.decoupled:
            raise unsupported(self.refusal)
        return await self.prepare(view)

    async def prepare(self, view: ModelView) -> InferRequest:
        """Read, hold client memory, check. Raises ServeError."""
        service, self.version = self.service, view.version
        body = self.body = await self.read_body(view)
        if self.forwarding:
            self.forwarding.add(self.sent_headers(), body.parameters)
        self.asked = Asked.of(body)
        self.rooms = hold_rooms(service.regions, self.asked.ranges)
        strings = sum(len(part.data) for part in body.inputs if part.datatype == "BYTES")  # read one by one
        request = await service.apart(strings, make_request, view, body)
        request.deadline_ns = self.deadline_ns
        self.request = request
        return request

    def run(self, request: InferRequest) -> Awaitable[InferResponse]:
        return self.service.infer(self.version, request, self.traced)

    async def write(self, response: InferResponse) -> None:
        assert self.view is not None
        size = sum(memoryview(tensor.data).nbytes for tensor in response.outputs.values())
        self.reply = await self.service.apart(size, self.encode, self.view, response)

    def close(self) -> None:
        self.rooms.close()
