"""POST /api/infer/MODEL[/VERSION]: header in NV-InferRequest, tensors in the body (spec 3); and the general
path of infer over either transport."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastserve.dialects.triton_v1.fast import FastHttp
from fastserve.dialects.triton_v1.header import RequestHeader, read_header
from fastserve.dialects.triton_v1.inputs import Data, check_strings, read_request
from fastserve.dialects.triton_v1.replies import HttpReplies, Replies
from fastserve.dialects.triton_v1.routes import Target
from fastserve.dialects.triton_v1.service import Served, Service
from fastserve.errors import ConfigError, ServeError
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.body_tensors import BodyTensors
from fastserve.serving.paths import LastPath
from fastserve.serving.region_request import RegionRequest
from fastserve.serving.slow_path import answer_slowly
from fastserve.tensor import Tensor
from fastserve.wire.arrived import Arrived
from fastserve.wire.call import Call

HEADER = b"nv-inferrequest"
NO_HEADER = b"The request header should contain 'NV-InferRequest'"


class Infer:
    """The endpoint of one target."""

    __slots__ = ("_available", "_fast", "_name", "_number", "_replies", "_service")

    def __init__(self, service: Service, target: Target) -> None:
        self._service, self._available = service, service.catalog.available
        self._name, self._number = target.name, target.version
        self._replies = HttpReplies(service, binary=target.format == "binary")
        self._fast = LastPath(service.keepers, partial(FastHttp.open, service, self._replies))

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        given: bytes | None = call.head.memo
        if given is None:  # the wire hands equal heads on as one object: they are looked at once
            given = call.head.memo = call.head.find(HEADER)
            if given is None:
                call.reply(400, NO_HEADER, b"")
                return None
        version, fast = self._available(self._name, self._number), self._fast.path
        if fast is None or fast.version is not version:
            fast = self._fast.find(version)
        if fast is not None and fast.start(call, given):
            return None
        return self._answer(call, given)

    def take(self, call: Call, body: Arrived) -> bool:
        """Take a call whose tensors are still in the socket."""
        given, fast = call.head.memo or call.head.find(HEADER), self._fast.path
        if given is None or fast is None or fast.version is not self._available(self._name, self._number):
            return False
        return fast.take(call, given, body)

    def _answer(self, call: Call, given: bytes) -> Coroutine[Any, Any, None] | None:
        """The general path."""
        try:
            header = read_header(given.decode())
        except (ConfigError, UnicodeDecodeError):
            call.reply(400, b"", b"")
            return None
        service, make_data = self._service, partial(BodyTensors, call.body)
        request = GeneralRequest(service, self._replies, call, self._name, self._number, header, make_data)
        return answer_slowly(call, request)


class GeneralRequest(RegionRequest):
    """What the fast path did not know. `make_data` gives the inputs' bytes, for errors that name a model."""

    service: Service

    def __init__(
        self,
        service: Service,
        replies: Replies,
        exchange: Any,
        model: str,
        number: int | None,
        header: RequestHeader,
        make_data: Callable[[str], Data],
        deadline_ns: int = 0,
    ) -> None:
        super().__init__(service)
        self._replies, self._exchange = replies, exchange
        self._model, self._number, self._header = model, number, header
        self._make_data, self._deadline_ns = make_data, deadline_ns
        self._served: Served | None = None

    async def read(self) -> InferRequest:
        service = self.service
        served = self._served = service.find(self._model, self._number)
        self.version = served.view.version
        shared, data = service.regions, self._make_data(self._model)
        large = shared.largest_bytes
        read = service.apart(large, read_request, served.view, self._header, data, shared)
        request, outside = await read
        self.hold(self._header.destinations)
        await self.bring(request, outside)
        request.deadline_ns = self._deadline_ns
        return request

    def check_strings(self, name: str, tensor: Tensor) -> None:
        check_strings(tensor.data, tensor.shape, name, self.version.model)

    async def write(self, response: InferResponse) -> None:
        assert self._served is not None
        size = response.nbytes if self.rooms else 0
        write = self._served.answers.write
        answer = await self.service.apart(size, write, self._header, response.outputs, self.rooms)
        await self.rooms.flush()
        self._replies.answer(self._exchange, self._header.id, answer)

    def answered(self, took_ns: int) -> None:
        assert self._served is not None
        self._served.counts[self._header.batch_size].success.add(took_ns)

    def refused(self, fault: ServeError) -> None:
        served, header = self._served, self._header
        if served is None:
            self.service.traffic.refused(self._model, fault.kind.name)
        else:
            self.service.count_failure(served, header.batch_size, self._exchange.received_ns, fault)
        self._replies.refuse(self._exchange, header.id, fault)
