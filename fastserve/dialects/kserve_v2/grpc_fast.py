"""The fast path of ModelInfer: a request like one that has been answered is not read again.

    message --outline--> (head, id, raw tensors)    the head is known: a version, its rows, its reply's form
            --copy--> memory reserved for its inputs ... worker ... views of its outputs --copy--> reply

A head is every field but the id and the raw tensors (model, version, names, shapes, requested outputs,
parameters), so equal heads make equal requests. Heads are learned from requests with all their inputs raw and
of fixed size, and nothing of them in client memory or classified. For anything else, errors included, `start`
returns False having left no trace, and the general path reads the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastserve._ext.proto_outline import Outline, write_known
from fastserve._ext.proto_wire import InferMessage, WireFault, write_infer_response
from fastserve.dialects.kserve_v2.answers import client_shape, client_tensor
from fastserve.dialects.kserve_v2.body import InferBody
from fastserve.dialects.kserve_v2.errors import tell
from fastserve.dialects.kserve_v2.service import Service
from fastserve.engine import BatchQueue, note_of
from fastserve.errors import Kind, ServeError
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.exchange import RpcExchange
from fastserve.serving.model_view import ModelView
from fastserve.serving.paths import open_path
from fastserve.serving.prepared import Described, Memory, PreparedRequest
from fastserve.serving.prepared_cache import PreparedCache
from fastserve.tensor import KSERVE_NAME, Tensor

MOST_HEADS = 256
TOO_LARGE = "the response is too large for a gRPC message"


class Head(PreparedRequest):
    """Messages with one head."""

    def __init__(
        self, plan: ModelView, queue: BatchQueue, message: InferMessage, request: InferRequest, rows: int
    ) -> None:
        self.rows, self.model = rows, plan.model
        self.number = plan.version.number if message.model_version else None
        sent = [given.name for given in message.inputs]
        bare = {
            name: Tensor(request.inputs[name].dtype, request.inputs[name].shape, b"")  # without the message
            for name in queue.inputs
            if name in request.inputs
        }
        self._raws = [sent.index(name) for name in bare]  # in the queue's order, which models may look at
        self.sizes = tuple(message.raw(index)[1] for index in range(message.raw_count))
        self.lay_out(queue, bare, request.outputs, batching=plan.max_batch_size > 0)
        self.noted = queue.requests
        self._request = replace(request, inputs={})
        self._note = note_of(self._request, []) if queue.requests else b""
        self._plan = plan
        self._before = write_infer_response(plan.model, str(plan.version.number), "", None, (), ())

    def note(self, request_id: str) -> bytes:
        if request_id != self._request.request_id:
            self._request.request_id = request_id
            self._note = note_of(self._request, [])
        return self._note

    def fill(self, source: Outline, memory: list[memoryview]) -> bool:
        for index, view in zip(self._raws, memory, strict=True):
            source.copy_raw(index, view)
        return True

    def make_writer(self, described: Described) -> bytes:
        """What comes between the id and the tensors."""
        outputs = [
            (name, KSERVE_NAME[dtype.name], client_shape(self._plan, name, shape), None)
            for name, dtype, shape in described
        ]
        return write_infer_response("", "", "", None, outputs, ())

    def write(
        self, exchange: RpcExchange, writer: bytes, memory: Sequence[Memory], request_id: str, held: None
    ) -> None:
        try:
            message = write_known(self._before, request_id, writer, memory)
        except (WireFault, OverflowError):
            raise ServeError(Kind.INVALID_ARGUMENT, TOO_LARGE) from None
        exchange.reply(message)

    def write_response(
        self, exchange: RpcExchange, response: InferResponse, request_id: str, held: None
    ) -> None:
        tensors = [(name, client_tensor(self._plan, name, t)) for name, t in response.outputs.items()]
        outputs = [(name, KSERVE_NAME[t.dtype.name], t.shape, None) for name, t in tensors]
        number, parameters = str(self._plan.version.number), dict(response.parameters)
        raws: Sequence[Any] = [tensor.data for _, tensor in tensors]
        try:
            message = write_infer_response(self.model, number, request_id, parameters, outputs, raws)  # type: ignore[arg-type]
        except (WireFault, OverflowError):
            raise ServeError(Kind.INVALID_ARGUMENT, TOO_LARGE) from None
        exchange.reply(message)


class Outcome:
    """How RPCs of one model end."""

    answered = None

    def __init__(self, service: Service, model: str) -> None:
        self._traffic, self._model = service.traffic, model

    def refused(self, exchange: RpcExchange, prepared: Head, request_id: str, fault: ServeError) -> None:
        told = tell(fault, request_id)
        self._traffic.refused(self._model, told.kind.name)
        exchange.refuse(told)


class FastGrpc:
    """What is known of heads. One per front process."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._heads: PreparedCache[Head] = PreparedCache(service.keepers, MOST_HEADS)

    def start(self, outline: Outline, exchange: RpcExchange, deadline_ns: int) -> bool:
        """Take the request, or return False: nothing has happened then."""
        known = self._heads.find(outline.head)
        if known is None:
            return False
        path, head = known
        if self._service.catalog.available(head.model, head.number) is not path.version:
            self._heads.drop(outline.head)
            return False
        if outline.sizes != head.sizes:
            return False
        return path.start(exchange, head, outline, outline.id, deadline_ns)

    def learn(
        self,
        outline: Outline,
        plan: ModelView,
        message: InferMessage,
        body: InferBody,
        request: InferRequest,
        patience_ns: int,
    ) -> None:
        """Remember the head of a request that the general path has answered."""
        service, version = self._service, plan.version
        path = open_path(version, service.traffic, Outcome(service, version.model), patience_ns)
        if path is None or not _is_ordinary(path.queue, message, body, request):
            return
        rows = next(iter(request.inputs.values())).shape[0] if plan.max_batch_size else 1
        if 0 < rows <= path.queue.max_rows:
            self._heads.learn(outline.head, path, Head(plan, path.queue, message, request, rows))


def _is_ordinary(queue: BatchQueue, message: InferMessage, body: InferBody, request: InferRequest) -> bool:
    """Whether a request is its head and its raw tensors, and gives the queue what it needs."""
    inputs = request.inputs
    if not inputs or message.raw_count != len(message.inputs) or len(inputs) != len(message.inputs):
        return False
    if any(part.range is not None or part.classes for part in body.outputs):
        return False
    if any(not tensor.dtype.item_bytes or not len(tensor.data) for tensor in inputs.values()):
        return False
    # A model that sees arrays is given all of its inputs; one that sees requests, what was sent.
    return set(inputs) <= set(queue.inputs) and (queue.requests or len(inputs) == len(queue.inputs))
