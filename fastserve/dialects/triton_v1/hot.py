"""The fast path of infer: raw bytes, copied once, straight into the batch they will run in.

    body bytes --copy--> memory reserved for its inputs ... worker ... views of its outputs --copy--> reply

A header is understood once (known.py); requests that bring the same bytes in it are known by them. The door
takes a request whose version runs on a queue, with a body of the right length and room in the queue. For
anything else, errors included, `start` returns False having left no trace, and the general path finds the
right words. No task and no future.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from fastserve.dialects.triton_v1.answers import Answer
from fastserve.dialects.triton_v1.header import (
    REMEMBERED_CHARS,
    REMEMBERED_HEADERS,
    RequestHeader,
    read_header,
)
from fastserve.dialects.triton_v1.inputs import Buffer, build_request
from fastserve.dialects.triton_v1.known import Known, Rooms
from fastserve.dialects.triton_v1.replies import answer, refuse, write_frame
from fastserve.dialects.triton_v1.service import Served, Service, as_v1
from fastserve.engine import BatchQueue, Pending, fast_queue_of, note_of
from fastserve.errors import ConfigError, ServeError
from fastserve.repository.version import Version
from fastserve.wire.call import Call

Met = tuple[Known, int, bytes]  # with the request's id, and what its model is told besides tensors
Held = tuple[Rooms, ExitStack]  # shared memory for outputs, and what to close after the reply
NO_ROOMS: Rooms = {}


class HotDoor:
    """The fast path of one version, for one target."""

    __slots__ = ("_binary", "_met", "_queue", "_served", "_service", "version")

    def __init__(self, service: Service, served: Served, queue: BatchQueue, *, binary: bool) -> None:
        self.version = served.version
        self._service = service
        self._served = served
        self._queue = queue
        self._binary = binary
        self._met: dict[bytes, Met] = {}

    @classmethod
    def of(cls, service: Service, version: Version, *, binary: bool) -> HotDoor | None:
        """The door of a version, None for one that does more with a request than run it."""
        queue = fast_queue_of(version)
        if queue is None:
            return None
        return cls(service, service.serve(version), queue, binary=binary)

    def start(self, call: Call, given: bytes) -> bool:
        """Take the call whose header is `given`, or return False: nothing has happened then."""
        met = self._met.get(given) or self._meet(given)
        if met is None:
            return False
        known, number, note = met
        rows, body, layout_in = known.header.batch_size, call.body, known.layout_in
        if len(body) != known.nbytes or (known.places and not is_there(self._service, known)):
            return False
        reserved = layout_in.reserve(rows, note) if note else layout_in.reserve(rows)
        if reserved is None:
            return False
        place, memory, (offset, _) = reserved
        held: Held | None = None
        try:
            if known.alone:
                memory[0][:] = body
            else:
                self._copy(known, body, memory)
            if known.stores:
                held = hold_rooms(self._service, known)
        except BaseException as error:
            layout_in.abandon(reserved, rows)
            if isinstance(error, ServeError):
                return False  # the general path says what is wrong
            raise
        if offset:
            layout_in.settle(reserved)
        pending = self._queue.submit(place, rows, self._answer, 0, (call, known, number, held))
        call.on_gone = pending
        if held is not None:
            held[1].callback(pending)
            call.on_gone = held[1].close
        return True

    def _copy(self, known: Known, body: Buffer, memory: Sequence[memoryview]) -> None:
        """Inputs from where they are. Raises ServeError."""
        view = memoryview(body)
        for target, source in zip(memory, known.sources, strict=True):
            if source.place is None:
                target[:] = view[source.begin : source.end]
            else:
                self._service.shared.read_into(source.place, target)

    def _meet(self, given: bytes) -> Met | None:
        """Understand a header; None for one that is not for this door."""
        try:
            header = read_header(given.decode())
        except (ConfigError, UnicodeDecodeError):
            return None
        known = self._served.know(self._queue, header)
        if known is None:
            return None
        met = known, header.id, write_note(self._queue, header)
        if not header.id and len(given) <= REMEMBERED_CHARS:  # with an id it is used once
            if len(self._met) >= REMEMBERED_HEADERS:
                self._met.clear()
            self._met[given] = met
        return met

    def _answer(self, pending: Pending, error: ServeError | None) -> None:
        call, known, number, held = pending.context
        call.on_gone = None  # and with it the cycle call -> pending -> call
        service, served, rows = self._service, self._served, known.header.batch_size
        try:
            if error is not None:
                raise error
            try:
                rooms = NO_ROOMS if held is None else held[0]
                self._reply(call, known.read(served.answers, self._queue, pending, number, rooms))
            finally:
                self._queue.release(pending)
        except ServeError as fault:
            service.count_failure(served, rows, call.received_ns, fault)
            refuse(call, service, number, as_v1(fault))
        else:
            service.count_success(served, rows, call.received_ns)
        finally:
            del error  # its traceback holds this frame, and the frame what the request brought
            if held is not None:
                held[1].close()

    def _reply(self, call: Call, found: Answer) -> None:
        trailer = found.trailer(binary=self._binary)
        head = call.raw_head(b"")
        if not head:
            answer(call, self._service, found.line, b"".join((*found.raws, trailer)))
            return
        nbytes = len(trailer)
        for raw in found.raws:
            nbytes += len(raw)
        frame = write_frame(self._service, head, found.line, nbytes)
        call.reply_raw(b"".join((frame, *found.raws, trailer)))


def is_there(service: Service, known: Known) -> bool:
    """Whether the inputs in shared memory are where the header says."""
    try:
        known.look(service.shared)
    except ServeError:
        return False  # the general path says what is wrong
    return True


def hold_rooms(service: Service, known: Known) -> Held | None:
    """Hold what outputs will be written into. Raises ServeError."""
    if not known.stores:
        return None
    with ExitStack() as held:
        return service.hold_outputs(known.header, held), held.pop_all()


def write_note(queue: BatchQueue, header: RequestHeader) -> bytes:
    """What a model that sees requests is told besides tensors."""
    return note_of(build_request(header, {}), []) if queue.requests else b""
