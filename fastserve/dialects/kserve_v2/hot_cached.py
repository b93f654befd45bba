"""The hot door of a version whose responses are kept: a hit is answered where it is read.

    body bytes --frame--> scratch --key--> kept?  yes: outputs --print--> reply; nothing ran
                                           no: into a place like any request, and what it answers is kept

Requests of the same key as one under way take the general door, which waits for it.
"""

from __future__ import annotations

from functools import partial
from time import monotonic_ns

from fastserve._ext.infer_reply import InferWriter, UnwritableOutput
from fastserve.dialects.kserve_v2.answers import Rooms, client_shape, send, write_answer
from fastserve.dialects.kserve_v2.frames import Frame
from fastserve.dialects.kserve_v2.hot import HotDoor
from fastserve.dialects.kserve_v2.plans import Plan
from fastserve.dialects.kserve_v2.service import Service
from fastserve.engine.cache import CachedDoor, Entry, Form, respond
from fastserve.engine.direct import read_response
from fastserve.engine.lane import Lane, Ticket
from fastserve.errors import ServeError
from fastserve.wire.call import Call

MOST_KNOWN = 64  # of each: heads of keys, forms of answers, writers of replies
MOST_SCRATCH_BYTES = 1 << 20  # larger requests take the general door, which copies nothing twice
Scratch = tuple[bytes, list[memoryview]]  # head of the key, memory for the inputs


def open_hot_door(service: Service, plan: Plan) -> HotDoor | None:
    """The hot door of a version, None for one that does more with a request than run or keep it."""
    door = plan.version.lane
    if not isinstance(door, CachedDoor):
        return HotDoor.of(service, plan)
    if not isinstance(door.inner, Lane) or door.inner.decoupled or plan.decoupled or service.forward_http:
        return None
    return CachedHotDoor(service, plan, door.inner, door)


class CachedHotDoor(HotDoor):
    """The hot door in front of a CachedDoor."""

    def __init__(self, service: Service, plan: Plan, lane: Lane, door: CachedDoor) -> None:
        super().__init__(service, plan, lane)
        self._door = door
        self._key = b""  # of the request that is just being answered
        self._scratches: dict[tuple[Frame, int], Scratch | None] = {}
        self._forms: dict[tuple[Frame, object], tuple[Form, InferWriter | None]] = {}
        self._writers: dict[tuple[Frame, Form], InferWriter] = {}

    def start(self, call: Call, header_bytes: int) -> bool:
        body = call.body
        frame: Frame | None = self._frames.find(body, header_bytes)  # type: ignore[assignment]
        if frame is None or frame.outside:
            return False
        rows = frame.rows
        scratch = self._scratches.get((frame, rows)) or self._open_scratch(frame, rows)
        if scratch is None:
            return False
        head, inputs = scratch
        if not frame.read_into(body, header_bytes, inputs):
            return False
        found = self._door.find(head, inputs)
        if isinstance(found, bytes):
            return self._submit(call, frame, rows, inputs, found)
        if found is not None:
            self._reply_kept(call, frame, found)
        return found is not None

    def _submit(self, call: Call, frame: Frame, rows: int, inputs: list[memoryview], key: bytes) -> bool:
        intake, lane = frame.intake, self._lane
        seat = intake.reserve(rows, frame.note()) if frame.noted else intake.reserve(rows)
        if seat is None:
            self._door.leave(key)
            return False
        place, memory, (offset, _) = seat
        for into, data in zip(memory, inputs, strict=True):
            into[:] = data
        if offset:
            intake.settle(seat)
        ticket = lane.submit(place, rows, self._answer_and_keep, 0, (call, frame, frame.id, key))
        call.on_gone = partial(self._give_up, ticket, key)
        return True

    def _give_up(self, ticket: Ticket, key: bytes) -> None:
        ticket()
        self._door.leave(key)

    def _open_scratch(self, frame: Frame, rows: int) -> Scratch | None:
        """None for what is too large: more rows than a batch, more bytes than are kept for it."""
        if len(self._scratches) >= MOST_KNOWN:
            self._scratches.clear()
        sorts, inputs = frame.sorts(rows), []
        if rows <= self._lane.max_rows and sum(sort[3] for sort in sorts) <= MOST_SCRATCH_BYTES:
            inputs = [memoryview(bytearray(sort[3])) for sort in sorts]
        found = (self._door.keys.head(sorts, frame.wanted), inputs) if inputs else None
        self._scratches[frame, rows] = found
        return found

    def _reply_kept(self, call: Call, frame: Frame, entry: Entry) -> None:
        writer = None if entry.parameters else self._writer(frame, entry.form)
        try:
            if writer is None:
                send(call, *write_answer(self._plan, frame.asked, respond(entry), frame.id, {}))
            else:
                self._write(call, writer, entry.memory, frame.id)
        except ServeError as fault:
            self._service.refuse(call, fault, self.version.model, version=self.version)
            return
        self._requests.add()
        self._duration.observe_ns(monotonic_ns() - call.received_ns)

    def _answer_and_keep(self, ticket: Ticket, error: ServeError | None) -> None:
        call, frame, request_id, key = ticket.context
        ticket.context = call, frame, request_id, None
        self._key = key
        try:
            self._answer(ticket, error)
        finally:
            self._door.leave(key)

    def _reply(self, call: Call, frame: Frame, request_id: str, rooms: Rooms | None, ticket: Ticket) -> None:
        found = frame.outlet.read(ticket.place, ticket.rows)
        if found is None:
            self._reply_plainly(call, frame, request_id, rooms, ticket)
            return
        form, memory = found
        kept, writer = self._forms.get((frame, form)) or self._describe(frame, form)
        self._door.keep(self._key, kept, memory)
        if writer is None:
            self._reply_plainly(call, frame, request_id, rooms, ticket)
        else:
            self._write(call, writer, memory, request_id)

    def _reply_plainly(
        self, call: Call, frame: Frame, request_id: str, rooms: Rooms | None, ticket: Ticket
    ) -> None:
        response = read_response(self._lane, ticket, frame.wanted)
        self._door.keep_response(self._key, response)
        send(call, *write_answer(self._plan, frame.asked, response, request_id, {}))

    def _describe(self, frame: Frame, form: object) -> tuple[Form, InferWriter | None]:
        if len(self._forms) >= MOST_KNOWN:
            self._forms.clear()
        kept = tuple([(name, dtype.code, shape) for name, dtype, shape in frame.outlet.describe(form)])
        found = self._forms[frame, form] = kept, self._writer(frame, kept)
        return found

    def _writer(self, frame: Frame, form: Form) -> InferWriter | None:
        """The writer of replies whose outputs have this form; None when there can be none."""
        found = self._writers.get((frame, form))
        if found is None:
            if len(self._writers) >= MOST_KNOWN:
                self._writers.clear()
            found = self._make_writer(frame, form)
            if found is not None:
                self._writers[frame, form] = found
        return found

    def _make_writer(self, frame: Frame, form: Form) -> InferWriter | None:
        plan = self._plan
        outputs = [
            (name, code, client_shape(plan, name, shape), frame.asked.form(name))
            for name, code, shape in form
        ]
        try:
            return InferWriter(plan.model, str(plan.version.number), outputs)
        except (UnwritableOutput, ValueError):
            return None
