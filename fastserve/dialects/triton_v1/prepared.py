"""Headers that were understood: where the bytes of a request go, and what stands round those of its answer.

A header is understood against one version and its queue; what it says besides tensors (id, flags, priority)
belongs to a request: the header itself goes with each as its `request_id`. Where the bytes of inputs lie is
the transport's, and so are its subclass and its replies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastserve.dialects.triton_v1.answers import Answer, HeaderForms
from fastserve.dialects.triton_v1.header import REMEMBERED_HEADERS, RequestHeader
from fastserve.dialects.triton_v1.inputs import build_request, check_header, count_bytes, measure
from fastserve.dialects.triton_v1.replies import Replies
from fastserve.dialects.triton_v1.service import Served, Service
from fastserve.engine import BatchQueue, note_of
from fastserve.errors import ServeError
from fastserve.request import InferResponse
from fastserve.serving.model_view import ModelView
from fastserve.serving.prepared import Described, Memory, PreparedRequest
from fastserve.serving.shared_memory import Range, Rooms, hold_rooms
from fastserve.tensor import Tensor

Writer = tuple[HeaderForms, tuple[int, ...]]  # which of an answer's outputs are sent, in order


@dataclass(frozen=True, slots=True)
class Source:
    """Where the bytes of an input come from: the body, or the entry of that number; or shared memory."""

    begin: int
    end: int
    entry: int
    place: Range | None = None


@dataclass(frozen=True, slots=True)
class About:
    """What the prepared requests of a version have in common, over one transport."""

    service: Service
    served: Served
    queue: BatchQueue
    replies: Replies


class PreparedHeader(PreparedRequest):
    """What a header says of tensors."""

    def __init__(self, about: About, header: RequestHeader, sources: Mapping[str, Source]) -> None:
        """`sources` in the header's order."""
        places = [one.place for one in sources.values() if one.place is not None]
        self.rows = header.batch_size
        self.noted = about.queue.requests
        self._destinations = header.destinations
        self.outside = bool(places or self._destinations)
        self.replies, self._answers, self._shared = about.replies, about.served.answers, about.service.shared
        self.entries = tuple(one.end - one.begin for one in sources.values() if one.place is None)
        self.nbytes = sum(self.entries)
        self.sources = [sources[name] for name in about.queue.inputs]
        self.alone = len(self.entries) == len(sources) == 1  # a body is nothing but the one input
        self._ends = [replace(one, offset=one.offset + one.byte_size, byte_size=0) for one in places]
        self._raw = not any(one.classes or one.shared for one in header.outputs)
        self._noted_for: RequestHeader | None = None
        self._note = b""

    def is_there(self) -> bool:
        """Whether inputs in shared memory are where the header says: it may claim any size, and memory is
        taken for it only after this."""
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
        return hold_rooms(self._shared, self._destinations)

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
        self,
        exchange: Any,
        writer: Writer,
        memory: Sequence[Memory],
        header: RequestHeader,
        held: Rooms | None,
    ) -> None:
        forms, order = writer
        self.replies.answer(exchange, Answer(forms, [memory[at] for at in order], header.id))

    def write_response(
        self, exchange: Any, response: InferResponse, header: RequestHeader, held: Rooms | None
    ) -> None:
        self.replies.answer(exchange, self._answers.write(header, response.outputs, held or {}))


class PreparedHeaders:
    """Those of one version, over one transport."""

    def __init__(self, about: About, kind: type[PreparedHeader]) -> None:
        self._about, self._kind = about, kind
        self._known: dict[object, PreparedHeader] = {}

    def find(self, header: RequestHeader) -> PreparedHeader | None:
        """What a header says of tensors; None when its requests need another look: errors, and strings."""
        meaning = (header.batch_size, header.inputs, header.outputs)
        found = self._known.get(meaning)
        if found is None:
            found = self._prepare(header)
            if found is not None:
                if len(self._known) >= REMEMBERED_HEADERS:
                    self._known.clear()
                self._known[meaning] = found
        return found

    def _prepare(self, header: RequestHeader) -> PreparedHeader | None:
        plan, queue = self._about.served.plan, self._about.queue
        try:
            check_header(plan, header)
            measured = {one.name: measure(plan, one, header.batch_size) for one in header.inputs}
        except ServeError:
            return None
        sources = _find_sources(plan, header, {name: nbytes for name, (_, nbytes) in measured.items()})
        if sources is None or header.batch_size > queue.max_rows or sources.keys() != queue.inputs.keys():
            return None
        inputs = {name: Tensor(plan.inputs[name].dtype, measured[name][0], b"") for name in queue.inputs}
        prepared = self._kind(self._about, header, sources)
        try:
            prepared.lay_out(queue, inputs, tuple(one.name for one in header.outputs), batching=plan.batching)
        except ValueError:  # more axes than a slab's table has room for
            return None
        return prepared


class Outcome:
    """How requests to one version end."""

    def __init__(self, about: Service, served: Served, replies: Replies) -> None:
        self._service, self._served, self._replies = about, served, replies

    def answered(self, prepared: PreparedHeader, took_ns: int) -> None:
        self._served.counts.of(prepared.rows).success.add(took_ns)

    def refused(
        self, exchange: Any, prepared: PreparedHeader, header: RequestHeader, fault: ServeError
    ) -> None:
        self._service.count_failure(self._served, prepared.rows, exchange.received_ns, fault)
        self._replies.refuse(exchange, header.id, fault)


def _find_sources(
    plan: ModelView, header: RequestHeader, sizes: Mapping[str, int]
) -> dict[str, Source] | None:
    """Where each input is, in the header's order; None when one has no known size, or a place of another."""
    found: dict[str, Source] = {}
    at = entry = 0
    for one in header.inputs:
        nbytes, place = sizes[one.name], one.shared
        sized = bool(plan.inputs[one.name].dtype.item_bytes) and nbytes > 0
        if not sized or (place is not None and place.byte_size != nbytes):
            return None
        found[one.name] = Source(at, at + nbytes, entry, place)
        if place is None:
            at, entry = at + nbytes, entry + 1
    return found
