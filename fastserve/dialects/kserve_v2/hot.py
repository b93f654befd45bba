"""The hot door of infer: a request that is as one before goes straight into the batch it will run in.

    body bytes --frame--> memory reserved for its inputs ... worker ... views of its outputs --print--> reply

Requests are known by their frame (see `frames`): all that is not an id, a number of rows or a value. The
door takes one whose version runs on a lane, with room in the queue and its body not compressed. For anything
else, errors included, `start` returns False having left no trace, and the general door reads the body
again; it hands what it has answered to `learn`. No task, no future and no Python object per number.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial
from time import monotonic_ns
from typing import Protocol

from fastserve._ext.infer_frame import InferFrames
from fastserve._ext.infer_reply import InferWriter, UnwritableOutput
from fastserve.dialects.kserve_v2.answers import (
    BINARY,
    Rooms,
    hold_rooms,
    put_outside,
    send,
    write_answer,
)
from fastserve.dialects.kserve_v2.body import InferBody
from fastserve.dialects.kserve_v2.frames import Frame, learn
from fastserve.dialects.kserve_v2.plans import Plan
from fastserve.dialects.kserve_v2.regions import Range
from fastserve.dialects.kserve_v2.replies import Memory, in_words
from fastserve.dialects.kserve_v2.service import JSON, Service
from fastserve.engine.direct import Seat, read_response
from fastserve.engine.lane import Lane, Ticket
from fastserve.errors import ServeError
from fastserve.request import InferRequest
from fastserve.tensor import Tensor
from fastserve.wire.call import Call

MOST_FRAMES = 32
# Frames never met again, beyond which nothing is learned until so many requests have been missed.
MOST_UNUSED, LEARN_AGAIN = 8, 64


class Closes(Protocol):
    """What a request holds until it is answered or given up."""

    def close(self) -> None:
        """Let go of it."""


class HotDoor:
    """The hot door of one version."""

    def __init__(self, service: Service, plan: Plan, lane: Lane) -> None:
        self.version = version = plan.version
        self._plan = plan
        self._service = service
        self._lane = lane
        self._requests, self._duration = service.traffic.succeeded(version.model, version.number)
        self._frames = InferFrames(MOST_FRAMES)
        self.packing: Set[object] = frozenset()  # heads whose replies are compressed
        self._missed = 0
        self._vain = 0  # requests that had no frame

    @classmethod
    def of(cls, service: Service, plan: Plan) -> HotDoor | None:
        """The door of a version, None for one that does more with a request than run it."""
        lane = plan.version.lane
        if not isinstance(lane, Lane) or lane.decoupled or plan.decoupled or service.forward_http:
            return None
        return cls(service, plan, lane)

    def start(self, call: Call, header_bytes: int) -> bool:
        """Take the call, whose JSON has so many bytes, or return False: nothing has happened then."""
        found = self._find_seat(call.body, header_bytes)
        if found is None:
            return False
        frame, seat = found
        rows, intake = frame.rows, frame.intake
        place, memory, (offset, _) = seat
        rooms: Rooms | None = None
        try:
            filled = frame.read_into(call.body, header_bytes, memory)
            if frame.outside:
                rooms = self._look_outside(frame, rows, memory)
        except ServeError:  # of a region; the general door says what is wrong
            filled = False
        except BaseException:
            intake.abandon(seat, rows)
            raise
        if not filled:
            intake.abandon(seat, rows)
            return False
        if offset:
            intake.settle(seat)
        ticket = self._lane.submit(place, rows, self._answer, 0, (call, frame, frame.id, rooms))
        call.on_gone = ticket
        if rooms is not None:
            call.on_gone = partial(give_up, ticket, rooms)
        return True

    def _find_seat(self, body: Memory, header_bytes: int) -> tuple[Frame, Seat] | None:
        """The frame the body fits, and a place for its rows; None without either."""
        frame: Frame | None = self._frames.find(body, header_bytes)  # type: ignore[assignment]
        if frame is None or frame.rows > self._lane.max_rows:
            return None
        intake = frame.intake
        seat = intake.reserve(frame.rows, frame.note()) if frame.noted else intake.reserve(frame.rows)
        return None if seat is None else (frame, seat)

    def _look_outside(self, frame: Frame, rows: int, memory: list[memoryview]) -> Rooms | None:
        """Copy inputs from client memory, and hold what is for outputs. Raises ServeError."""
        regions = self._service.regions
        for source in frame.sources:
            range = Range(source.region, source.offset, rows * source.row_bytes)
            regions.read_into(range, memory[source.target])
        return hold_rooms(regions, frame.asked.ranges) if frame.asked.ranges else None

    def learn(self, data: Memory, header_bytes: int, body: InferBody, request: InferRequest) -> None:
        """Remember the frame of a request that `start` did not take and the general door has answered."""
        self._missed += 1
        if self._frames.unused() + self._vain >= MOST_UNUSED:
            if self._missed % LEARN_AGAIN:
                return
            self._frames.forget_unused()
            self._vain = 0
        frame = learn(self._plan, self._lane, bytes(memoryview(data)[:header_bytes]), body, request)
        if frame is None:
            self._vain += 1
        else:
            self._frames.add(frame)

    def _answer(self, ticket: Ticket, error: ServeError | None) -> None:
        call, frame, request_id, rooms = ticket.context
        call.on_gone = None  # and with it the cycle call -> ticket -> call
        try:
            if error is not None:
                raise error
            try:
                self._reply(call, frame, request_id, rooms, ticket)
            finally:
                self._lane.release(ticket)
        except ServeError as fault:
            self._service.refuse(call, fault, self.version.model, version=self.version)
        else:
            self._requests.add()
            self._duration.observe_ns(monotonic_ns() - call.received_ns)
        finally:
            del error  # its traceback holds this frame, and the frame what the request brought
            if rooms is not None:
                rooms.close()

    def _reply(self, call: Call, frame: Frame, request_id: str, rooms: Rooms | None, ticket: Ticket) -> None:
        found = frame.outlet.read(ticket.place, ticket.rows)
        if found is None:
            self._reply_plainly(call, frame, request_id, rooms, ticket)
            return
        form, memory = found
        writer = frame.writers.get(form) or frame.add_writer(form)
        if writer is None:
            self._reply_plainly(call, frame, request_id, rooms, ticket)
            return
        if rooms is not None:
            for (name, dtype, shape), view in zip(frame.outlet.describe(form), memory, strict=True):
                if name in rooms:
                    put_outside(name, Tensor(dtype, shape, view), rooms[name])
        self._write(call, writer, memory, request_id)

    def _write(self, call: Call, writer: InferWriter, memory: Sequence[Memory], request_id: str) -> None:
        packs = call.head in self.packing
        head = b"" if packs else call.raw_head(BINARY if writer.binary else JSON)
        try:
            if head:
                call.reply_raw(writer.write(memory, request_id, head))
            else:
                json_bytes, text = writer.write_body(memory, request_id)
                send(call, json_bytes if writer.binary else 0, text)
        except UnwritableOutput as fault:
            raise in_words(fault) from None

    def _reply_plainly(
        self, call: Call, frame: Frame, request_id: str, rooms: Rooms | None, ticket: Ticket
    ) -> None:
        """As the general door does it: strings, outputs nobody declared, parameters, one request's error."""
        response = read_response(self._lane, ticket, frame.wanted)
        send(call, *write_answer(self._plan, frame.asked, response, request_id, rooms or {}))


def give_up(ticket: Ticket, rooms: Closes) -> None:
    """Nobody waits any more."""
    ticket()
    rooms.close()
