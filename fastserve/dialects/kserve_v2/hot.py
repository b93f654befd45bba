"""The hot door of infer: one JSON tensor in, one out, parsed straight into the batch it will run in.

    body bytes --parse--> rows reserved in shared memory ... worker ... output rows --print--> reply bytes

It takes a body only when everything about it is ordinary: one input and one output of fixed shape, no
parameters, no requested outputs, nothing compressed, a place in the queue. For anything else, errors
included, `start` returns False having left no trace, and the general door reads the body again. No task,
no future and no Python object per number.
"""

from __future__ import annotations

from time import monotonic_ns

from fastserve._ext.infer_json import InferReader
from fastserve._ext.infer_reply import InferWriter, UnwritableOutput
from fastserve.dialects.kserve_v2.plans import Plan
from fastserve.dialects.kserve_v2.service import JSON, Service
from fastserve.engine.lane import FULL, Lane, Ticket
from fastserve.errors import ServeError
from fastserve.wire.call import Call


class HotDoor:
    """The hot door of one version."""

    __slots__ = ("_duration", "_lane", "_model", "_reader", "_requests", "_service", "_writer", "version")

    def __init__(self, service: Service, plan: Plan, lane: Lane) -> None:
        self.version = version = plan.version
        self._service = service
        self._lane = lane
        self._model = version.model
        self._requests, self._duration = service.traffic.succeeded(version.model, version.number)
        taken = next(iter(plan.inputs.values()))
        given = next(iter(plan.outputs.values()))
        self._reader = InferReader(taken.name, taken.dtype.code, taken.dims or ())
        number = str(version.number)
        self._writer = InferWriter(self._model, number, given.name, given.dtype.code, given.dims or ())

    @classmethod
    def of(cls, service: Service, plan: Plan) -> HotDoor | None:
        """The door of a version, None for one whose rows are not of this kind."""
        lane = plan.version.lane
        if not isinstance(lane, Lane) or not lane.dense or not plan.max_batch_size or plan.ensemble:
            return None
        sides = (*plan.inputs.values(), *plan.outputs.values())
        if len(plan.inputs) != 1 or len(plan.outputs) != 1 or any(s.dims != s.model_dims for s in sides):
            return None
        try:
            return cls(service, plan, lane)
        except (ValueError, UnwritableOutput):
            return None  # types without a JSON form, and rows without a fixed size

    def start(self, call: Call) -> bool:
        """Take the call, or return False: nothing has happened then."""
        body, lane = call.body, self._lane
        rows = self._reader.count_rows(body)
        if not 0 < rows <= lane.max_rows:
            return False
        ring = lane.ring
        place = ring.reserve(rows)
        if place == FULL:
            return False
        if self._reader.read_into(body, ring.input_rows(place, rows, 0), rows):
            lane.abandon(place, rows)
            return False
        call.on_gone = lane.submit(place, rows, self._answer, 0, call)
        return True

    def _answer(self, ticket: Ticket, error: ServeError | None) -> None:
        call: Call = ticket.context
        call.on_gone = None  # and with it the cycle call -> ticket -> call
        if error is not None:
            self._service.refuse(call, error, self._model, version=self.version)
            return
        head = call.raw_head()
        lane = self._lane
        try:
            outputs = lane.ring.output_rows(ticket.place, ticket.rows, 0)
            text = self._writer.write(outputs, ticket.rows, self._reader.read_id(call.body), head or None)
        finally:
            lane.release(ticket)
        if head:
            call.reply_raw(text)
        else:
            call.reply(200, text, JSON)
        self._requests.add()
        self._duration.observe_ns(monotonic_ns() - call.received_ns)
        self._service.statistics.ran(self.version)
