"""The hot door of infer: raw bytes, copied once, straight into the batch they will run in.

    body bytes --copy--> memory reserved for its inputs ... worker ... views of its outputs --copy--> reply

A header is understood once (known.py); requests that bring the same bytes in it are known by them. The door
takes a request whose version runs on a lane, with a body of the right length and room in the queue. For
anything else, errors included, `start` returns False having left no trace, and the general door finds the
right words. No task and no future.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

from fastserve.dialects.triton_v1.answers import write_id
from fastserve.dialects.triton_v1.header import (
    REMEMBERED_CHARS,
    REMEMBERED_HEADERS,
    RequestHeader,
    read_header,
)
from fastserve.dialects.triton_v1.inputs import Buffer, build_request
from fastserve.dialects.triton_v1.known import Known, understand
from fastserve.dialects.triton_v1.replies import answer, refuse, write_frame
from fastserve.dialects.triton_v1.service import Served, Service, as_v1
from fastserve.dialects.triton_v1.shared_memory import Destination
from fastserve.engine.direct import read_response
from fastserve.engine.forms import note_of
from fastserve.engine.lane import Lane, Ticket
from fastserve.errors import ConfigError, ServeError
from fastserve.repository.version import Version
from fastserve.wire.call import Call

K = TypeVar("K")
V = TypeVar("V")
Met = tuple[Known, int, bytes]  # with the request's id, and what its model is told besides tensors
Rooms = tuple[Mapping[str, Destination], ExitStack]  # shared memory for outputs, to be closed after the reply
NO_ROOMS: Mapping[str, Destination] = {}


class HotDoor:
    """The hot door of one version, for one target."""

    __slots__ = ("_binary", "_by_bytes", "_by_meaning", "_lane", "_served", "_service", "version")

    def __init__(self, service: Service, served: Served, lane: Lane, *, binary: bool) -> None:
        self.version = served.version
        self._service = service
        self._served = served
        self._lane = lane
        self._binary = binary
        self._by_bytes: dict[bytes, Met] = {}
        self._by_meaning: dict[object, Known] = {}

    @classmethod
    def of(cls, service: Service, version: Version, *, binary: bool) -> HotDoor | None:
        """The door of a version, None for one that does more with a request than run it."""
        lane = version.lane
        if not isinstance(lane, Lane) or lane.decoupled:
            return None
        return cls(service, service.serve(version), lane, binary=binary)

    def start(self, call: Call, given: bytes) -> bool:
        """Take the call whose header is `given`, or return False: nothing has happened then."""
        met = self._by_bytes.get(given) or self._meet(given)
        if met is None:
            return False
        known, number, note = met
        rows, body, intake = known.header.batch_size, call.body, known.intake
        if len(body) != known.nbytes:
            return False
        seat = intake.reserve(rows, note) if note else intake.reserve(rows)
        if seat is None:
            return False
        place, memory, (offset, _) = seat
        rooms: Rooms | None = None
        if known.shared:
            try:
                rooms = self._look_outside(known, body, memory)
            except ServeError:  # the general door says what is wrong
                intake.abandon(seat, rows)
                return False
        elif len(memory) == 1:
            memory[0][:] = body
        else:
            view = memoryview(body)
            for target, (begin, end, _) in zip(memory, known.sources, strict=True):
                target[:] = view[begin:end]
        if offset:
            intake.settle(seat)
        ticket = self._lane.submit(place, rows, self._answer, 0, (call, known, number, rooms))
        call.on_gone = ticket
        if rooms is not None:
            rooms[1].callback(ticket)
            call.on_gone = rooms[1].close
        return True

    def _look_outside(self, known: Known, body: Buffer, memory: Sequence[memoryview]) -> Rooms:
        """Copy inputs from where they are, and hold what is for outputs. Raises ServeError."""
        shared, view = self._service.shared, memoryview(body)
        for target, (begin, end, place) in zip(memory, known.sources, strict=True):
            if place is None:
                target[:] = view[begin:end]
            else:
                shared.read_into(place, target)
        with ExitStack() as held:
            return self._service.hold_outputs(known.header, held), held.pop_all()

    # --- answers --------------------------------------------------------------------------------------

    def _answer(self, ticket: Ticket, error: ServeError | None) -> None:
        call, known, number, rooms = ticket.context
        call.on_gone = None  # and with it the cycle call -> ticket -> call
        service, served, rows = self._service, self._served, known.header.batch_size
        try:
            if error is not None:
                raise error
            try:
                self._reply(call, known, number, ticket, NO_ROOMS if rooms is None else rooms[0])
            finally:
                self._lane.release(ticket)
        except ServeError as fault:
            service.count_failure(served, rows, call.received_ns, fault)
            refuse(call, service, number, as_v1(fault))
        else:
            service.count_success(served, rows, call.received_ns)
        finally:
            if rooms is not None:
                rooms[1].close()

    def _reply(
        self, call: Call, known: Known, number: int, ticket: Ticket, rooms: Mapping[str, Destination]
    ) -> None:
        found = known.outlet.read(ticket.place, ticket.rows) if known.raw else None
        written = None if found is None else known.written(self._served.answers, found[0])
        if found is None or written is None:
            self._reply_plainly(call, known, number, ticket, rooms)
            return
        line, trailer = written.line, written.binary if self._binary else written.lines
        if number:
            line += b" id: %d" % number
            trailer += write_id(number) if self._binary else b"id: %d\n" % number
        views = found[1]
        if len(views) > 1 or not written.order:
            views = [views[at] for at in written.order]
        self._send(call, line, written.output_bytes + len(trailer), [*views, trailer])

    def _reply_plainly(
        self, call: Call, known: Known, number: int, ticket: Ticket, rooms: Mapping[str, Destination]
    ) -> None:
        """As the general door does it: classes, shared memory, strings, one request's error."""
        response = read_response(self._lane, ticket, known.names)
        header = replace(known.header, id=number)
        found = self._served.answers.write(header, response.outputs, rooms)
        body = [*found.raws, found.trailer(binary=self._binary)]
        self._send(call, found.line.encode(), sum(memoryview(one).nbytes for one in body), body)

    def _send(self, call: Call, line: bytes, nbytes: int, body: Sequence[Buffer]) -> None:
        head = call.raw_head(b"")
        if head:
            call.reply_raw(b"".join((write_frame(self._service, head, line, nbytes), *body)))
        else:
            answer(call, self._service, line, b"".join(body))

    # --- headers ------------------------------------------------------------------------------------

    def _meet(self, given: bytes) -> Met | None:
        """Understand a header; None for one that is not for this door."""
        try:
            header = read_header(given.decode())
        except (ConfigError, UnicodeDecodeError):
            return None
        meaning = (header.batch_size, header.inputs, header.outputs)
        known = self._by_meaning.get(meaning) or understand(self._served.plan, self._lane, header)
        if known is None:
            return None
        met = known, header.id, self._note(header)
        if len(given) <= REMEMBERED_CHARS:
            _make_room(self._by_meaning)[meaning] = known
            if not header.id:  # with an id it is used once
                _make_room(self._by_bytes)[given] = met
        return met

    def _note(self, header: RequestHeader) -> bytes:
        return note_of(build_request(header, {}), []) if self._lane.requests else b""


def _make_room(remembered: dict[K, V]) -> dict[K, V]:
    if len(remembered) >= REMEMBERED_HEADERS:
        remembered.clear()
    return remembered
