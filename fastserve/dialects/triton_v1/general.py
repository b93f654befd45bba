"""The general path of infer: what the fast one did not know, over either transport."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastserve.dialects.triton_v1.header import RequestHeader
from fastserve.dialects.triton_v1.inputs import Data, read_request
from fastserve.dialects.triton_v1.lookup import find_version
from fastserve.dialects.triton_v1.replies import Replies
from fastserve.dialects.triton_v1.service import Served, Service
from fastserve.errors import ServeError
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.shared_memory import Rooms, hold_rooms
from fastserve.serving.slow_path import SlowRequest


class GeneralRequest(SlowRequest):
    """One of them. `make_data` gives the inputs' bytes, for errors that name the model."""

    def __init__(
        self,
        service: Service,
        replies: Replies,
        exchange: Any,
        model: str,
        number: int,
        header: RequestHeader,
        make_data: Callable[[str], Data],
    ) -> None:
        self._service, self._replies, self._exchange = service, replies, exchange
        self._model, self._number, self._header = model, number, header
        self._make_data = make_data
        self._served: Served | None = None
        self._rooms = Rooms()

    async def read(self) -> InferRequest:
        service = self._service
        served = self._served = service.serve(find_version(service.catalog, self._model, self._number))
        self.version = served.version
        request = read_request(served.plan, self._header, self._make_data(self._model), service.shared)
        self._rooms = hold_rooms(service.shared, self._header.destinations)
        return request

    def run(self, request: InferRequest) -> Awaitable[InferResponse]:
        return self._service.engine.infer(self.version, request)

    async def write(self, response: InferResponse) -> None:
        assert self._served is not None
        answer = self._served.answers.write(self._header, response.outputs, self._rooms)
        self._replies.answer(self._exchange, answer)

    def close(self) -> None:
        self._rooms.close()

    def answered(self, took_ns: int) -> None:
        assert self._served is not None
        self._served.counts.of(self._header.batch_size).success.add(took_ns)

    def refused(self, fault: ServeError) -> None:
        served, header = self._served, self._header
        if served is None:
            self._service.traffic.refused(self._model, fault.kind.name)
        else:
            self._service.count_failure(served, header.batch_size, self._exchange.received_ns, fault)
        self._replies.refuse(self._exchange, header.id, fault)
