"""The fast path of infer: raw bytes, copied once, straight into the batch they will run in.

    header --understood once--> where the bytes of inputs go, what stands round those of the answer

A header is understood against one version and its queue; what it says besides tensors (id, flags, priority)
belongs to a request: the header itself goes with each as its `request_id`. Over HTTP, requests that bring the
same bytes in the header are known by them. `start` returns False, having left no trace, for what needs
another look, errors included; the general path finds the right words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import Self

from fastserve._ext.proto_wire_v1 import V1InferMessage
from fastserve.apart import APART_BYTES
from fastserve.dialects.triton_v1.answers import HeaderForms
from fastserve.dialects.triton_v1.header import (
    REMEMBERED_CHARS,
    REMEMBERED_HEADERS,
    RequestHeader,
    read_header,
)
from fastserve.dialects.triton_v1.inputs import Buffer, build_request, check_header, count_bytes, measure
from fastserve.dialects.triton_v1.replies import HttpReplies, Replies
from fastserve.dialects.triton_v1.service import Served, Service
from fastserve.engine import note_of
from fastserve.errors import ConfigError, ServeError
from fastserve.repository.version import Version
from fastserve.request import InferResponse
from fastserve.serving.exchange import RpcExchange
from fastserve.serving.fast_path import FastPath
from fastserve.serving.model_view import ModelView
from fastserve.serving.paths import open_path
from fastserve.serving.prepared import Described, Later, Memory, PreparedRequest
from fastserve.serving.remembered import Remembered
from fastserve.serving.rooms import Rooms
from fastserve.serving.shared_memory import LARGE_BYTES, Range, hold_files
from fastserve.tensor import Tensor
from fastserve.wire.arrived import Arrived
from fastserve.wire.call import Call

Writer = tuple[HeaderForms, tuple[int, ...]]  # which of an answer's outputs are sent, in order
Known = tuple["PreparedBody", RequestHeader]


@dataclass(frozen=True, slots=True)
class Source:
    """Where the bytes of an input come from: the body, or the entry of that number; or shared memory."""

    begin: int
    end: int
    entry: int
    place: Range | None = None


class PreparedHeader(PreparedRequest):
    """What a header says of tensors. Where the bytes lie is the transport's, and so are its subclass and its
    replies."""

    def __init__(self, fast: Fast, header: RequestHeader, sources: Mapping[str, Source]) -> None:
        """`sources` in the header's order."""
        places = [one.place for one in sources.values() if one.place is not None]
        self.rows = header.batch_size
        self.noted = fast.queue.requests
        self._destinations = header.destinations
        self.outside = bool(places or self._destinations)
        self.replies, self._answers, self._shared = fast.replies, fast.served.answers, fast.service.regions
        self._apart = fast.service.apart
        self._is_large = sum(one.byte_size for one in places) >= LARGE_BYTES
        self.entries = tuple(one.end - one.begin for one in sources.values() if one.place is None)
        self.nbytes = sum(self.entries)
        self.sources = [sources[name] for name in fast.queue.inputs]
        self._order = sorted(range(len(self.sources)), key=lambda at: self.sources[at].begin)  # in a body
        self.alone = len(self.entries) == len(sources) == 1  # a body is nothing but the one input
        self._ends = [replace(one, offset=one.offset + one.byte_size, byte_size=0) for one in places]
        self._raw = not any(one.classes or one.shared for one in header.outputs)
        self._noted_for: RequestHeader | None = None
        self._note = b""

    def is_there(self) -> bool:
        """Whether inputs in shared memory are where the header says: it may claim any size, and memory is
        taken for it only after this."""
        if self._is_large:  # copied apart from the loop
            return False
        try:
            for end in self._ends:
                self._shared.read(end)
        except Exception:
            return False  # the general path says what is wrong
        return True

    def fill_from(self, place: Range, target: memoryview) -> None:
        """An input in shared memory. Raises ServeError."""
        self._shared.read_into(place, target)

    def note(self, header: RequestHeader) -> bytes:
        if header is not self._noted_for:
            self._noted_for, self._note = header, note_of(build_request(header, {}), [])
        return self._note

    def hold(self) -> Rooms:
        return hold_files(self._shared, self._destinations)

    def make_writer(self, described: Described) -> Writer | None:
        if not self._raw:
            return None
        given = {name: (at, dtype, shape) for at, (name, dtype, shape) in enumerate(described)}
        order, raws = [], []
        for name in self.wanted:
            at, dtype, shape = given.get(name, (0, None, ()))
            if dtype is None or not dtype.item_bytes:  # missing, or of no known size
                return None
            order.append(at)
            try:
                raws.append(self._answers.describe(name, shape, count_bytes(shape, dtype)))
            except ServeError:
                return None
        return self._answers.forms(self.rows, raws), tuple(order)

    def write(
        self, exchange: Any, writer: Any, memory: Sequence[Memory], header: RequestHeader, held: Any
    ) -> None:
        forms, order = writer
        self.replies.answer(exchange, header.id, (forms, [memory[at] for at in order]))

    def write_response(
        self, exchange: Any, response: InferResponse, header: RequestHeader, held: Rooms | None
    ) -> Later | None:
        size = response.nbytes if held else 0
        if size >= APART_BYTES:
            return self._write_apart(exchange, response, header, held, size)
        self.replies.answer(
            exchange, header.id, self._answers.write(header, response.outputs, held or Rooms())
        )
        return None

    async def _write_apart(
        self, exchange: Any, response: InferResponse, header: RequestHeader, held: Rooms | None, size: int
    ) -> None:
        answer = await self._apart(size, self._answers.write, header, response.outputs, held or Rooms())
        self.replies.answer(exchange, header.id, answer)


class PreparedBody(PreparedHeader):
    """Inputs behind one another in a body. Replies without an id of the request's differ in their numbers
    and tensors alone, and are framed once."""

    replies: HttpReplies

    def fill(self, body: Buffer | Arrived, memory: list[memoryview]) -> bool:
        if isinstance(body, Arrived):
            return body.read_into([memory[at] for at in self._order])
        if self.alone:
            memory[0][:] = body
            return True
        view = memoryview(body)
        for target, source in zip(memory, self.sources, strict=True):
            if source.place is None:
                target[:] = view[source.begin : source.end]
            else:
                self.fill_from(source.place, target)
        return True

    def make_writer(self, described: Described) -> Any | None:
        writer = super().make_writer(described)
        return None if writer is None else (*writer, *self.replies.frame(writer[0]))

    def write(
        self, call: Call, writer: Any, memory: Sequence[Memory], header: RequestHeader, held: Any
    ) -> None:
        forms, order, before, after, trailer = writer
        head = b"" if header.id else call.raw_head(b"")
        if not head:
            super().write(call, (forms, order), memory, header, held)
            return
        number, raws = b"%d" % self.replies.next_id(), map(memory.__getitem__, order)
        call.reply_raw(b"".join((head, before, number, after, *raws, trailer)))


class PreparedMessage(PreparedHeader):
    """Inputs in the raw_input entries of a message; entries beyond the last are nobody's."""

    def has_entries(self, message: V1InferMessage) -> bool:
        """Whether the entries have the sizes they need."""
        if message.raw_count < len(self.entries):
            return False
        return all(message.raw(index)[1] == nbytes for index, nbytes in enumerate(self.entries))

    def fill(self, message: V1InferMessage, memory: list[memoryview]) -> bool:
        for target, source in zip(memory, self.sources, strict=True):
            if source.place is None:
                message.copy_raw(source.entry, target)
            else:
                self.fill_from(source.place, target)
        return True


class Fast:
    """The headers known of one version, over one transport, before its fast path."""

    kind: type[PreparedHeader]

    def __init__(self, service: Service, served: Served, replies: Replies, path: FastPath) -> None:
        self.service, self.served, self.replies = service, served, replies
        self.version, self.queue, self._path = path.version, path.queue, path
        self._prepared: Remembered[object, PreparedHeader] = Remembered(REMEMBERED_HEADERS)

    @classmethod
    def open(cls, service: Service, replies: Replies, version: Version) -> Self | None:
        """That of a version; None for one that does more with a request than run or keep it."""
        served = service.served.of(version)
        path = open_path(version, service.traffic, Outcome(service, served, replies))
        return None if path is None else cls(service, served, replies, path)

    def find(self, header: RequestHeader) -> Any:
        """What a header says of tensors; None when its requests need another look: errors, and strings."""
        meaning = (header.batch_size, header.inputs, header.outputs)
        found = self._prepared.get(meaning)
        if found is None:
            found = self._prepare(header)
            if found is not None:
                self._prepared[meaning] = found
        return found

    def _prepare(self, header: RequestHeader) -> PreparedHeader | None:
        view, queue = self.served.view, self.queue
        try:
            check_header(view, header)
            measured = {one.name: measure(view, one, header.batch_size) for one in header.inputs}
        except ServeError:
            return None
        sources = _find_sources(view, header, {name: nbytes for name, (_, nbytes) in measured.items()})
        if sources is None or header.batch_size > queue.max_rows or sources.keys() != queue.inputs.keys():
            return None
        inputs = {name: Tensor(view.inputs[name].dtype, measured[name][0], b"") for name in queue.inputs}
        prepared = self.kind(self, header, sources)
        try:
            prepared.lay_out(queue, inputs, tuple(one.name for one in header.outputs), batching=view.batching)
        except ValueError:  # more axes than a slab's table has room for
            return None
        return prepared


class FastHttp(Fast):
    """Those of one target."""

    kind = PreparedBody

    def __init__(self, service: Service, served: Served, replies: Replies, path: FastPath) -> None:
        super().__init__(service, served, replies, path)
        self._known: Remembered[bytes, Known] = Remembered(REMEMBERED_HEADERS)

    def start(self, call: Call, given: bytes) -> bool:
        """Take the call whose header is `given`, or return False: nothing has happened then."""
        known = self._known.get(given) or self._meet(given)
        if known is None:
            return False
        prepared, header = known
        if len(call.body) != prepared.nbytes or (prepared.outside and not prepared.is_there()):
            return False
        return self._path.start(call, prepared, call.body, header)

    def take(self, call: Call, given: bytes, body: Arrived) -> bool:
        """The same of a body that is still in the socket."""
        known = self._known.get(given) or self._meet(given)
        if known is None or len(body) != known[0].nbytes or not self._path.takes_arrived(known[0]):
            return False
        return self._path.start(call, known[0], body, known[1])

    def _meet(self, given: bytes) -> Known | None:
        """Understand a header; None for one that is not for this path."""
        try:
            header = read_header(given.decode())
        except (ConfigError, UnicodeDecodeError):
            return None
        prepared = self.find(header)
        if prepared is None:
            return None
        if not header.id and len(given) <= REMEMBERED_CHARS:  # with an id it is used once
            self._known[given] = prepared, header
        return prepared, header


class FastRpc(Fast):
    """Those of Infer and StreamInfer."""

    kind = PreparedMessage

    def start(
        self, exchange: RpcExchange, message: V1InferMessage, header: RequestHeader, deadline_ns: int
    ) -> bool:
        """Take the request, or return False: nothing has happened then."""
        prepared = self.find(header)
        if prepared is None or not prepared.has_entries(message):
            return False
        if prepared.outside and not prepared.is_there():
            return False
        return self._path.start(exchange, prepared, message, header, deadline_ns)


class Outcome:
    """How requests to one version end."""

    def __init__(self, service: Service, served: Served, replies: Replies) -> None:
        self._service, self._served, self._replies = service, served, replies

    def answered(self, prepared: PreparedHeader, took_ns: int, ran_ns: int) -> None:
        self._served.counts[prepared.rows].success.add(took_ns)

    def refused(
        self, exchange: Any, prepared: PreparedHeader, header: RequestHeader, fault: ServeError
    ) -> None:
        self._service.count_failure(self._served, prepared.rows, exchange.received_ns, fault)
        self._replies.refuse(exchange, header.id, fault)


def _find_sources(
    view: ModelView, header: RequestHeader, sizes: Mapping[str, int]
) -> dict[str, Source] | None:
    """Where each input is, in the header's order; None when one has no known size, or a place of another."""
    found: dict[str, Source] = {}
    at = entry = 0
    for one in header.inputs:
        nbytes, place = sizes[one.name], one.shared
        sized = bool(view.inputs[one.name].dtype.item_bytes) and nbytes > 0
        if not sized or (place is not None and place.byte_size != nbytes):
            return None
        found[one.name] = Source(at, at + nbytes, entry, place)
        if place is None:
            at, entry = at + nbytes, entry + 1
    return found
