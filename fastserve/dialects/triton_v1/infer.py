"""Infer over either transport: the fast path of known headers, the HTTP endpoint, the general path (spec 3).

    header --read once--> where the bytes of inputs go, and the parts of a reply around its outputs

A header is prepared for one version and its queue. Its fields besides tensors (id, flags, priority) belong to
the request, so the header goes with each as its `request_id`. Over HTTP a header is found by its bytes. For
every other request, errors included, `start` returns False without a trace and the general path answers it.

POST /api/infer/MODEL[/VERSION] has the header in NV-InferRequest and the tensors in the body. Raw bytes are
copied once, into the batch they will run in.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastserve._ext.proto_wire_v1 import V1InferMessage
from fastserve.dialects.triton_v1.request import (
    REMEMBERED_CHARS,
    REMEMBERED_HEADERS,
    Buffer,
    InputData,
    RequestHeader,
    build_request,
    check_header,
    count_bytes,
    measure,
    read_header,
    read_request,
)
from fastserve.dialects.triton_v1.routes import V1Target
from fastserve.dialects.triton_v1.service import (
    HttpReplies,
    Replies,
    ResponseHeader,
    ServedVersion,
    V1Service,
)
from fastserve.engine import request_note
from fastserve.errors import ConfigError, ServeError
from fastserve.net.http1.large_bodies import ArrivedBody
from fastserve.net.request import Call
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.client_shared_memory import LARGE_BYTES, OutputBuffers, Range, hold_files
from fastserve.serving.exchange import RpcExchange
from fastserve.serving.fast_path import FastPath, Outcome, PathCache, open_path
from fastserve.serving.model_view import ModelView
from fastserve.serving.prepared_requests import BoundedDict, Described, Later, Memory, PreparedRequest
from fastserve.serving.slow_path import BodyTensors, RegionRequest, answer_slowly
from fastserve.tensor import Tensor
from fastserve.util.offload import OFFLOAD_BYTES

if TYPE_CHECKING:
    from typing_extensions import Self

Writer = tuple[ResponseHeader, tuple[int, ...]]  # the outputs that are sent, in order
Known = tuple["PreparedBody", RequestHeader]


@dataclass(frozen=True, slots=True)
class InputSource:
    """The place of an input's bytes: a part of the body, the entry of that number, or shared memory."""

    begin: int
    end: int
    entry: int
    place: Range | None = None


def _last_byte(place: Range) -> Range:
    """Return the last byte of a range; an empty range is returned as it is."""
    if not place.byte_size:
        return place
    return replace(place, offset=place.offset + place.byte_size - 1, byte_size=1)


class PreparedHeader(PreparedRequest):
    """A header prepared for one version. Subclasses read the bytes of one transport."""

    def __init__(self, fast: HeaderCache, header: RequestHeader, sources: Mapping[str, InputSource]) -> None:
        """`sources` are in the header's order."""
        places = [one.place for one in sources.values() if one.place is not None]
        self.rows = header.batch_size
        self.noted = fast.queue.requests
        self._destinations = header.destinations
        self.outside = bool(places or self._destinations)
        self.replies, self._answers, self._shared = fast.replies, fast.served.answers, fast.service.regions
        self._offload = fast.service.offload
        self._is_large = sum(one.byte_size for one in places) >= LARGE_BYTES
        self.entries = tuple(one.end - one.begin for one in sources.values() if one.place is None)
        self.nbytes = sum(self.entries)
        self.sources = [sources[name] for name in fast.queue.inputs]
        self._order = sorted(range(len(self.sources)), key=lambda at: self.sources[at].begin)  # in a body
        self.alone = len(self.entries) == len(sources) == 1  # the body is the one input
        self._ends = [_last_byte(one) for one in places]
        self._raw = not any(one.classes or one.shared for one in header.outputs)
        self._noted_for: RequestHeader | None = None
        self._note = b""

    def is_there(self) -> bool:
        """Return True when inputs in shared memory are where the header says.

        A header may claim any size: no memory is taken for it before this check.
        """
        if self._is_large:  # copied in a thread
            return False
        try:
            for end in self._ends:
                self._shared.read(end)
        except Exception:
            return False  # the general path reports the error
        return True

    def fill_from(self, place: Range, target: memoryview) -> None:
        """Copy an input from shared memory. Raises ServeError."""
        self._shared.read_into(place, target)

    def note(self, header: RequestHeader) -> bytes:
        if header is not self._noted_for:
            self._noted_for, self._note = header, request_note(build_request(header, {}), [])
        return self._note

    def hold(self) -> OutputBuffers:
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
        self, exchange: Any, response: InferResponse, header: RequestHeader, held: OutputBuffers | None
    ) -> Later | None:
        size = response.nbytes if held else 0
        if size >= OFFLOAD_BYTES:
            return self._write_offloaded(exchange, response, header, held, size)
        self.replies.answer(
            exchange, header.id, self._answers.write(header, response.outputs, held or OutputBuffers())
        )
        return None

    async def _write_offloaded(
        self,
        exchange: Any,
        response: InferResponse,
        header: RequestHeader,
        held: OutputBuffers | None,
        size: int,
    ) -> None:
        answer = await self._offload(
            size, self._answers.write, header, response.outputs, held or OutputBuffers()
        )
        self.replies.answer(exchange, header.id, answer)


class PreparedBody(PreparedHeader):
    """A header whose inputs follow one another in a body.

    Replies without an id differ in their number and tensors only: the rest is written once.
    """

    replies: HttpReplies

    def fill(self, body: Buffer | ArrivedBody, memory: list[memoryview]) -> bool:
        if isinstance(body, ArrivedBody):
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
    """A header whose inputs are raw_input entries of a message; surplus entries are ignored."""

    def has_entries(self, message: V1InferMessage) -> bool:
        """Return True when the entries have the sizes of the inputs."""
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


class HeaderCache:
    """The prepared headers of one version, over one transport, in front of its fast path."""

    kind: type[PreparedHeader]

    def __init__(self, service: V1Service, served: ServedVersion, replies: Replies, path: FastPath) -> None:
        self.service, self.served, self.replies = service, served, replies
        self.version, self.queue, self._path = path.version, path.queue, path
        self._prepared: BoundedDict[object, PreparedHeader] = BoundedDict(REMEMBERED_HEADERS)

    @classmethod
    def open(cls, service: V1Service, replies: Replies, version: Version) -> Self | None:
        """Return the cache of a version; None for a version without a fast path."""
        served = service.served.of(version)
        counted = served.counters.answered

        def answered(prepared: PreparedHeader, took_ns: int, ran_ns: int) -> None:
            counted(prepared.rows, took_ns)

        def refused(
            exchange: Any, prepared: PreparedHeader, header: RequestHeader, fault: ServeError
        ) -> None:
            service.count_failure(served, prepared.rows, exchange, fault)
            replies.refuse(exchange, header.id, fault)

        path = open_path(version, service.traffic, Outcome(refused, answered))
        return None if path is None else cls(service, served, replies, path)

    def find(self, header: RequestHeader) -> Any:
        """Return the prepared header, None when the general path has to answer: errors, and strings."""
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


class HttpHeaderCache(HeaderCache):
    """The prepared headers of one target."""

    kind = PreparedBody

    def __init__(self, service: V1Service, served: ServedVersion, replies: Replies, path: FastPath) -> None:
        super().__init__(service, served, replies, path)
        self._known: BoundedDict[bytes, Known] = BoundedDict(REMEMBERED_HEADERS)

    def start(self, call: Call, given: bytes) -> bool:
        """Start a call whose header is `given`. Returns False, without a trace, for the general path."""
        known = self._known.get(given) or self._prepare_text(given)
        if known is None:
            return False
        prepared, header = known
        if len(call.body) != prepared.nbytes or (prepared.outside and not prepared.is_there()):
            return False
        return self._path.start(call, prepared, call.body, header, call.deadline_ns)

    def take(self, call: Call, given: bytes, body: ArrivedBody) -> bool:
        """Start a call whose body is still in the socket."""
        known = self._known.get(given) or self._prepare_text(given)
        if known is None or len(body) != known[0].nbytes or not self._path.takes_arrived(known[0]):
            return False
        return self._path.start(call, known[0], body, known[1], call.deadline_ns)

    def _prepare_text(self, given: bytes) -> Known | None:
        """Read and prepare a header; None when it is not for this path."""
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


class RpcHeaderCache(HeaderCache):
    """The prepared headers of Infer and StreamInfer."""

    kind = PreparedMessage

    def start(
        self, exchange: RpcExchange, message: V1InferMessage, header: RequestHeader, deadline_ns: int
    ) -> bool:
        """Start a request. Returns False, without a trace, for the general path."""
        prepared = self.find(header)
        if prepared is None or not prepared.has_entries(message):
            return False
        if prepared.outside and not prepared.is_there():
            return False
        return self._path.start(exchange, prepared, message, header, deadline_ns)


def _find_sources(
    view: ModelView, header: RequestHeader, sizes: Mapping[str, int]
) -> dict[str, InputSource] | None:
    """Return each input's place, in the header's order.

    None when one has no known size, or a place of another size.
    """
    found: dict[str, InputSource] = {}
    at = entry = 0
    for one in header.inputs:
        nbytes, place = sizes[one.name], one.shared
        sized = bool(view.inputs[one.name].dtype.item_bytes) and nbytes > 0
        if not sized or (place is not None and place.byte_size != nbytes):
            return None
        found[one.name] = InputSource(at, at + nbytes, entry, place)
        if place is None:
            at, entry = at + nbytes, entry + 1
    return found


HEADER = b"nv-inferrequest"
NO_HEADER = b"The request header should contain 'NV-InferRequest'"
MORE_HEADERS = b"The request header should contain 'NV-InferRequest' once"


def find_header(call: Call) -> bytes | None:
    """Return the header of a request, None where there is none or more than one."""
    return None if call.head.repeats(HEADER) else call.head.find(HEADER)


class V1InferEndpoint:
    """The endpoint of one target."""

    __slots__ = ("_available", "_fast", "_name", "_number", "_replies", "_service")

    def __init__(self, service: V1Service, target: V1Target) -> None:
        self._service, self._available = service, service.catalog.available
        self._name, self._number = target.name, target.version
        self._replies = HttpReplies(service, binary=target.format == "binary")
        self._fast = PathCache(service.keepers, partial(HttpHeaderCache.open, service, self._replies))

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        given: bytes | None = call.head.memo
        if given is None:  # equal heads are one object: they are read once
            given = call.head.memo = find_header(call)
            if given is None:
                call.reply(400, MORE_HEADERS if call.head.repeats(HEADER) else NO_HEADER, b"")
                return None
        version, fast = self._available(self._name, self._number), self._fast.path
        if fast is None or fast.version is not version:
            fast = self._fast.find(version)
        if fast is not None and fast.start(call, given):
            return None
        return self._answer(call, given)

    def take(self, call: Call, body: ArrivedBody) -> bool:
        """Start a call whose tensors are still in the socket."""
        given, fast = call.head.memo or find_header(call), self._fast.path
        if given is None or fast is None or fast.version is not self._available(self._name, self._number):
            return False
        return fast.take(call, given, body)

    def _answer(self, call: Call, given: bytes) -> Coroutine[Any, Any, None] | None:
        """Answer on the general path."""
        try:
            header = read_header(given.decode())
        except (ConfigError, UnicodeDecodeError):
            call.reply(400, b"", b"")
            return None
        asked = self._name, self._number, header, partial(BodyTensors, call.body), call.deadline_ns
        request = V1InferRequest(self._service, self._replies, call, *asked)
        return answer_slowly(call, request)


class V1InferRequest(RegionRequest):
    """A request on the general path.

    `make_data` takes the model's name, for errors, and returns the inputs' bytes.
    """

    service: V1Service

    def __init__(
        self,
        service: V1Service,
        replies: Replies,
        exchange: Any,
        model: str,
        number: int | None,
        header: RequestHeader,
        make_data: Callable[[str], InputData],
        deadline_ns: int = 0,
    ) -> None:
        super().__init__(service)
        self._replies, self._exchange = replies, exchange
        self._model, self._number, self._header = model, number, header
        self._make_data, self._deadline_ns = make_data, deadline_ns
        self._served: ServedVersion | None = None

    async def read(self) -> InferRequest:
        service = self.service
        served = self._served = service.find(self._model, self._number)
        self.version = served.view.version
        shared, data = service.regions, self._make_data(self._model)
        header, most = self._header, served.view.version.config.max_queue_bytes
        work = sum(min(one.shared.byte_size, most) for one in header.inputs if one.shared is not None)
        if work:
            await self.charge(shared.count_bytes(self.version, (one.shared for one in header.inputs)))
        request, outside = await service.offload(work, read_request, served.view, header, data, shared)
        self.hold(self._header.destinations)
        self.bring(request, outside)
        request.deadline_ns = self._deadline_ns
        return request

    async def write(self, response: InferResponse) -> None:
        assert self._served is not None
        size = response.nbytes if self.rooms else 0
        write = self._served.answers.write
        answer = await self.service.offload(size, write, self._header, response.outputs, self.rooms)
        self._replies.answer(self._exchange, self._header.id, answer)

    def answered(self, took_ns: int) -> None:
        assert self._served is not None
        self._served.counters.answered(self._header.batch_size, took_ns)

    def refused(self, fault: ServeError) -> None:
        served, header = self._served, self._header
        if served is None:
            self.service.count_fault(self._model, fault, self._exchange)
        else:
            self.service.count_failure(served, header.batch_size, self._exchange, fault)
        self._replies.refuse(self._exchange, header.id, fault)
