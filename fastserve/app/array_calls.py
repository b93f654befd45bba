"""Calls of functions of arrays: POST /NAME {"x": [...]}, by the fast path and by the general one.

    {"x": [[1, 2], [3, 4]]}    rows                          [[3.0, 6.0], [9.0, 12.0]]
    {"x": [1, 2]}              a row, without their axis     [3.0, 6.0]

The fast path takes bodies of one input whose rows have a fixed size, answered by one output of that kind: the
compiled reader writes them into the batch, the compiled writer prints the reply from it. The general path
reads every good body by the compiled reader as well, and says of others which member is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from fastserve._ext.json_reader import Fault, JSONFault, PredictReader
from fastserve._ext.json_writer import MODE_SHORTEST, RowWriter, WriterFault, write_string, write_values
from fastserve.errors import ServeError, internal, invalid
from fastserve.net.limits import JSON
from fastserve.net.request import Call
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.dialect import DialectService
from fastserve.serving.fast_path import FastPath, Outcome, open_path
from fastserve.serving.prepared_requests import Described, Later, Memory, PreparedRequest
from fastserve.tensor import DTYPE_BY_CODE, Tensor
from fastserve.util.offload import OFFLOAD_BYTES

SIGNATURE = b"serving_default"
MOST_EXPLAINED = 1 << 18
"""Bytes of a body that is read once more for the name of the member that is wrong."""
FAST_BYTES = 8 << 20  # up to 20 ms; larger bodies are read in a thread
CODED, PLAIN = "coded", "plain"  # kinds of bodies
Refused = Callable[[Call, ServeError], None]


def kind_of_body(call: Call) -> str:
    """Return the kind of body that a head announces. Equal heads are one object, looked at once."""
    kind: str = call.head.memo or (CODED if call.header(b"content-encoding") else PLAIN)
    call.head.memo = kind
    return kind


class ArrayRows(PreparedRequest):
    """Bodies of rows. `rows` is set for each; `lone` bodies are one row without the axis of rows."""

    def __init__(self, service: DialectService, path: FastPath, reader: PredictReader, *, lone: bool) -> None:
        """Raises WriterFault for an output that cannot be written."""
        version, self.lone = path.version, lone
        (given,) = version.inputs.values()
        ((self._name, output),) = version.outputs.items()
        self._shape = given.shape or ()
        self._read, self._offload = reader.read_member, service.offload
        self._about = (self._name, output.dtype.code, output.shape or ())
        self._writer = RowWriter(*self._about, MODE_SHORTEST)
        inputs = {name: Tensor(one.dtype, (1, *self._shape), b"") for name, one in version.inputs.items()}
        self.lay_out_like(path.queue, InferRequest(inputs), batching=True)

    def fill(self, source: Memory, memory: list[memoryview]) -> bool:
        return not self._read(source, memory[0], self._shape, -1 if self.lone else self.rows)

    def make_writer(self, described: Described) -> tuple[RowWriter, int] | None:
        (name, dtype, shape), *more = described
        rows = -1 if self.lone else shape[0]
        return None if more or (name, dtype.code, shape[1:]) != self._about else (self._writer, rows)

    def write(
        self,
        exchange: Call,
        writer: tuple[RowWriter, int],
        memory: Sequence[Memory],
        request_id: str,
        held: None,
    ) -> Later | None:
        if len(memory[0]) >= OFFLOAD_BYTES:
            return self._write_later(exchange, writer[1], memory[0])
        head = exchange.raw_head()
        try:
            text = writer[0].write_bare(memory[0], writer[1], head)
        except WriterFault:
            raise unwritable(self._name) from None
        if head:
            exchange.reply_raw(text)
        else:
            exchange.reply(200, text, JSON)
        return None

    async def _write_later(self, exchange: Call, rows: int, memory: Memory) -> None:
        writer = RowWriter(*self._about, MODE_SHORTEST)
        try:
            text = await self._offload(len(memory), writer.write_bare, memory, rows, b"")
        except WriterFault:
            raise unwritable(self._name) from None
        exchange.reply(200, text, JSON)

    def write_response(self, exchange: Call, response: InferResponse, request_id: str, held: None) -> None:
        exchange.reply(200, write_arrays(response, (self._name,), single=self.lone), JSON)


class ArrayFastPath:
    """The fast path of one version."""

    __slots__ = ("_count", "_lone", "_max_rows", "_path", "_rows", "_shape", "version")

    def __init__(self, service: DialectService, path: FastPath) -> None:
        """Raises WriterFault for an output that cannot be written."""
        self.version, self._path, self._max_rows = path.version, path, path.queue.max_rows
        ((name, given),) = path.version.inputs.items()
        reader = PredictReader([(name, given.dtype.code)], SIGNATURE, is_default=True)
        self._count, self._shape = reader.count_member, given.shape or ()
        self._rows = ArrayRows(service, path, reader, lone=False)
        self._lone = ArrayRows(service, path, reader, lone=True)

    @classmethod
    def open(cls, service: DialectService, version: Version, refuse: Refused) -> ArrayFastPath | None:
        """Open the fast path of a version; None for one whose rows have no fixed size, or several members."""
        if not len(version.inputs) == len(version.outputs) == 1:
            return None
        sides = (*version.inputs.values(), *version.outputs.values())
        if not version.batching or not all(one.row_bytes for one in sides):
            return None

        def refused(call: Call, prepared: ArrayRows, request_id: str, fault: ServeError) -> None:
            refuse(call, fault)

        path = open_path(version, service.traffic, Outcome(refused))
        if path is None:
            return None
        try:
            return cls(service, path)
        except WriterFault:
            return None  # the general path says so

    def start(self, call: Call) -> bool:
        """Take the call, or return False: nothing has happened then."""
        body = call.body
        if len(body) > FAST_BYTES or (call.head.memo or kind_of_body(call)) is not PLAIN:
            return False
        rows = self._count(body, self._shape)
        prepared = self._rows
        if rows < 0:
            prepared, rows = self._lone, 1
        if not 0 < rows <= self._max_rows:
            return False
        prepared.rows = rows
        return self._path.start(call, prepared, body, "", call.deadline_ns)


class ArrayReader:
    """Reads and writes the JSON of a version's tensors."""

    def __init__(self, version: Version) -> None:
        self._batching = version.batching
        self._inputs = version.inputs
        self._ranks = {name: None if s.shape is None else len(s.shape) for name, s in version.inputs.items()}
        sides = [(name, spec.dtype.code) for name, spec in version.inputs.items()]
        self._reader = PredictReader(sides, SIGNATURE, is_default=True)

    def read(self, body: bytes | bytearray) -> tuple[dict[str, Tensor], bool]:
        """Return the tensors of a body, and whether it is one row without the axis of rows. Raises
        ServeError."""
        try:
            found = self._reader.read_inputs(body or b"{}").tensors
        except JSONFault as fault:
            raise invalid(self._explain(body, fault)) from None
        tensors = {n: Tensor(DTYPE_BY_CODE[code], shape, data) for n, (code, shape, data) in found.items()}
        single = self._batching and all(len(t.shape) == self._ranks[name] for name, t in tensors.items())
        if single:
            tensors = {n: Tensor(t.dtype, (1, *t.shape), t.data) for n, t in tensors.items()}
        return tensors, single

    def _explain(self, body: bytes | bytearray, fault: JSONFault) -> str:
        """Return what is wrong with a body, by the name of the member. Only small bodies are read again."""
        words = Fault(fault.code).name.lower().replace("_", " ")
        short = f"the body cannot be read: {words} at byte {fault.offset}"
        if len(body) > MOST_EXPLAINED:
            return short
        try:
            document = msgspec.json.decode(body or b"{}")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return f"the body is not JSON: {words} at byte {fault.offset}"
        names = ", ".join(self._inputs)
        if not isinstance(document, dict):
            return f"the body does not fit: given a {type(document).__name__}, allowed: an object of {names}"
        for name in document:
            if name not in self._inputs:
                return f"{name}: the model has no such input, allowed: {names}"
        for name, spec in self._inputs.items():
            if name not in document:
                return f"{name}: missing, wanted: an array of {spec.dtype.name}"
            try:
                self._reader_of(name).read_inputs(msgspec.json.encode({name: document[name]}))
            except JSONFault as one:
                if one.code == Fault.RAGGED:
                    return f"{name}: its lists differ in length"
                return f"{name}: allowed: an array of {spec.dtype.name}"
        return short

    def _reader_of(self, name: str) -> PredictReader:
        return PredictReader([(name, self._inputs[name].dtype.code)], SIGNATURE, is_default=True)


def write_arrays(response: InferResponse, names: Sequence[str], *, single: bool) -> bytes:
    """Return the outputs of these names as JSON: of several an object. Raises ServeError."""
    texts = {}
    for name in names:
        tensor = response.outputs[name]
        shape = tensor.shape[1:] if single else tensor.shape
        try:
            texts[name] = write_values(tensor.data, tensor.dtype.code, shape, MODE_SHORTEST)
        except WriterFault:
            raise unwritable(name) from None
    if len(texts) == 1:
        return next(iter(texts.values()))
    members = (b"%b:%b" % (write_string(name.encode()), text) for name, text in texts.items())
    return b"{%b}" % b",".join(members)


def unwritable(name: str) -> ServeError:
    """Return the error for an output that has no form in JSON."""
    return internal(f"output {name!r} cannot be written as JSON")
