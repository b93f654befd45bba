"""A dialect of fastserve, whole: rows of numbers as lines of CSV. docs/writing-a-dialect.md walks through it.

    POST /csv/scale   1,2,3,4 in a line, and so on    200  3,6,9,12 in a line each; or  error,400,why
    GET  /csv/scale                                   200  version,1 and a line for each tensor

For models with a batch axis, one input and one output.
"""

from array import array
from collections.abc import Coroutine, Sequence
from math import prod
from typing import Any

from fastserve.errors import Kind, ServeError, invalid
from fastserve.net.access_control import Scope
from fastserve.net.request import Call
from fastserve.net.router import CANONICAL_STATUS, Route
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.dialect import (
    Dialect,
    DialectService,
    DialectSpec,
    HttpRoute,
    NoOptions,
    ServingContext,
)
from fastserve.serving.fast_path import FastPath, Outcome, PathCache, open_path
from fastserve.serving.prepared_requests import Described, Memory, PreparedRequest
from fastserve.serving.slow_path import SlowRequest, answer_slowly
from fastserve.tensor import Tensor
from fastserve.util.offload import OFFLOAD_BYTES

CSV = b"text/csv"
ROUTE = HttpRoute("rows", "/csv/MODEL", {"GET": Scope.METADATA, "POST": Scope.INFER})
CODES: Any = {"float32": "f", "float64": "d", "int32": "i", "int64": "q"}
SHOWN = {"f": ".9g", "d": ".17g"}
Lines = Sequence[bytes | bytearray]


class Codec:
    """How the rows of one version are read and written: no I/O, and the same on both paths."""

    def __init__(self, version: Version) -> None:
        for specs in (version.inputs, version.outputs):
            numbers = all(spec.row_bytes and spec.dtype.name in CODES for spec in specs.values())
            if len(specs) != 1 or not numbers or not version.batching:
                raise invalid(f"model {version.model!r} does not make rows of numbers of rows of numbers")
        (self.input,), (self.output,) = version.inputs.values(), version.outputs.values()
        self.shape, self.items = self.input.shape or (), prod(self.input.shape or ())

    def inputs(self, rows: int, data: bytes) -> dict[str, Tensor]:
        return {self.input.name: Tensor(self.input.dtype, (rows, *self.shape), data)}

    def read(self, lines: Lines) -> bytes:
        """The memory of the rows. Raises ServeError naming the line that is wrong."""
        numbers = array(CODES[self.input.dtype.name])
        number = float if numbers.typecode in SHOWN else int
        for at, line in enumerate(lines, 1):
            given = line.split(b",")
            if len(given) != self.items:
                raise invalid(f"line {at}: given {len(given)} numbers, allowed: {self.items}")
            try:
                numbers.extend(map(number, given))
            except (ValueError, OverflowError):
                raise invalid(f"line {at}: given what is no {self.input.dtype.name}") from None
        return numbers.tobytes()

    def reply(self, call: Call, data: Memory, rows: int) -> None:
        """Answer with the rows of the output."""
        code = CODES[self.output.dtype.name]
        texts = [format(n, SHOWN.get(code, "d")) for n in memoryview(data).cast("B").cast(code)]
        width = len(texts) // rows if rows else 1
        lines = (",".join(texts[at : at + width]) + "\n" for at in range(0, len(texts), width))
        call.reply(200, "".join(lines).encode(), CSV)

    def reply_response(self, call: Call, response: InferResponse) -> None:
        found = response.outputs[self.output.name]
        self.reply(call, found.data, found.shape[0])


class Rows(PreparedRequest):
    """The fast path of one version: all of its requests are alike but for their number of rows."""

    def __init__(self, version: Version, path: FastPath) -> None:
        self.version, self._path, self._codec = version, path, Codec(version)
        self.lay_out(path.queue, self._codec.inputs(1, b""), (self._codec.output.name,), batching=True)

    def start(self, call: Call, lines: Lines) -> bool:
        """Take the call, or return False: nothing has happened then."""
        self.rows = len(lines)
        return 0 < self.rows <= self._path.queue.max_rows and self._path.start(call, self, lines)

    def fill(self, source: Lines, memory: list[memoryview]) -> bool:
        memory[0][:] = self._codec.read(source)  # when it raises, the general path reads again and reports
        return True

    def make_writer(self, described: Described) -> int:
        return described[0][2][0]  # answers of this form have so many rows

    def write(self, exchange: Call, writer: int, memory: Any, request_id: Any, held: Any) -> None:
        self._codec.reply(exchange, memory[0], writer)

    def write_response(self, exchange: Call, response: InferResponse, request_id: Any, held: Any) -> None:
        self._codec.reply_response(exchange, response)


class Infer(SlowRequest):
    """One call on the general path: any scheduler, any number of rows, and words for what is wrong."""

    def __init__(self, model: "Model", call: Call) -> None:
        self._model, self._call, self.service = model, call, model.service

    async def read(self) -> InferRequest:
        self.version, body = self._model.find(), self._call.body
        self._codec, lines = Codec(self.version), body.splitlines()
        data = await self.service.offload(len(body), self._codec.read, lines)
        return InferRequest(self._codec.inputs(len(lines), data))

    async def write(self, response: InferResponse) -> None:
        self._codec.reply_response(self._call, response)

    def refused(self, fault: ServeError) -> None:
        self._model.refused(self._call, None, None, fault)


class Model:
    """The endpoints of one model."""

    def __init__(self, dialect: "CsvRows", name: str) -> None:
        self.dialect, self._name = dialect, name
        self.service: DialectService = dialect.service
        self._last: PathCache[Rows] = PathCache(self.service.keepers, self._open)

    def infer(self, call: Call) -> Coroutine[Any, Any, None] | None:
        rows = self._last.find(self.service.catalog.available(self._name))
        if rows is not None and len(call.body) < OFFLOAD_BYTES and rows.start(call, call.body.splitlines()):
            return None
        return answer_slowly(call, Infer(self, call))

    def describe(self, call: Call) -> None:
        try:
            version, codec = self.find(), Codec(self.find())
        except ServeError as fault:
            return self.refused(call, None, None, fault)
        text = f"version,{version.number}\n"
        for kind, spec in (("input", codec.input), ("output", codec.output)):
            text += f"{kind},{spec.name},{spec.dtype.name},{'x'.join(map(str, spec.shape or ()))}\n"
        call.reply(200, text.encode(), CSV)

    def find(self) -> Version:
        version = self.service.catalog.available(self._name)
        if version is None:
            raise ServeError(Kind.NOT_FOUND, f"there is no model {self._name!r}")
        return version

    def refused(self, exchange: Call, prepared: Rows | None, request_id: Any, fault: ServeError) -> None:
        self.dialect.refuse(exchange, fault)
        self.service.traffic.refused(self._name, fault.kind.name)

    def _open(self, version: Version) -> Rows | None:
        path = open_path(version, self.service.traffic, Outcome(self.refused))
        try:
            return None if path is None else Rows(version, path)
        except ServeError:
            return None  # the general path says why


class CsvRows(Dialect):
    """What the endpoints of one front process share."""

    def __init__(self, context: ServingContext, options: NoOptions) -> None:
        self.service = DialectService(context, SPEC.name)

    def route(self, method: str, target: str) -> Route | None:
        before, _, name = target.partition("/csv/")
        if before or not name or method not in ROUTE.scopes:
            return None
        model = Model(self, name)
        return Route(model.infer if method == "POST" else model.describe, ROUTE.scopes[method])

    def refuse(self, call: Call, fault: ServeError) -> None:
        status = CANONICAL_STATUS[fault.kind]
        call.reply(status, f"error,{status},{fault.message}\n".encode("utf-8", "replace"), CSV)


SPEC = DialectSpec(name="csv_rows", options=NoOptions, build=CsvRows, routes=(ROUTE,))
