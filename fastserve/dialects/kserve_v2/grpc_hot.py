"""The fast path of ModelInfer: a request like one that has been answered is not read again.

    message --outline--> (head, id, raw tensors)    the head is known: a version, its rows, its reply's form
            --copy--> memory reserved for its inputs ... worker ... views of its outputs --copy--> reply

A head is every field but the id and the raw tensors (model, version, names, shapes, requested outputs,
parameters), so equal heads make equal requests. Heads are learned from requests that ran on a queue with all
their inputs raw and of fixed size, and nothing of them in client memory or classified. For anything else,
errors included, `start` returns None having left no trace, and the general path reads the message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic_ns
from typing import Any

from fastserve._ext.proto_outline import Outline, write_known
from fastserve._ext.proto_wire import InferMessage, WireFault, write_infer_response
from fastserve.dialects.kserve_v2.answers import client_shape, client_tensor
from fastserve.dialects.kserve_v2.body import InferBody
from fastserve.dialects.kserve_v2.plans import Plan
from fastserve.dialects.kserve_v2.service import Service
from fastserve.engine import (
    BatchQueue,
    Pending,
    fast_queue_of,
    lay_out_inputs,
    lay_out_outputs,
    note_of,
    read_response,
)
from fastserve.errors import Kind, ServeError
from fastserve.repository.version import Version
from fastserve.request import InferRequest
from fastserve.tensor import KSERVE_NAME, Tensor
from fastserve.wire.grpc import Rpc

MOST_HEADS = 256  # remembered; a client that makes up ever new ones only costs itself
MOST_FORMS = 64  # of the answers to one head
# grpcio hands over one call a turn of the loop, so that batches under load would have one row each: a worker
# is woken for those of a few busy turns together.
PATIENCE_NS = 500_000
TOO_LARGE = "the response is too large for a gRPC message"


class HotDoor:
    """What is known of heads. One per front process."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: dict[bytes, Known] = {}
        service.keepers.add(self)

    def forget(self, version: Version) -> None:
        """The version has ended, and nothing here may keep its memory."""
        self._known = {head: known for head, known in self._known.items() if known.version is not version}

    def start(self, outline: Outline, rpc: Rpc) -> Running | None:
        """Take the request, or return None: nothing has happened then."""
        known = self._known.get(outline.head)
        if known is None:
            return None
        if self._service.catalog.available(known.model, known.number) is not known.version:
            del self._known[outline.head]
            return None
        return known.start(outline, rpc)

    def learn(
        self, outline: Outline, plan: Plan, message: InferMessage, body: InferBody, request: InferRequest
    ) -> None:
        """Remember the head of a request that the general path has answered."""
        queue = fast_queue_of(plan.version)
        if queue is None or not _is_ordinary(queue, message, body, request):
            return
        rows = next(iter(request.inputs.values())).shape[0] if plan.max_batch_size else 1
        if 0 < rows <= queue.max_rows:
            if len(self._known) >= MOST_HEADS:
                self._known.clear()
            self._known[outline.head] = Known(self._service, plan, queue, message, request, rows)


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


class Known:
    """One head: the way in of its requests, and their way out."""

    def __init__(
        self,
        service: Service,
        plan: Plan,
        queue: BatchQueue,
        message: InferMessage,
        request: InferRequest,
        rows: int,
    ) -> None:
        version = plan.version
        self.version, self.model = version, version.model
        self.number = version.number if message.model_version else None
        self._service, self._plan, self._queue, self._rows = service, plan, queue, rows
        sent = [given.name for given in message.inputs]
        bare = {n: _without_data(request.inputs[n]) for n in queue.inputs if n in request.inputs}
        self._raws = [sent.index(name) for name in bare]  # in the queue's order, which models may look at
        self._sizes = tuple(message.raw(index)[1] for index in range(message.raw_count))
        self._layout_in = lay_out_inputs(queue, bare, batching=plan.max_batch_size > 0)
        self._layout_out = lay_out_outputs(queue, request.outputs or list(queue.outputs))
        self._request = replace(request, inputs={})
        self._note = note_of(self._request, []) if queue.requests else b""
        self._before = write_infer_response(plan.model, str(version.number), "", None, (), ())
        self._after: dict[Any, bytes] = {}  # what comes between the id and the tensors, by the answer's form
        self._requests, self._duration = service.traffic.succeeded(version.model, version.number)

    def start(self, outline: Outline, rpc: Rpc) -> Running | None:
        if outline.sizes != self._sizes:
            return None
        layout_in, rows, queue = self._layout_in, self._rows, self._queue
        reserved = (
            layout_in.reserve(rows, self._note_of(outline.id)) if queue.requests else layout_in.reserve(rows)
        )
        if reserved is None:
            return None
        place, memory, (offset, _) = reserved
        try:
            for index, view in zip(self._raws, memory, strict=True):
                outline.copy_raw(index, view)
        except BaseException:
            layout_in.abandon(reserved, rows)
            raise
        if offset:
            layout_in.settle(reserved)
        left_s, now_ns = rpc.seconds_left(), monotonic_ns()
        deadline_ns = 0 if left_s is None else now_ns + int(left_s * 1e9)
        running = Running(outline.id, now_ns)
        running.pending = queue.submit(place, rows, self._answer, deadline_ns, running, PATIENCE_NS)
        return running

    def _note_of(self, request_id: str) -> bytes:
        if request_id != self._request.request_id:
            self._request.request_id = request_id
            self._note = note_of(self._request, [])
        return self._note

    def _answer(self, pending: Pending, error: ServeError | None) -> None:
        running: Running = pending.context
        pending.context = None  # and with it the circle running -> pending -> running
        answer = running.answer
        try:
            if error is not None:
                raise error
            try:
                reply = b"" if answer.done() else self._write(pending, running.id)
            finally:
                self._queue.release(pending)
        except Exception as fault:
            if not answer.done():  # it is when the call was cancelled in the turn its answer came
                too_large = isinstance(fault, WireFault | OverflowError)
                answer.set_exception(ServeError(Kind.INVALID_ARGUMENT, TOO_LARGE) if too_large else fault)
            return
        finally:
            del error  # its traceback holds this frame, and the frame what the request brought
        if not answer.done():
            answer.set_result(reply)
            self._requests.add()
            self._duration.observe_ns(monotonic_ns() - running.started_ns)

    def _write(self, pending: Pending, request_id: str) -> bytes:
        found = self._layout_out.read(pending.place, pending.rows)
        if found is None:
            return self._write_plainly(pending, request_id)
        form, memory = found
        after = self._after.get(form) or self._describe(form)
        return write_known(self._before, request_id, after, memory)

    def _describe(self, form: Any) -> bytes:
        if len(self._after) >= MOST_FORMS:
            self._after.clear()
        outputs = [
            (name, KSERVE_NAME[dtype.name], client_shape(self._plan, name, shape), None)
            for name, dtype, shape in self._layout_out.describe(form)
        ]
        after = self._after[form] = write_infer_response("", "", "", None, outputs, ())
        return after

    def _write_plainly(self, pending: Pending, request_id: str) -> bytes:
        """As the general path does it: outputs nobody declared, parameters, one request's error."""
        response = read_response(self._queue, pending, self._request.outputs)
        tensors = [(name, client_tensor(self._plan, name, t)) for name, t in response.outputs.items()]
        outputs = [(name, KSERVE_NAME[t.dtype.name], t.shape, None) for name, t in tensors]
        number, parameters = str(self.version.number), dict(response.parameters)
        raws: Sequence[Any] = [tensor.data for _, tensor in tensors]
        return write_infer_response(self.model, number, request_id, parameters, outputs, raws)  # type: ignore[arg-type]


def _without_data(tensor: Tensor) -> Tensor:
    """A tensor's type and shape, without holding on to the message its data lies in."""
    return Tensor(tensor.dtype, tensor.shape, b"")


class Running:
    """One request in its batch. Await `answer`; a caller that is cancelled cancels the pending."""

    __slots__ = ("answer", "id", "pending", "started_ns")

    pending: Pending

    def __init__(self, id: str, started_ns: int) -> None:
        self.id, self.started_ns = id, started_ns
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
