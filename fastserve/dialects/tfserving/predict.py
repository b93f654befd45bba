"""POST ...:predict. Read the body, await the engine, write the reply.

The compiled reader takes every good body. What it refuses is read again the exact way, which
finds the original's error text (spec 1.6, 2); beyond EXPLAIN_BYTES that would cost too much, and
the answer is the compiled reader's own short text.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from fastserve._ext.json_reader import Fault, JSONFault, PredictBody
from fastserve._ext.json_writer import WriterFault, write_outputs, write_predictions
from fastserve.codec.client_text import to_text
from fastserve.dialects.tfserving.document import read_document, read_signature_name
from fastserve.dialects.tfserving.errors import writer_error
from fastserve.dialects.tfserving.explain import read_tensors
from fastserve.dialects.tfserving.fast import Fast
from fastserve.dialects.tfserving.routes import Target
from fastserve.dialects.tfserving.service import GeneralRequest, Service
from fastserve.dialects.tfserving.short_texts import short_error
from fastserve.dialects.tfserving.signatures import Signatures, SignatureView, find_version
from fastserve.errors import ServeError
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.paths import LastPath
from fastserve.serving.slow_path import answer_slowly
from fastserve.tensor import DTYPE_BY_CODE, Tensor
from fastserve.wire.arrived import Arrived
from fastserve.wire.call import Call

FAST_BYTES = 8 << 20  # up to 20 ms; larger bodies are read apart from the event loop
EXPLAIN_BYTES = 1 << 18  # reading and explaining cost up to 0.35 us a byte, in which nobody else is served
RAW_TYPE = b"application/octet-stream"
CODED, RAW, JSON_TEXT = "coded", "raw", "json"  # kinds of bodies

Inputs = dict[str, Tensor]  # by the signature's names
Read = tuple[SignatureView, bool, Inputs]  # the signature, whether the body is columnar, the inputs


class Predict:
    """The endpoint of one target."""

    __slots__ = ("_fast", "_find", "_service", "_target")

    def __init__(self, service: Service, target: Target) -> None:
        self._service = service
        self._target = target
        catalog = service.catalog
        self._find: Callable[[], Version | None]
        if target.label is None:
            self._find = partial(catalog.available, target.name, target.version)
        else:
            self._find = partial(catalog.labelled, target.name, target.label)
        self._fast: LastPath[Fast] = LastPath(service.keepers, self._open)

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

    def take(self, call: Call, body: Arrived) -> bool:
        """Take a call whose body is still in the socket, if nothing but its rows is in it."""
        fast = self._fast.path
        if fast is None or fast.version is not self._find() or len(body) > FAST_BYTES:
            return False
        return (call.head.memo or meet(call)) is RAW and fast.take(call, body)

    def _open(self, version: Version) -> Fast | None:
        """The fast path of this version."""
        return Fast.open(self._service, version, self._service.signatures.of(version).default)

    def _answer(self, call: Call) -> Coroutine[Any, Any, None]:
        return answer_slowly(call, GeneralPredict(self._service, self._target, call))


class GeneralPredict(GeneralRequest):
    """A predict as the general path answers it."""

    async def read(self) -> InferRequest:
        service = self.service
        body = await service.body(self.call)
        self.version = self._find_version(body)
        signatures = service.signatures.of(self.version)
        reader = read_raw if self._is_raw(body) else read_predict
        self._view, self._columnar, inputs = await service.apart(len(body), reader, signatures, body)
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
        names, outputs, apart = self._view.signature.output_names, response.outputs, self.service.apart
        self.body = await apart(response.nbytes, write_predict, names, outputs, columnar=self._columnar)


def meet(call: Call) -> str:
    """What kind of body a head tells of. The wire hands equal heads on as one: they are looked at once."""
    kind = CODED if call.header(b"content-encoding") else RAW if is_raw(call) else JSON_TEXT
    call.head.memo = kind
    return kind


def is_raw(call: Call) -> bool:
    """Whether the body may be bare rows."""
    return call.header(b"content-type").partition(b";")[0].strip().lower() == RAW_TYPE


def read_raw(signatures: Signatures, body: bytes | bytearray) -> Read:
    """A body that may be bare rows for the default signature. Raises ServeError."""
    view = signatures.default
    tensor = None if view.rows is None else view.rows.read(body)
    if tensor is None:
        return read_predict(signatures, body)
    return view, False, {next(iter(view.signature.inputs)): tensor}


def read_predict(signatures: Signatures, body: bytes | bytearray) -> Read:
    """A JSON body of predict. Raises ServeError."""
    try:
        view, read = _read_compiled(signatures, body)
    except JSONFault as fault:
        if len(body) <= EXPLAIN_BYTES:
            return read_plain(signatures, body)
        if fault.code is Fault.OTHER_SIGNATURE:
            signatures.find(to_text(fault.signature or b""))
        raise short_error(fault) from None
    inputs = {
        alias: Tensor(DTYPE_BY_CODE[code], shape, data) for alias, (code, shape, data) in read.tensors.items()
    }
    return view, read.columnar, inputs


def _read_compiled(signatures: Signatures, body: bytes | bytearray) -> tuple[SignatureView, PredictBody]:
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


def read_plain(signatures: Signatures, body: bytes | bytearray) -> Read:
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
