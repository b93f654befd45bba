"""The fast path of predict: rows of numbers, parsed straight into the batch they will run in.

    body bytes --parse--> rows reserved in shared memory ... worker ... output rows --print--> reply bytes

It takes a body only when everything about it is ordinary: one input and one output of fixed shape,
the default signature, row format, no gzip, a place in the queue. For anything else, errors included,
`start` returns False having left no trace, and the general path reads the body again and finds the
right words. No task, no future and no Python object per number.
"""

from __future__ import annotations

from math import prod
from time import monotonic_ns

from fastserve._ext.json_writer import RowWriter, WriterFault
from fastserve.dialects.tfserving.plans import PredictPlan
from fastserve.dialects.tfserving.service import Service
from fastserve.engine import BatchQueue, Pending, fast_queue_of
from fastserve.errors import ServeError
from fastserve.repository.version import Version
from fastserve.wire.call import Call


class HotDoor:
    """The fast path of one version, for its default signature."""

    __slots__ = (
        "_bare",
        "_decode",
        "_duration",
        "_encode",
        "_items",
        "_model",
        "_plan",
        "_queue",
        "_reader",
        "_requests",
        "_service",
        "_shape",
        "_writer",
        "version",
    )

    def __init__(self, service: Service, version: Version, queue: BatchQueue, plan: PredictPlan) -> None:
        self.version = version
        self._service = service
        self._bare = not service.headers
        self._queue = queue
        self._plan = plan
        self._model = version.model
        self._requests, self._duration = service.traffic.succeeded(version.model, version.number)
        self._decode, self._encode = service.traffic.stages(version.model, version.number)
        self._reader = plan.reader
        spec = next(iter(plan.signature.inputs.values()))
        self._shape = spec.shape or ()
        self._items = prod(self._shape)
        alias, name = plan.outputs[0]
        output = version.outputs[name]
        self._writer = RowWriter(alias, output.dtype.code, output.shape or ())

    @classmethod
    def of(cls, service: Service, version: Version, plan: PredictPlan) -> HotDoor | None:
        """The door of a version, None for one whose rows are not of this kind."""
        queue = fast_queue_of(version)
        single = len(plan.signature.inputs) == len(version.inputs) == 1 and len(plan.outputs) == 1
        if queue is None or not queue.dense or not single:
            return None
        try:
            return cls(service, version, queue, plan)
        except WriterFault:
            return None  # an output REST cannot write: the general path says so

    def start(self, call: Call) -> bool:
        """Take the call, or return False: nothing has happened then."""
        body, queue = call.body, self._queue
        rows = self._reader.count_rows(body, self._items)
        if not 0 < rows <= queue.max_rows:
            return False
        ring = queue.ring
        place = ring.reserve(rows)
        if place < 0:
            return False
        try:
            fault = self._reader.read_into(body, ring.input_rows(place, rows, 0), self._shape, rows)
        except BaseException:
            queue.abandon(place, rows)
            raise
        if fault:
            queue.abandon(place, rows)
            return False
        self._decode.observe_ns(monotonic_ns() - call.received_ns)
        timeout_ns = self._service.timeout_ns
        deadline_ns = call.received_ns + timeout_ns if timeout_ns else 0
        call.on_gone = queue.submit(place, rows, self._answer, deadline_ns, call)
        return True

    def start_raw(self, call: Call) -> bool:
        """The same for a body that is nothing but little-endian rows."""
        queue, raw = self._queue, self._plan.raw
        tensor = raw.read(call.body) if raw is not None else None
        if tensor is None or tensor.shape[0] > queue.max_rows:
            return self.start(call)
        rows = tensor.shape[0]
        place = queue.ring.reserve(rows)
        if place < 0:
            return False
        try:
            queue.ring.input_rows(place, rows, 0)[:] = tensor.data
        except BaseException:
            queue.abandon(place, rows)
            raise
        call.on_gone = queue.submit(place, rows, self._answer, self._service.deadline_ns(call), call)
        return True

    def _answer(self, pending: Pending, error: ServeError | None) -> None:
        call: Call = pending.context
        call.on_gone = (
            None  # and with it the cycle call -> pending -> call, which would wait for the collector
        )
        if error is not None:
            self._service.refuse(call, self._model, error)
            return
        head = call.raw_head() if self._bare else b""
        queue = self._queue
        began_ns = monotonic_ns()
        try:
            outputs = queue.ring.output_rows(pending.place, pending.rows, 0)
            text = self._writer.write(outputs, pending.rows, head)
        finally:
            queue.release(pending)
        if head:
            call.reply_raw(text)
        else:
            call.reply(200, text, headers=self._service.headers)
        now_ns = monotonic_ns()
        took_ns = now_ns - call.received_ns
        self._encode.observe_ns(now_ns - began_ns)
        self._requests.add()
        self._duration.observe_ns(took_ns)
        if self._service.options.monitoring:
            self._service.observe(self._model, "predict", took_ns)
