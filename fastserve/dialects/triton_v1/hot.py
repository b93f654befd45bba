"""The hot door of infer: raw rows, copied once, straight into the batch they will run in.

    body bytes --copy--> rows reserved in shared memory ... worker ... output rows --copy--> reply bytes

A header is understood once; requests that bring the same bytes in it are known by them. The door takes a
request only when everything about it is ordinary: rows of known size, nothing in shared memory, no classes,
a body of the right length, a place in the queue. For anything else, errors included, `start` returns False
having left no trace, and the general door finds the right words. No task and no future.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from fastserve.dialects.triton_v1.answers import Raw, write_id
from fastserve.dialects.triton_v1.header import (
    REMEMBERED_CHARS,
    REMEMBERED_HEADERS,
    RequestHeader,
    read_header,
)
from fastserve.dialects.triton_v1.inputs import check_header, measure
from fastserve.dialects.triton_v1.replies import answer, refuse, write_frame
from fastserve.dialects.triton_v1.service import Served, Service, as_v1
from fastserve.engine.lane import FULL, Lane, Ticket
from fastserve.errors import ConfigError, ServeError
from fastserve.repository.version import Version
from fastserve.wire.call import Call

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Known:
    """What a header was understood to say, whatever its id: the copies to make, and the answer's text."""

    rows: int
    nbytes: int  # of the body
    cuts: tuple[tuple[int, int, int], ...]  # input column, first byte of the body, last + 1
    columns: tuple[int, ...]  # of the outputs, as wanted
    output_bytes: int
    line: bytes  # NV-InferResponse
    trailer: bytes  # the same header behind the outputs


class HotDoor:
    """The hot door of one version, for one target."""

    __slots__ = ("_binary", "_by_bytes", "_by_meaning", "_lane", "_served", "_service", "version")

    def __init__(self, service: Service, served: Served, lane: Lane, *, binary: bool) -> None:
        self.version = served.version
        self._service = service
        self._served = served
        self._lane = lane
        self._binary = binary
        self._by_bytes: dict[bytes, tuple[Known, int]] = {}  # with the id
        self._by_meaning: dict[object, Known] = {}

    @classmethod
    def of(cls, service: Service, version: Version, *, binary: bool) -> HotDoor | None:
        """The door of a version, None for one whose rows are not of this kind."""
        lane = version.lane
        if not isinstance(lane, Lane) or not lane.dense:
            return None
        return cls(service, service.serve(version), lane, binary=binary)

    def start(self, call: Call, given: bytes) -> bool:
        """Take the call whose header is `given`, or return False: nothing has happened then."""
        met = self._by_bytes.get(given) or self._meet(given)
        if met is None or len(call.body) != met[0].nbytes:
            return False
        known, lane = met[0], self._lane
        place = lane.ring.reserve(known.rows)
        if place == FULL:
            return False
        if len(known.cuts) == 1:
            lane.ring.input_rows(place, known.rows, 0)[:] = call.body
        else:
            body = memoryview(call.body)
            for column, begin, end in known.cuts:
                lane.ring.input_rows(place, known.rows, column)[:] = body[begin:end]
        call.on_gone = lane.submit(place, known.rows, self._answer, 0, (call, *met))
        return True

    def _answer(self, ticket: Ticket, error: ServeError | None) -> None:
        call, known, number = ticket.context
        call.on_gone = None  # and with it the cycle call -> ticket -> call
        service, served = self._service, self._served
        if error is not None:
            service.count_failure(served, known.rows, call.received_ns, error)
            refuse(call, service, number, as_v1(error))
            return
        lane, head = self._lane, call.raw_head(b"")
        line, trailer = known.line, known.trailer
        if number:
            line += b" id: %d" % number
            trailer += write_id(number) if self._binary else b"id: %d\n" % number
        frame = write_frame(service, head, line, known.output_bytes + len(trailer))
        try:
            outputs = [lane.ring.output_rows(ticket.place, ticket.rows, column) for column in known.columns]
            message = b"".join((frame, *outputs, trailer))
        finally:
            lane.release(ticket)
        if head:
            call.reply_raw(message)
        else:
            answer(call, service, line, message)
        service.count_success(served, known.rows, call.received_ns)

    # --- headers ------------------------------------------------------------------------------------

    def _meet(self, given: bytes) -> tuple[Known, int] | None:
        """Understand a header; None for one that is not for this door."""
        try:
            header = read_header(given.decode())
        except (ConfigError, UnicodeDecodeError):
            return None
        meaning = (header.batch_size, header.inputs, header.outputs)
        known = self._by_meaning.get(meaning) or self._understand(header)
        if known is None:
            return None
        if len(given) <= REMEMBERED_CHARS:
            _make_room(self._by_meaning)[meaning] = known
            if not header.id:  # with an id it is used once
                _make_room(self._by_bytes)[given] = known, 0
        return known, header.id

    def _understand(self, header: RequestHeader) -> Known | None:
        plain = not any(one.shared for one in header.inputs)
        if not plain or any(one.shared or one.classes for one in header.outputs):
            return None
        try:
            check_header(self._served.plan, header)
            cuts = self._cut(header)
            raws = [self._describe(one.name, header.batch_size) for one in header.outputs]
        except ServeError:
            return None  # the general door says what is wrong
        if header.batch_size > self._lane.max_rows:
            return None
        forms = self._served.answers.forms(header.batch_size, raws)
        trailer = forms.binary if self._binary else forms.lines.encode()
        columns = tuple(list(self._lane.outputs).index(one.name) for one in raws)
        output_bytes = sum(one.nbytes for one in raws)
        line = forms.line.encode()
        return Known(header.batch_size, cuts[-1][2], cuts, columns, output_bytes, line, trailer)

    def _cut(self, header: RequestHeader) -> tuple[tuple[int, int, int], ...]:
        """Which bytes of the body go into which column."""
        columns, cuts, at = list(self._lane.inputs), [], 0
        for one in header.inputs:
            _, nbytes = measure(self._served.plan, one, header.batch_size)
            cuts.append((columns.index(one.name), at, at + nbytes))
            at += nbytes
        return tuple(cuts)

    def _describe(self, name: str, rows: int) -> Raw:
        spec = self._lane.outputs[name]
        assert spec.shape is not None  # dense
        return self._served.answers.describe(name, (rows, *spec.shape), rows * (spec.row_bytes or 0))


def _make_room(remembered: dict[K, V]) -> dict[K, V]:
    if len(remembered) >= REMEMBERED_HEADERS:
        remembered.clear()
    return remembered
