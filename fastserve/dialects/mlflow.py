"""MLflow's scoring protocol: what `mlflow models serve` answers, for any model of rows or tensors.

    POST /invocations                     {"dataframe_split": {"columns": [...], "data": [[...], ...]}}
    POST /endpoints/NAME/invocations      {"dataframe_records": [{...}, ...]}, {"instances": ...},
                                          {"inputs": ...}, or text/csv with a line of names
        200  {"predictions": [...]}
        400  {"error_code": "BAD_REQUEST", "message": "..."}
    GET  /ping, /health                   200 once the server is ready
    GET  /version

The model of /invocations is the option `model`, or the only one. A table becomes one matrix, in the order in
which it came, where the model has one input of several numbers a row; else an input for each column, by its
name, and columns that the model has not are passed over.

Tables of one type of numbers, and all `instances` and `inputs`, are read by the compiled reader. Others (a
table with texts, with null) are read value by value: of at most MOST_VALUES values, since each is an object.
"""

from __future__ import annotations

import csv
import io
import math
import re
from array import array
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import msgspec

from fastserve import __version__
from fastserve._ext.flatten import FlattenFault, flatten, pack_bytes, unpack_bytes
from fastserve._ext.json_reader import Fault, JSONFault, PredictReader
from fastserve._ext.json_value import JSONSyntaxError, Members, parse
from fastserve._ext.json_writer import MODE_SHORTEST, WriterFault, write_string, write_values
from fastserve.codec.json_text import to_text
from fastserve.errors import Kind, ServeError, internal, invalid
from fastserve.net.access_control import Scope
from fastserve.net.compression import inflate, inflate_offloaded
from fastserve.net.limits import JSON
from fastserve.net.request import Call
from fastserve.net.router import CANONICAL_STATUS, Route, Yields, fault_headers
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.serving.api_operations import (
    ApiOperation,
    ModelFacts,
    array_schema,
    json_content,
    object_schema,
    value_schema,
)
from fastserve.serving.dialect import (
    Dialect,
    DialectService,
    DialectSpec,
    HttpRoute,
    ListenerPolicy,
    ServingContext,
)
from fastserve.serving.fast_path import PerVersion
from fastserve.serving.slow_path import SlowRequest, answer_slowly
from fastserve.tensor import DTYPE_BY_CODE, DTYPES, Tensor, TensorSpec

MOST_VALUES = 1 << 18
"""Values of a body that is read value by value: about 100 bytes each."""
MOST_CELLS = 1 << 20
"""Cells of a table in CSV, which are read by Python: up to a second."""
CSV_ROWS, CSV_CELLS = 1024, 1 << 16  # that are text at a time
PIECE = 1 << 14  # numbers
_SIGNATURE = b"serving_default"
_PROBES = dict.fromkeys(("GET", "HEAD"), Scope.HEALTH)
INVOKE = HttpRoute("invocations", "/invocations", {"POST": Scope.INFER})
NAMED = HttpRoute("endpoint", "/endpoints/NAME/invocations", {"POST": Scope.INFER})
PING = HttpRoute("ping", "/ping", _PROBES)
HEALTH = HttpRoute("health", "/health", _PROBES)
VERSION = HttpRoute("version", "/version", {"GET": Scope.METADATA})
_NAMED = re.compile(r"/endpoints/([A-Za-z0-9_.-]{1,128})/invocations")
_FORMS = ("dataframe_split", "dataframe_records", "instances", "inputs")
_WANTED = "allowed: an object with one of " + ", ".join(_FORMS)
_ENVELOPE = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"(dataframe_split|dataframe_records)"[ \t\r\n]*:')
_END = re.compile(rb"[ \t\r\n]*\}[ \t\r\n]*\Z")
_CAST: dict[str, Any] = {
    "float32": "f",
    "float64": "d",
    "int32": "i",
    "int64": "q",
}  # types of columns in a matrix
_MISSING = {"", "nan", "NaN", "NA", "N/A", "NULL", "null", "None", "<NA>", "n/a", "#N/A", "-nan", "-NaN"}
_CODES = {
    Kind.INVALID_ARGUMENT: "BAD_REQUEST",
    Kind.FAILED_PRECONDITION: "BAD_REQUEST",
    Kind.OUT_OF_RANGE: "BAD_REQUEST",
    Kind.NOT_FOUND: "RESOURCE_DOES_NOT_EXIST",
    Kind.RESOURCE_EXHAUSTED: "REQUEST_LIMIT_EXCEEDED",
    Kind.UNAVAILABLE: "TEMPORARILY_UNAVAILABLE",
    Kind.PERMISSION_DENIED: "PERMISSION_DENIED",
    Kind.UNAUTHENTICATED: "UNAUTHENTICATED",
    Kind.DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
    Kind.CANCELLED: "CANCELLED",
    Kind.UNIMPLEMENTED: "NOT_IMPLEMENTED",
}
Body = bytes | bytearray


class MlflowOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the dialect."""

    model: str = ""
    """The model of /invocations; "" for the only one that is served."""


class MlflowDialect(Dialect):
    """The dialect of one front process."""

    def __init__(self, context: ServingContext, options: MlflowOptions) -> None:
        self.service = DialectService(context, SPEC.name)
        self.readers = PerVersion(self.service.keepers, InputReader)
        self._model = options.model

    def route(self, method: str, target: str) -> Route | None:
        """Return the route of a path of MLflow's; None for any other."""
        path = target.partition("?")[0]
        if path == INVOKE.path and method == "POST":
            return Route(partial(self._invoke, ""), Scope.INFER, Yields.FIRST)
        named = _NAMED.fullmatch(path)
        if named is not None and method == "POST":
            return Route(partial(self._invoke, named[1]), Scope.INFER, Yields.FIRST)
        if path in (PING.path, HEALTH.path) and method in _PROBES:
            return Route(self._ping, Scope.HEALTH, Yields.FIRST)
        if path == VERSION.path and method == "GET":
            return Route(self._show_version, Scope.METADATA, Yields.FIRST)
        return None

    def refuse(self, call: Call, fault: ServeError) -> None:
        fault = call.cause_of(fault)
        code = _CODES.get(fault.kind, "INTERNAL_ERROR")
        body = msgspec.json.encode({"error_code": code, "message": fault.message})
        call.reply(CANONICAL_STATUS[fault.kind], body, JSON, fault_headers(fault))

    def find(self, name: str) -> Version:
        """Return the version that answers for a model, or with "" for /invocations. Raises ServeError."""
        catalog = self.service.catalog
        name = name or self._only()
        version = catalog.available(name, None)
        if version is not None:
            return version
        catalog.explain_absence(name)
        if name in catalog.models:
            raise ServeError(Kind.UNAVAILABLE, f"model {name!r} is not available now")
        raise ServeError(Kind.NOT_FOUND, f"there is no model {name!r}")

    def _only(self) -> str:
        name = self.name_of_invocations()
        if name:
            return name
        count = len(self.service.catalog.models)
        raise ServeError(
            Kind.NOT_FOUND,
            f"/invocations is for one model, and {count} are served: POST /endpoints/NAME/invocations, or "
            "set dialect_options.mlflow.model",
        )

    def name_of_invocations(self) -> str:
        """Return the model of /invocations as requests are counted; "" where there is none."""
        models = self.service.catalog.models
        return self._model or (next(iter(models)) if len(models) == 1 else "")

    def _invoke(self, name: str, call: Call) -> Coroutine[Any, Any, None]:
        return answer_slowly(call, Invocation(self, call, name))

    def _ping(self, call: Call) -> None:
        if self.service.readiness.ready:
            call.reply(200, b"\n", JSON)
        else:
            self.refuse(call, ServeError(Kind.UNAVAILABLE, "the models are not ready"))

    def _show_version(self, call: Call) -> None:
        call.reply(200, __version__.encode(), b"text/plain")


class Invocation(SlowRequest):
    """One request."""

    _is_table = False

    def __init__(self, dialect: MlflowDialect, call: Call, name: str) -> None:
        self._dialect, self._call, self._name, self.service = dialect, call, name, dialect.service

    async def read(self) -> InferRequest:
        call = self._call
        is_csv = _is_csv(call.header(b"content-type"))
        self.version = self._dialect.find(self._name)
        body = await self._body()
        reader = self._dialect.readers.of(self.version)
        read = reader.read_csv if is_csv else reader.read_json
        tensors, self._is_table = await self.service.offload(len(body), read, body)
        return InferRequest(tensors, deadline_ns=call.deadline_ns, request_id=call.request_id)

    async def _body(self) -> Body:
        call, limits = self._call, self.service.limits
        coding = call.header(b"content-encoding").strip().lower()
        if coding in (b"", b"identity"):
            return call.body
        if coding not in (b"gzip", b"deflate"):
            raise invalid("content-encoding: allowed: gzip, deflate")
        return await inflate_offloaded(
            call.claim, self.service.offload, len(call.body), limits, inflate, call.body, limits
        )

    async def write(self, response: InferResponse) -> None:
        names = list(self.version.outputs)
        named = len(names) > 1 or self.version.config.backend == "onnx"
        by_row = self._is_table and self.version.batching
        write = partial(write_predictions, response, names, named=named, by_row=by_row)
        self._call.reply(200, await self.service.offload(response.nbytes, write), JSON)

    def refused(self, fault: ServeError) -> None:
        model = self._name or self._dialect.name_of_invocations()
        self.service.traffic.refused(model, fault.kind.name, message=fault.message, exchange=self._call)
        self._dialect.refuse(self._call, fault)


def _is_csv(header: bytes) -> bool:
    """Return whether a body is CSV, and not JSON. Raises ServeError for any other type."""
    kind, *more = (part.strip().lower() for part in header.split(b";"))
    for part in more:
        if part not in (b"", b"charset=utf-8", b'charset="utf-8"'):
            raise invalid("content-type: given a parameter, allowed: charset=utf-8")
    if kind not in (b"", b"application/json", b"text/csv"):
        raise invalid("content-type: allowed: application/json, text/csv")
    return kind == b"text/csv"


# ---- requests


class InputReader:
    """Reads bodies into the tensors of a version."""

    def __init__(self, version: Version) -> None:
        self._inputs = dict(version.inputs)
        self._batching = version.batching
        codes = [(name, spec.dtype.code) for name, spec in version.inputs.items()]
        self._reader = PredictReader(codes, _SIGNATURE, is_default=True)
        dtypes = {spec.dtype.name for spec in version.inputs.values()}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else ""
        self._splits: list[PredictReader] = []
        if self._dtype in _CAST:
            code, text, number = (DTYPES[one].code for one in (self._dtype, "bytes", "int64"))
            members = ("columns", text), ("data", code)
            for some in (members, (*members, ("index", number))):
                self._splits.append(PredictReader(some, _SIGNATURE, is_default=True))

    @property
    def _is_matrix(self) -> bool:
        """Whether a table is one input."""
        specs = list(self._inputs.values())
        return len(specs) == 1 and specs[0].shape not in ((), (1,))

    def read_json(self, body: Body) -> tuple[dict[str, Tensor], bool]:
        """Return the tensors of a body, and whether it is a table. Raises ServeError."""
        envelope = _ENVELOPE.match(body)
        if envelope is not None:
            found = self._read_table_quickly(envelope[1], body, envelope.end())
            return found if found is not None else self._read_plainly(body)
        if b'"params"' in body or b'"dataframe_' in body:
            return self._read_plainly(body)
        try:
            read = self._reader.read(body)
        except JSONFault as fault:
            return self._read_plainly(body, fault)
        tensors = {n: Tensor(DTYPE_BY_CODE[c], shape, data) for n, (c, shape, data) in read.tensors.items()}
        return self._shaped(tensors), False

    def _read_table_quickly(
        self, form: bytes, body: Body, begin: int
    ) -> tuple[dict[str, Tensor], bool] | None:
        """Return the tensors of a table of numbers of one type; None for another body."""
        end = _END.search(body, max(begin, len(body) - 64))
        if end is None:
            return None
        with memoryview(body) as whole, whole[begin : end.start()] as table:
            if form == b"dataframe_records":
                if self._is_matrix:
                    return None
                try:
                    read = self._reader.read(b"".join((b'{"instances":', table, b"}")))
                except JSONFault:
                    return None
                tensors = {n: Tensor(DTYPE_BY_CODE[c], s, data) for n, (c, s, data) in read.tensors.items()}
                return self._shaped(tensors), True
            for reader in self._splits:
                try:
                    members = reader.read_inputs(table).tensors
                except JSONFault:
                    continue
                return self._split(members), True
        return None

    def _split(self, members: dict[str, tuple[int, tuple[int, ...], bytes]]) -> dict[str, Tensor]:
        _, named, texts = members["columns"]
        code, shape, data = members["data"]
        width = named[0] if named else 1
        if len(shape) != 2 or shape[1] != width:  # before millions of names become objects
            raise invalid(f"dataframe_split: data has rows of another length than columns, {width}")
        if self._is_matrix:
            return self._shaped({name: Tensor(DTYPE_BY_CODE[code], shape, data) for name in self._inputs})
        names = [to_text(name) for name in unpack_bytes(texts, width)]
        places = self._find_columns(names)
        numbers = memoryview(data).cast("B").cast(_CAST[self._dtype])
        return self._shaped(
            {
                n: Tensor(DTYPE_BY_CODE[code], shape[:1], numbers[p::width].tobytes())
                for n, p in places.items()
            }
        )

    def _find_columns(self, names: Sequence[str]) -> dict[str, int]:
        """Return the place of each input's column. Raises ServeError."""
        known = {name: place for place, name in enumerate(names)}
        if len(known) != len(names):
            raise invalid("columns: a name is given twice")
        missing = [name for name in self._inputs if name not in known]
        if missing:
            raise invalid(f"columns: missing {', '.join(missing)}; wanted: {', '.join(self._inputs)}")
        return {name: known[name] for name in self._inputs}

    # ---- value by value

    def _read_plainly(self, body: Body, known: JSONFault | None = None) -> tuple[dict[str, Tensor], bool]:
        try:
            document = parse(body, max_depth=64, max_values=MOST_VALUES)
        except JSONSyntaxError as fault:
            if known is not None and known.code is not Fault.WRONG_TYPE:
                words = f"{known.code.name.lower().replace('_', ' ')} at byte {known.offset}"
            else:
                words = f"{fault.reason} at byte {fault.offset}"
            raise invalid(
                f"the body cannot be read: {words} (of mixed tables up to {MOST_VALUES} values are read; "
                "`inputs` by column have no such bound)"
            ) from None
        if not isinstance(document, Members):
            raise invalid(f"the body is no object; {_WANTED}")
        members = {to_text(name): value for name, value in document}
        forms = [form for form in _FORMS if form in members]
        if len(forms) != 1:
            raise invalid(f"the body has {', '.join(forms) or 'none of the forms'}; {_WANTED}")
        if _has_content(members.get("params")):
            raise invalid("params: given values, allowed: none, since models here take no parameters")
        (form,) = forms
        value = members[form]
        if form == "dataframe_split":
            return self._of_rows(*_read_split(value), form), True
        if form == "dataframe_records":
            return self._of_rows(*_read_records(value, form), form), True
        if isinstance(value, list) and value and isinstance(value[0], Members):
            return self._of_rows(*_read_records(value, form), form), False
        if isinstance(value, Members):
            given = {to_text(name): column for name, column in value}
            self._find_columns(list(given))
            return self._shaped({n: self._flat(n, given[n], form) for n in self._inputs}), False
        if len(self._inputs) > 1:
            raise invalid(f"{form}: given values without names, wanted: {', '.join(self._inputs)}")
        return self._shaped({name: self._flat(name, value, form) for name in self._inputs}), False

    def _of_rows(self, names: list[str], rows: list[Any], form: str) -> dict[str, Tensor]:
        if self._is_matrix:
            return self._shaped({name: self._flat(name, rows, form) for name in self._inputs})
        places = self._find_columns(names)
        return self._shaped({n: self._flat(n, [r[p] for r in rows], form) for n, p in places.items()})

    def _flat(self, name: str, value: Any, form: str) -> Tensor:
        dtype = self._inputs[name].dtype
        missing: Any = b"" if dtype.name == "bytes" else math.nan if "float" in dtype.name else None
        try:
            shape, data = flatten(_filled(value, missing), dtype.code)
        except FlattenFault as fault:
            raise invalid(f"{form}: {name}: {fault}, wanted: {dtype.name}") from None
        except (TypeError, ValueError, OverflowError) as fault:
            raise invalid(f"{form}: {name}: {fault}, wanted: {dtype.name}") from None
        return Tensor(dtype, shape, data)

    def _shaped(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with the axes that a column has not."""
        if not self._batching:
            return tensors
        return {name: _with_axes(tensor, self._inputs[name]) for name, tensor in tensors.items()}

    # ---- CSV

    def read_csv(self, body: Body) -> tuple[dict[str, Tensor], bool]:
        """Return the tensors of a table in CSV, whose first line has the names. Raises ServeError."""
        lines = csv.reader(io.TextIOWrapper(io.BytesIO(body), "utf-8", newline=""))
        try:
            names = next(lines, [])
            columns = {name: _CsvCells(spec) for name, spec in self._inputs.items()}
            if self._is_matrix:
                (matrix,) = columns.values()
                count = _read_lines(lines, len(names), {-1: matrix})
                shape: tuple[int, ...] = (count, len(names))
            else:
                places = {place: columns[name] for name, place in self._find_columns(names).items()}
                shape = (_read_lines(lines, len(names), places),)
        except csv.Error as fault:
            raise invalid(f"line {lines.line_num}: {fault}") from None
        except UnicodeDecodeError as fault:
            raise invalid(f"the body is not UTF-8: {fault.reason}") from None
        return self._shaped({name: one.tensor(shape) for name, one in columns.items()}), True


class _CsvCells:
    """The cells of one input while lines are read."""

    def __init__(self, spec: TensorSpec) -> None:
        """Raises ServeError for a type that a cell has no form of."""
        self._name, self._dtype = spec.name, spec.dtype
        code = _CAST.get(spec.dtype.name, "")
        if not code and spec.dtype.name != "bytes":
            raise invalid(f"text/csv: input {spec.name!r} is {spec.dtype.name}, which no cell can be")
        self._numbers, self._texts = array(code or "B"), bytearray()

    def add(self, cells: Sequence[str], where: str) -> None:
        """Take the cells of some lines. Raises ServeError."""
        if self._dtype.name == "bytes":
            self._texts += pack_bytes("" if cell in _MISSING else cell for cell in cells)
            return
        numbers: array[Any]
        try:
            if self._numbers.typecode in "fd":
                try:
                    numbers = array(self._numbers.typecode, map(float, cells))
                except ValueError:  # text, or a missing value
                    read = [math.nan if cell in _MISSING else float(cell) for cell in cells]
                    numbers = array(self._numbers.typecode, read)
            else:
                numbers = array(self._numbers.typecode, map(int, cells))
        except (ValueError, OverflowError):
            raise invalid(f"{self._name}, {where}: given what is no {self._dtype.name}") from None
        self._numbers.extend(numbers)

    def tensor(self, shape: tuple[int, ...]) -> Tensor:
        """Return all that was taken."""
        data = bytes(self._texts) if self._dtype.name == "bytes" else self._numbers.tobytes()
        return Tensor(self._dtype, shape, data)


def _read_lines(lines: Any, width: int, places: dict[int, _CsvCells]) -> int:
    """Read the lines of a table into its inputs by the places of their columns; at -1 are all columns. Return
    how many there were. Raises ServeError."""
    count, rows = 0, _rows_of(lines, width)
    while some := list(islice(rows, max(1, min(CSV_ROWS, CSV_CELLS // max(width, 1))))):
        count += len(some)
        if count * width > MOST_CELLS:
            raise invalid(f"text/csv: allowed: {MOST_CELLS} cells; of `dataframe_split` there may be more")
        where = f"lines {lines.line_num - len(some) + 1} to {lines.line_num}"
        if -1 in places:
            places[-1].add(list(chain.from_iterable(some)), where)
        else:
            columns = list(zip(*some, strict=True))
            for place, cells in places.items():
                cells.add(columns[place], where)
    return count


def _rows_of(lines: Any, width: int) -> Iterator[list[str]]:
    """Yield the lines that are not empty. Raises ServeError for one of another width."""
    for line in lines:
        if len(line) == width:
            yield line
        elif line:
            raise invalid(f"line {lines.line_num}: given {len(line)} cells, allowed: {width}")


def _with_axes(tensor: Tensor, spec: TensorSpec) -> Tensor:
    if spec.shape == (1,) and len(tensor.shape) == 1:
        return Tensor(tensor.dtype, (*tensor.shape, 1), tensor.data)
    return tensor


def _has_content(value: object) -> bool:
    return value is not None and not (isinstance(value, Members | list) and not len(value))


def _read_split(value: object) -> tuple[list[str], list[Any]]:
    """Return the names of columns, and rows. Raises ServeError."""
    members = {to_text(name): one for name, one in value} if isinstance(value, Members) else {}
    names, rows = members.get("columns"), members.get("data")
    if not isinstance(names, list) or not isinstance(rows, list):
        raise invalid("dataframe_split: allowed: an object with columns, a list, and data, a list of rows")
    for at, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(names):
            raise invalid(f"dataframe_split: data[{at}]: allowed: a list of {len(names)} values")
    return [_column_name(name) for name in names], rows


def _column_name(name: object) -> str:
    return to_text(name) if isinstance(name, bytes) else str(name)


def _read_records(value: object, form: str) -> tuple[list[str], list[Any]]:
    """Return the names of the first record, and the values of all in its order. Raises ServeError."""
    if not isinstance(value, list) or not value or not isinstance(value[0], Members):
        raise invalid(f"{form}: allowed: a list of objects")
    keys = [name for name, _ in value[0]]
    rows = []
    for at, record in enumerate(value):
        found = dict(record.pairs) if isinstance(record, Members) else {}
        if found.keys() != set(keys):
            raise invalid(f"{form}[{at}]: allowed: an object with the names of the first")
        rows.append([found[key] for key in keys])
    return [to_text(name) for name in keys], rows


def _filled(value: Any, missing: Any) -> Any:
    """Return a value with what stands for null; it is changed in place."""
    if isinstance(value, list):
        for at, one in enumerate(value):
            if one is None or isinstance(one, list):
                value[at] = _filled(one, missing)
        return value
    return missing if value is None else value


# ---- replies


def write_predictions(response: InferResponse, names: Sequence[str], *, named: bool, by_row: bool) -> bytes:
    """Return the reply. `named` outputs are an object; `by_row`, one for each row. Raises ServeError."""
    if not named:
        (name,) = names
        return b'{"predictions": %b}' % _write_tensor(name, response.outputs[name])
    if not by_row:
        texts = (b"%b: %b" % (_quoted(name), _write_tensor(name, response.outputs[name])) for name in names)
        return b'{"predictions": {%b}}' % b", ".join(texts)
    columns = [_write_rows(name, response.outputs[name]) for name in names]
    keys = [_quoted(name) for name in names]
    rows = (
        b"{%b}" % b", ".join(b"%b: %b" % pair for pair in zip(keys, row, strict=True))
        for row in zip(*columns, strict=True)
    )
    return b'{"predictions": [%b]}' % b", ".join(rows)


def _quoted(name: str) -> bytes:
    return write_string(name.encode())


def _write_tensor(name: str, tensor: Tensor) -> bytes:
    dtype, data = tensor.dtype, tensor.data
    if dtype.name == "float32":  # MLflow prints the double that a float32 is
        dtype, data = DTYPES["float64"], memoryview(_widen(memoryview(data).cast("B").cast("f")))
    try:
        return write_values(data, dtype.code, tensor.shape, MODE_SHORTEST)
    except WriterFault:
        raise internal(f"output {name!r} cannot be written as JSON") from None


def _widen(numbers: memoryview[float]) -> array[float]:
    """Return numbers of float32 as float64, made in pieces: of 5 million at once it holds the lock 0.2 s."""
    wide = array("d")
    for at in range(0, len(numbers), PIECE):
        wide.extend(numbers[at : at + PIECE])
    return wide


def _write_rows(name: str, tensor: Tensor) -> Iterator[bytes]:
    """Yield the text of each row."""
    rows, shape = tensor.shape[0], tensor.shape[1:]
    if tensor.dtype.name == "bytes":
        if shape:
            raise internal(f"output {name!r} has several texts a row: ask by `inputs`")
        yield from map(write_string, unpack_bytes(tensor.data, rows))
        return
    data = memoryview(tensor.data).cast("B")
    size = len(data) // rows if rows else 0
    for at in range(rows):
        yield _write_tensor(name, Tensor(tensor.dtype, shape, data[at * size : (at + 1) * size]))


# ---- descriptions


def describe_model(facts: ModelFacts) -> Iterator[ApiOperation]:
    """Yield the operation of a model."""
    inputs = list(facts.view.inputs.values())
    if facts.text is not None or not inputs:
        return
    tensors = {one.name: array_schema(value_schema(one.dtype), one.dims) for one in inputs}
    schema = object_schema({"inputs": object_schema(tensors, list(tensors))}, ["inputs"])
    yield ApiOperation(
        "POST",
        f"/endpoints/{facts.quoted}/invocations",
        "MLflow",
        f"Score by {facts.name}",
        body=json_content(schema),
        answer=json_content(object_schema({"predictions": {}}, ["predictions"])),
        description="Also dataframe_split, dataframe_records, instances, and text/csv.",
    )


SPEC = DialectSpec(
    name="mlflow",
    options=MlflowOptions,
    build=MlflowDialect,
    routes=(INVOKE, NAMED, PING, HEALTH, VERSION),
    listeners=ListenerPolicy.OPT_IN,
    describe_model=describe_model,
)
