"""The fast path of predict: rows of numbers, parsed straight into the batch they will run in.

    body bytes --parse--> rows reserved in shared memory ... worker ... output rows --print--> reply bytes

It takes a body only when everything about it is ordinary: one input and one output whose rows have a fixed
size, the default signature, row format, no gzip, a place in the queue. For anything else, errors included,
`start` returns False having left no trace, and the general path reads the body again and finds the words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from fastserve._ext.json_writer import RowWriter, WriterFault, write_predictions
from fastserve.apart import APART_BYTES
from fastserve.dialects.tfserving.errors import writer_error
from fastserve.dialects.tfserving.service import JSON, Service
from fastserve.dialects.tfserving.signatures import SignatureView
from fastserve.errors import ServeError
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.fast_path import FastPath
from fastserve.serving.paths import open_path
from fastserve.serving.prepared import Described, Later, Memory, PreparedRequest, put_bytes
from fastserve.tensor import Tensor
from fastserve.wire.arrived import Arrived
from fastserve.wire.call import Call


class JsonRows(PreparedRequest):
    """Bodies of rows as JSON. `rows` is set for each."""

    def __init__(self, service: Service, path: FastPath, view: SignatureView) -> None:
        """Raises WriterFault for an output that cannot be written."""
        self._read, self._headers = view.reader.read_into, service.headers
        self._shape = shape_of(view)
        version = path.version
        self._alias, self._name = next(iter(view.signature.output_names.items()))
        output = version.outputs[self._name]
        self._about = (self._alias, output.dtype.code, output.shape or ())
        self._writer, self._apart = RowWriter(*self._about), service.apart
        inputs = {name: Tensor(each.dtype, (1, *self._shape), b"") for name, each in version.inputs.items()}
        self.lay_out_like(path.queue, InferRequest(inputs, view.wanted), batching=True)

    def fill(self, source: Memory, memory: list[memoryview]) -> bool:
        return not self._read(source, memory[0], self._shape, self.rows)

    def make_writer(self, described: Described) -> tuple[RowWriter, int] | None:
        """None where a model that sees requests has answered with something else than it has declared."""
        (name, dtype, shape), *more = described
        declared = (self._name, *self._about[1:])
        return None if more or (name, dtype.code, shape[1:]) != declared else (self._writer, shape[0])

    def write(
        self,
        exchange: Call,
        writer: tuple[RowWriter, int],
        memory: Sequence[Memory],
        request_id: str,
        held: None,
    ) -> Later | None:
        if len(memory[0]) >= APART_BYTES:
            return self._write_apart(exchange, writer[1], memory[0])
        head = b"" if self._headers else exchange.raw_head()
        try:
            text = writer[0].write(memory[0], writer[1], head)
        except WriterFault as fault:
            raise writer_error(fault) from None
        if head:
            exchange.reply_raw(text)
        else:
            exchange.reply(200, text, JSON, self._headers)
        return None

    async def _write_apart(self, exchange: Call, rows: int, memory: Memory) -> None:
        writer = RowWriter(*self._about)
        try:
            text = await self._apart(len(memory), writer.write, memory, rows, b"")
        except WriterFault as fault:
            raise writer_error(fault) from None
        exchange.reply(200, text, JSON, self._headers)

    def write_response(self, exchange: Call, response: InferResponse, request_id: str, held: None) -> None:
        output = response.outputs[self._name]
        found = self._alias, output.dtype.code, output.shape, output.data
        try:
            exchange.reply(200, write_predictions([found]), JSON, self._headers)
        except WriterFault as fault:
            raise writer_error(fault) from None


class RawRows(JsonRows):
    """Bodies that are nothing but little-endian rows."""

    def fill(self, source: Memory | Arrived, memory: list[memoryview]) -> bool:
        return put_bytes(source, memory)


def shape_of(view: SignatureView) -> tuple[int, ...]:
    """That of a row of the one input of a signature."""
    return next(iter(view.signature.inputs.values())).shape or ()


class Fast:
    """What one version's fast path takes, for its default signature."""

    __slots__ = (
        "_count",
        "_deadline_ns",
        "_items",
        "_json",
        "_max_rows",
        "_path",
        "_raw",
        "_rows",
        "version",
    )

    def __init__(self, service: Service, path: FastPath, view: SignatureView) -> None:
        """Raises WriterFault for an output that REST cannot write."""
        self.version, self._path, self._deadline_ns = path.version, path, service.deadline_ns
        self._max_rows = path.queue.max_rows
        self._count, self._items, self._rows = view.reader.count_rows, prod(shape_of(view)), view.rows
        self._json, self._raw = JsonRows(service, path, view), RawRows(service, path, view)

    @classmethod
    def open(cls, service: Service, version: Version, view: SignatureView) -> Fast | None:
        """That of a version; None for one whose rows are not of this kind."""
        signature = view.signature
        if not len(signature.inputs) == len(version.inputs) == len(signature.output_names) == 1:
            return None
        output = version.outputs[next(iter(signature.output_names.values()))]
        if not (version.batching and output.row_bytes and all(s.row_bytes for s in version.inputs.values())):
            return None
        path = open_path(version, service.traffic, Outcome(service, version.model))
        if path is None:
            return None
        try:
            return cls(service, path, view)
        except WriterFault:
            return None  # the general path says so

    def start(self, call: Call, raw: bool) -> bool:
        """Take the call, or return False: nothing has happened then. `raw`: it may be nothing but rows."""
        body, prepared, rows = call.body, self._json, 0
        if raw and self._rows is not None and (rows := self._rows.count(body)):
            prepared = self._raw
        rows = rows or self._count(body, self._items)
        if not 0 < rows <= self._max_rows:
            return False
        prepared.rows = rows
        return self._path.start(call, prepared, body, "", self._deadline_ns(call.received_ns))

    def take(self, call: Call, body: Arrived) -> bool:
        """The same of bare rows that are still in the socket."""
        prepared = self._raw
        if self._rows is None or not self._path.takes_arrived(prepared):
            return False
        prepared.rows = self._rows.count_arrived(body)
        if not 0 < prepared.rows <= self._max_rows:
            return False
        return self._path.start(call, prepared, body, "", self._deadline_ns(call.received_ns))


class Outcome:
    """How requests of one model end."""

    def __init__(self, service: Service, model: str) -> None:
        self._service, self._model = service, model
        self.answered: Callable[[Any, int, int], None] | None = None
        if service.options.monitoring:
            self.answered = lambda prepared, took_ns, ran_ns: service.observe(
                model, "predict", took_ns, ran_ns
            )

    def refused(self, exchange: Call, prepared: JsonRows, request_id: str, fault: ServeError) -> None:
        self._service.refuse(exchange, self._model, fault)
