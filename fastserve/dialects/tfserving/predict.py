"""POST ...:predict over REST: the fast path, then the general one.

    body bytes --parse--> rows reserved in shared memory ... worker ... output rows --print--> reply bytes

The fast path takes ordinary bodies only: one input and one output whose rows have a fixed size, the default
signature, row format, no gzip, free places in the queue. `start` returns False for any other, without effect.
The general path reads all good bodies by the compiled reader. A body that it refuses is read again the exact
way, for the original's error text (spec 1.6, 2); beyond EXPLAIN_BYTES the error is the reader's short text.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from fastserve._ext.json_reader import Fault, JSONFault, PredictBody
from fastserve._ext.json_writer import RowWriter, WriterFault, write_outputs, write_predictions
from fastserve.codec.json_text import to_text
from fastserve.dialects.tfserving.errors import short_error, writer_error
from fastserve.dialects.tfserving.json_body import read_document, read_signature_name, read_tensors
from fastserve.dialects.tfserving.routes import Target
from fastserve.dialects.tfserving.service import (
    RestRequest,
    SignatureView,
    SignatureViews,
    TFServingService,
    find_version,
)
from fastserve.errors import ServeError
from fastserve.net.http1.large_bodies import ArrivedBody
from fastserve.net.limits import JSON
from fastserve.net.request import Call
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.fast_path import FastPath, Outcome, PathCache, open_path
from fastserve.serving.prepared_requests import Described, Later, Memory, PreparedRequest, put_bytes
from fastserve.serving.slow_path import answer_slowly
from fastserve.tensor import Tensor
from fastserve.util.offload import OFFLOAD_BYTES


class JsonRows(PreparedRequest):
    """Bodies of rows as JSON. `rows` is set for each."""

    def __init__(self, service: TFServingService, path: FastPath, view: SignatureView) -> None:
        """Raises WriterFault for an output that cannot be written."""
        self._read, self._headers = view.reader.read_into, service.headers
        self._shape = shape_of(view)
        version = path.version
        self._alias, self._name = next(iter(view.signature.output_names.items()))
        output = version.outputs[self._name]
        self._about = (self._alias, output.dtype.code, output.shape or ())
        self._writer, self._offload = RowWriter(*self._about), service.offload
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
        if len(memory[0]) >= OFFLOAD_BYTES:
            return self._write_offloaded(exchange, writer[1], memory[0])
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

    async def _write_offloaded(self, exchange: Call, rows: int, memory: Memory) -> None:
        writer = RowWriter(*self._about)
        try:
            text = await self._offload(len(memory), writer.write, memory, rows, b"")
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


class BinaryRows(JsonRows):
    """Bodies that are nothing but little-endian rows."""

    def fill(self, source: Memory | ArrivedBody, memory: list[memoryview]) -> bool:
        return put_bytes(source, memory)


def shape_of(view: SignatureView) -> tuple[int, ...]:
    """Return the shape of a row of a signature's one input."""
    return next(iter(view.signature.inputs.values())).shape or ()


class RestFastPath:
    """The fast path of one version, for its default signature."""

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

    def __init__(self, service: TFServingService, path: FastPath, view: SignatureView) -> None:
        """Raises WriterFault for an output that REST cannot write."""
        self.version, self._path, self._deadline_ns = path.version, path, service.deadline_ns
        self._max_rows = path.queue.max_rows
        self._count, self._items, self._rows = view.reader.count_rows, prod(shape_of(view)), view.rows
        self._json, self._raw = JsonRows(service, path, view), BinaryRows(service, path, view)

    @classmethod
    def open(cls, service: TFServingService, version: Version, view: SignatureView) -> RestFastPath | None:
        """Open the fast path of a version; None for one whose rows have no fixed size."""
        signature = view.signature
        if not len(signature.inputs) == len(version.inputs) == len(signature.output_names) == 1:
            return None
        output = version.outputs[next(iter(signature.output_names.values()))]
        if not (version.batching and output.row_bytes and all(s.row_bytes for s in version.inputs.values())):
            return None

        def refused(call: Call, prepared: JsonRows, request_id: str, fault: ServeError) -> None:
            service.refuse(call, version.model, fault)

        path = open_path(
            version, service.traffic, Outcome(refused, service.observer(version.model, "predict"))
        )
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
        return self._path.start(
            call, prepared, body, "", self._deadline_ns(call.received_ns, call.deadline_ns)
        )

    def take(self, call: Call, body: ArrivedBody) -> bool:
        """Take a call whose bare rows are still in the socket, or return False."""
        prepared = self._raw
        if self._rows is None or not self._path.takes_arrived(prepared):
            return False
        prepared.rows = self._rows.count_arrived(body)
        if not 0 < prepared.rows <= self._max_rows:
            return False
        return self._path.start(
            call, prepared, body, "", self._deadline_ns(call.received_ns, call.deadline_ns)
        )


FAST_BYTES = 8 << 20  # up to 20 ms; larger bodies are read in a thread
EXPLAIN_BYTES = 1 << 18  # reading and explaining cost up to 0.35 us a byte, in which nobody else is served
RAW_TYPE = b"application/octet-stream"
CODED, RAW, JSON_TEXT = "coded", "raw", "json"  # kinds of bodies
Inputs = dict[str, Tensor]  # by the signature's names
Read = tuple[SignatureView, bool, Inputs]  # the signature, whether the body is columnar, the inputs


class PredictEndpoint:
    """The endpoint of one target."""

    __slots__ = ("_fast", "_find", "_service", "_target")

    def __init__(self, service: TFServingService, target: Target) -> None:
        self._service = service
        self._target = target
        catalog = service.catalog
        self._find: Callable[[], Version | None]
        if target.label is None:
            self._find = partial(catalog.available, target.name, target.version)
        else:
            self._find = partial(catalog.labelled, target.name, target.label)
        self._fast: PathCache[RestFastPath] = PathCache(service.keepers, self._open)

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        fast, version = self._fast.path, self._find()
        if fast is None or fast.version is not version:
            fast = self._fast.find(version)
            if fast is None:
                return self._answer(call)
        kind = call.head.memo or meet(call)
        if kind is not CODED and len(call.body) <= FAST_BYTES and fast.start(call, kind is RAW):
            return None
        return self._answer(call)

    def take(self, call: Call, body: ArrivedBody) -> bool:
        """Take a call whose body is still in the socket, if nothing but its rows is in it."""
        fast = self._fast.path
        if fast is None or fast.version is not self._find() or len(body) > FAST_BYTES:
            return False
        return (call.head.memo or meet(call)) is RAW and fast.take(call, body)

    def _open(self, version: Version) -> RestFastPath | None:
        """The fast path of this version."""
        return RestFastPath.open(self._service, version, self._service.signatures.of(version).default)

    def _answer(self, call: Call) -> Coroutine[Any, Any, None]:
        return answer_slowly(call, RestPredictRequest(self._service, self._target, call))


class RestPredictRequest(RestRequest):
    """A predict as the general path answers it."""

    async def read(self) -> InferRequest:
        service = self.service
        body = await service.body(self.call)
        self.version = self._find_version(body)
        signatures = service.signatures.of(self.version)
        reader = read_raw if self._is_raw(body) else read_predict
        self._view, self._columnar, inputs = await service.offload(len(body), reader, signatures, body)
        names = self._view.signature.input_names
        given = {names[alias]: tensor for alias, tensor in inputs.items()}
        return InferRequest(given, self._view.wanted, deadline_ns=self.deadline_ns)

    def _is_raw(self, body: bytes | bytearray) -> bool:
        return is_raw(self.call) and not body.startswith(b'{"')

    def _find_version(self, body: bytes | bytearray) -> Version:
        try:
            return find_version(self.service.catalog, self.target)
        except ServeError:
            if len(body) <= EXPLAIN_BYTES and not self._is_raw(
                body
            ):  # a body that is not JSON is the first thing wrong (spec 1.6)
                read_signature_name(read_document(body))
            raise

    async def write(self, response: InferResponse) -> None:
        names, outputs, offload = self._view.signature.output_names, response.outputs, self.service.offload
        self.body = await offload(response.nbytes, write_predict, names, outputs, columnar=self._columnar)


def meet(call: Call) -> str:
    """Return the kind of body that a head announces. Equal heads are one object, looked at once."""
    kind = CODED if call.header(b"content-encoding") else RAW if is_raw(call) else JSON_TEXT
    call.head.memo = kind
    return kind


def is_raw(call: Call) -> bool:
    """Whether the body may be bare rows."""
    return call.header(b"content-type").partition(b";")[0].strip().lower() == RAW_TYPE


def read_raw(signatures: SignatureViews, body: bytes | bytearray) -> Read:
    """A body that may be bare rows for the default signature. Raises ServeError."""
    view = signatures.default
    tensor = None if view.rows is None else view.rows.read(body)
    if tensor is None:
        return read_predict(signatures, body)
    return view, False, {next(iter(view.signature.inputs)): tensor}


def read_predict(signatures: SignatureViews, body: bytes | bytearray) -> Read:
    """A JSON body of predict. Raises ServeError."""
    try:
        view, read = _read_compiled(signatures, body)
    except JSONFault as fault:
        if len(body) <= EXPLAIN_BYTES:
            return read_plain(signatures, body)
        if fault.code is Fault.OTHER_SIGNATURE:
            signatures.find(to_text(fault.signature or b""))
        raise short_error(fault) from None
    specs = view.signature.inputs
    inputs = {
        alias: Tensor(specs[alias].dtype, shape, data) for alias, (_, shape, data) in read.tensors.items()
    }
    return view, read.columnar, inputs


def _read_compiled(signatures: SignatureViews, body: bytes | bytearray) -> tuple[SignatureView, PredictBody]:
    """With the signature last asked for; a body that names another one says which."""
    view = signatures.latest
    try:
        return view, view.reader.read(body)
    except JSONFault as fault:
        if fault.code is not Fault.OTHER_SIGNATURE:
            raise
        try:
            view = signatures.find(to_text(fault.signature or b""))
        except ServeError:
            raise fault from None
        return view, view.reader.read(body)


def read_plain(signatures: SignatureViews, body: bytes | bytearray) -> Read:
    """The exact way, which raises the original's error, or reads what the compiled way would not."""
    document = read_document(body)
    view = signatures.find(read_signature_name(document))
    specs = view.signature.inputs
    columnar, inputs = read_tensors(document, {alias: spec.dtype for alias, spec in specs.items()})
    return view, columnar, inputs


def write_predict(names: Mapping[str, str], outputs: Mapping[str, Tensor], *, columnar: bool) -> bytes:
    """The body of a reply. `names`: a signature's -> the model's, which `outputs` have. Raises ServeError."""
    found = ((alias, outputs[name]) for alias, name in names.items())
    named = [(alias, tensor.dtype.code, tensor.shape, tensor.data) for alias, tensor in found]
    try:
        return write_outputs(named) if columnar else write_predictions(named)
    except WriterFault as fault:
        raise writer_error(fault) from None
