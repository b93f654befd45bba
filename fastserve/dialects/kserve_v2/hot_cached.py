"""The hot door of a version whose responses are kept: a hit is answered where it is read.

    body bytes --frame--> a place's memory --key--> kept?  yes: outputs --print--> reply; the place goes back
                                                    no: the place runs, and what it answers is kept

Requests of the same key as one under way take the general door, which waits for it.
"""

from __future__ import annotations

from functools import partial
from time import monotonic_ns

from fastserve._ext.infer_reply import InferWriter, UnwritableOutput
from fastserve.dialects.kserve_v2.answers import Rooms, client_shape, send, write_answer
from fastserve.dialects.kserve_v2.frames import Frame
from fastserve.dialects.kserve_v2.hot import HotDoor, give_up
from fastserve.dialects.kserve_v2.plans import Plan
from fastserve.dialects.kserve_v2.service import Service
from fastserve.engine.cache import CachedDoor, Entry, Form, Miss, keep_response, respond
from fastserve.engine.direct import read_response
from fastserve.engine.lane import Lane, Ticket
from fastserve.errors import ServeError
from fastserve.wire.call import Call

MOST_KNOWN = 64  # frames, and of each: rows, forms of answers


def open_hot_door(service: Service, plan: Plan) -> HotDoor | None:
    """The hot door of a version, None for one that does more with a request than run or keep it."""
    door = plan.version.lane
    if not isinstance(door, CachedDoor):
        return HotDoor.of(service, plan)
    if not isinstance(door.inner, Lane) or door.inner.decoupled or plan.decoupled or service.forward_http:
        return None
    return CachedHotDoor(service, plan, door.inner, door)


class Known:
    """What the requests of one frame have in common."""

    __slots__ = ("forms", "heads", "writers")

    def __init__(self) -> None:
        self.heads: dict[int, bytes] = {}  # of keys, by rows
        self.forms: dict[object, tuple[Form, InferWriter | None]] = {}  # by the outlet's form
        self.writers: dict[Form, InferWriter | None] = {}


class CachedHotDoor(HotDoor):
    """The hot door in front of a CachedDoor."""

    def __init__(self, service: Service, plan: Plan, lane: Lane, door: CachedDoor) -> None:
        super().__init__(service, plan, lane)
        self._keys, self._cache, self._counts = door.keys, door.cache, door.counts
        self._known: dict[Frame, Known] = {}

    def start(self, call: Call, header_bytes: int) -> bool:
        seated = self._find_seat(call.body, header_bytes)
        if seated is None:
            return False
        frame, seat = seated
        rows, intake = frame.rows, frame.intake
        place, memory, (offset, _) = seat
        try:
            found = None
            if not frame.outside and frame.read_into(call.body, header_bytes, memory):
                known = self._known.get(frame) or self._meet(frame)
                head = known.heads.get(rows) or self._head(known, frame, rows)
                found = self._cache.find(head, memory, self._counts)
        except BaseException:
            intake.abandon(seat, rows)
            raise
        if not isinstance(found, Miss):
            intake.abandon(seat, rows)
            if found is not None:
                self._reply_kept(call, frame, known, found)
            return found is not None
        if offset:
            intake.settle(seat)
        ticket = self._lane.submit(place, rows, self._answer, 0, (call, frame, frame.id, found))
        call.on_gone = partial(give_up, ticket, found)
        return True

    def _meet(self, frame: Frame) -> Known:
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        found = self._known[frame] = Known()
        return found

    def _head(self, known: Known, frame: Frame, rows: int) -> bytes:
        if len(known.heads) >= MOST_KNOWN:
            known.heads.clear()
        found = known.heads[rows] = self._keys.head(frame.sorts(rows), frame.wanted)
        return found

    def _reply_kept(self, call: Call, frame: Frame, known: Known, entry: Entry) -> None:
        form = entry.form
        writer = known.writers.get(form) or self._writer(known, frame, form)
        try:
            if writer is None or entry.parameters:
                send(call, *write_answer(self._plan, frame.asked, respond(entry), frame.id, {}))
            else:
                self._write(call, writer, entry.memory, frame.id)
        except ServeError as fault:
            self._service.refuse(call, fault, self.version.model, version=self.version)
            return
        self._requests.add()
        self._duration.observe_ns(monotonic_ns() - call.received_ns)

    def _reply(
        self, call: Call, frame: Frame, request_id: str, rooms: Rooms | Miss | None, ticket: Ticket
    ) -> None:
        miss: Miss = rooms  # type: ignore[assignment]
        found = frame.outlet.read(ticket.place, ticket.rows)
        if found is None:
            self._reply_and_keep(call, frame, request_id, miss, ticket)
            return
        form, memory = found
        known = self._known.get(frame) or self._meet(frame)
        kept, writer = known.forms.get(form) or self._describe(known, frame, form)
        if writer is None:
            self._reply_and_keep(call, frame, request_id, miss, ticket)
            return
        miss.keep(kept, memory)
        self._write(call, writer, memory, request_id)

    def _reply_and_keep(self, call: Call, frame: Frame, request_id: str, miss: Miss, ticket: Ticket) -> None:
        """As the general door does it: strings, outputs nobody declared, parameters, one request's error."""
        response = read_response(self._lane, ticket, frame.wanted)
        keep_response(miss, response)
        send(call, *write_answer(self._plan, frame.asked, response, request_id, {}))

    def _describe(self, known: Known, frame: Frame, form: object) -> tuple[Form, InferWriter | None]:
        if len(known.forms) >= MOST_KNOWN:
            known.forms.clear()
        kept = tuple([(name, dtype.code, shape) for name, dtype, shape in frame.outlet.describe(form)])
        found = known.forms[form] = kept, self._writer(known, frame, kept)
        return found

    def _writer(self, known: Known, frame: Frame, form: Form) -> InferWriter | None:
        """The writer of replies whose outputs have this form; None when there can be none."""
        if form not in known.writers:
            if len(known.writers) >= MOST_KNOWN:
                known.writers.clear()
            known.writers[form] = self._make_writer(frame, form)
        return known.writers[form]

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
