"""An infer request as sent, neutral of the transport and of the model, and its JSON reader (spec 3, 3.1, 4).

    {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
    -> InferBody(inputs=[InputPart("x", "FP32", (1, 2), b"...")], ...)

`grpc_infer` reads the same out of a ModelInferRequest; `validation` holds it against the model. Both
transports have the same parameters. A JSON parameter of a wrong type is found by its value, a protobuf one by
its declared type. The compiled reader checks all that JSON can say; here are the parameters' meanings and
tensors in client memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastserve._ext.infer_json import InferBody as CompiledBody
from fastserve._ext.infer_json import InferFault, InferInput, read_infer
from fastserve._ext.json_value import Members
from fastserve._ext.proto_wire import Unsigned
from fastserve.codec.json_text import to_bytes, to_text
from fastserve.dialects.kserve.json_values import (
    INT64_MAX,
    Value,
    as_bool,
    as_string,
    as_uint,
    find,
    is_uint,
    member,
    optional,
)
from fastserve.errors import ServeError, internal, invalid, unsupported
from fastserve.request import Lent
from fastserve.serving.client_shared_memory import Range
from fastserve.serving.prepared_requests import Memory
from fastserve.serving.slow_path import BodyTensors


@dataclass(slots=True)
class InferParameters:
    """The parameters of a request. `own` go to the model; `empty_final` is for streams."""

    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    timeout_us: int = 0
    binary_output: bool = False
    empty_final: bool = False
    own: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class InputPart:
    """One input as sent.

    `datatype` is the client's text, which may name no type. With `range` it lies in client memory and `data`
    is empty; on a device `lent` brings the bytes.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Memory
    range: Range | None = None
    lent: Lent | None = None
    is_json: bool = False
    rounded: bool = False
    """Its numbers were sent as FP32 and are FP64 now."""

    @property
    def nbytes(self) -> int:
        return len(self.data) if self.range is None else self.range.byte_size


@dataclass(slots=True)
class OutputPart:
    """One requested output. `classes` 0 means no classification."""

    name: str
    binary: bool = False
    classes: int = 0
    range: Range | None = None


@dataclass(slots=True)
class InferBody:
    """One infer request as sent. Without `outputs` it asks for all the model has."""

    request_id: str = ""
    inputs: list[InputPart] = field(default_factory=list)
    outputs: list[OutputPart] = field(default_factory=list)
    parameters: InferParameters = field(default_factory=InferParameters)


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """The form of a reply: the requested outputs, and `ranges` of those that go into client memory.

    `parameters.binary_output` is the form of outputs that the request does not name.
    """

    parts: dict[str, OutputPart]
    ranges: dict[str, Range]
    parameters: InferParameters

    @classmethod
    def of(cls, body: InferBody) -> ReplyOptions:
        parts = {part.name: part for part in reversed(body.outputs)}  # the first of a name wins
        ranges = {name: part.range for name, part in parts.items() if part.range is not None}
        return cls(parts, ranges, body.parameters)

    @property
    def classifies(self) -> bool:
        return any(part.classes for part in self.parts.values())

    def form(self, name: str) -> str:
        """Return the form of an output over HTTP: "json", "binary" or "outside"."""
        part = self.parts.get(name)
        if part is None:
            return "binary" if self.parameters.binary_output else "json"
        return "outside" if part.range is not None else "binary" if part.binary else "json"


def id_prefix(request_id: str) -> str:
    """Return the beginning of many error texts: the request's id."""
    return f"[request id: {request_id or '<id_unknown>'}] "


def check_unique(name: str, names: set[str], request_id: str) -> None:
    """Raise ServeError for an input that is sent twice; `names` are those before it."""
    if name in names:
        raise invalid(f"{id_prefix(request_id)}input '{name}' already exists in request")
    names.add(name)


RpcParameters = Mapping[str, str | int | float | bool | None]
SEQUENCE_ID_BYTES = 128
UINT64_MASK = 2**64 - 1
EMPTY_FINAL = "triton_enable_empty_final_response"
RESERVED = "parameter keys starting with 'triton_' are reserved for Triton usage"
_ALLOWED = f"Only the following keys starting with 'triton_' are allowed: {EMPTY_FINAL}"
NOT_OWN = "parameter '%s' has invalid type. It should be either 'int', 'bool', or 'string'."


def set_parameter(parameters: InferParameters, name: str, value: Value) -> None:
    """Set one parameter of a JSON request. Raises ServeError."""
    if name in _JSON:
        field, read = _JSON[name]
        setattr(parameters, field, read(value, f"Unable to parse '{name}'"))
    elif name.startswith("triton_"):
        raise invalid(f"{RESERVED} and should not be specified.")
    else:
        parameters.own[name] = read_model_parameter(name, value)


def read_model_parameter(name: str, value: Value) -> object:
    """Return a parameter for the model: a string, a number or a boolean. Raises ServeError."""
    if isinstance(value, bytes):
        return to_text(value)
    if isinstance(value, int) and abs(value) > INT64_MAX:
        return float(value)
    if isinstance(value, bool | int | float):
        return value
    raise invalid(NOT_OWN % name)


def _sequence_id(value: Value, where: str) -> int | str:
    return as_uint(value) if is_uint(value) else _short_enough(as_string(value, where))


def _short_enough(id: str) -> str:
    if len(to_bytes(id)) > SEQUENCE_ID_BYTES:
        raise unsupported(f"string correlation ID cannot be longer than {SEQUENCE_ID_BYTES} characters")
    return id


# name -> the field of InferParameters, and its reader
_JSON: dict[str, tuple[str, Callable[[Value, str], Any]]] = {
    "sequence_id": ("sequence_id", _sequence_id),
    "sequence_start": ("sequence_start", as_bool),
    "sequence_end": ("sequence_end", as_bool),
    "priority": ("priority", as_uint),
    "timeout": ("timeout_us", as_uint),
    "binary_data_output": ("binary_output", as_bool),
}


# --- protobuf -------------------------------------------------------------------------------------------


def read_rpc_parameters(given: RpcParameters) -> InferParameters:
    """Read the parameters of a message. Raises ServeError."""
    found = InferParameters()
    for name, value in given.items():
        if name in _RPC:
            field, read = _RPC[name]
            setattr(found, field, read(name, value))
        elif name.startswith("triton_"):
            raise invalid(f"{RESERVED}. {_ALLOWED}")
        elif value is None or isinstance(value, Unsigned):
            raise wrong_type(f"'{name}' parameter", "int64_param, bool_param, or string_param")
        else:
            found.own[name] = value
    return found


def read_int(what: str, value: object, wanted: str = "int64_param") -> int:
    """Return the value of an int64_param. Raises ServeError."""
    if not isinstance(value, int) or isinstance(value, bool | Unsigned):
        raise wrong_type(what, wanted)
    return value


def wrong_type(what: str, wanted: str) -> ServeError:
    """Return the error for a value of the wrong type."""
    return invalid(f"invalid value type for {what}, expected {wanted}.")


def _rpc_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(f"'{name}' parameter", "bool_param")
    return value


def _rpc_sequence_id(name: str, value: object) -> int | str:
    if isinstance(value, str):
        return _short_enough(value)
    return read_int(f"'{name}' parameter", value, "int64_param or string_param") & UINT64_MASK


def _rpc_priority(name: str, value: object) -> int:
    plain = int(value) if isinstance(value, Unsigned) else value
    priority = read_int(f"'{name}' parameter", plain, "int64_param or uint64_param")
    if priority < 0:
        raise invalid("invalid value for 'priority', expected value >= 0.")
    return priority


def _rpc_timeout(name: str, value: object) -> int:
    return max(0, read_int(f"'{name}' parameter", value))


_RPC: dict[str, tuple[str, Callable[[str, object], Any]]] = {
    "sequence_id": ("sequence_id", _rpc_sequence_id),
    "sequence_start": ("sequence_start", _rpc_flag),
    "sequence_end": ("sequence_end", _rpc_flag),
    "priority": ("priority", _rpc_priority),
    "timeout": ("timeout_us", _rpc_timeout),
    EMPTY_FINAL: ("empty_final", _rpc_flag),
}


# --- headers --------------------------------------------------------------------------------------------


class HeaderForwarding:
    """Forwards headers whose names match a pattern to the model, as parameters.

    --http-header-forward-pattern '^X-'      X-User: ann  ->  parameters {"X-User": "ann"}
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern, re.IGNORECASE)

    def add(self, headers: Iterable[tuple[str, str | bytes]], parameters: InferParameters) -> None:
        """Add the headers that match. Raises ServeError for a name that has a meaning of its own."""
        for name, value in headers:
            if self._pattern.search(name) is None:
                continue
            if name in _JSON or name == "headers" or name.startswith("triton_"):
                raise invalid(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
            parameters.own[name] = value.decode("latin-1") if isinstance(value, bytes) else value


Header = CompiledBody | InferFault
Locate = Callable[[Range], Lent | None]
Scalar = str | int | float | bool | None
MORE = "additional bytes"  # missing behind the JSON


def read_header(header: Memory) -> Header:
    """Read the JSON of a request, or return why it is none.

    For a thread: all the work that grows with its size.
    """
    try:
        return read_infer(header)
    except InferFault as fault:
        return fault.with_traceback(None)  # a traceback would hold the request


def read_body(read: Header, blobs: Memory, model: str, locate: Locate) -> InferBody:
    """Read a whole request: `read` of its JSON and the `blobs` that follow.

    Raises ServeError in Triton's order.
    """
    if not isinstance(read, InferFault):
        return _convert_body(read, BodyTensors(blobs, model, MORE), locate)
    if read.before is not None:
        _convert_body(read.before, BodyTensors(blobs, model, MORE), locate)
    raise invalid(read.text) if read.is_callers else internal(read.text)


def _convert_body(read: CompiledBody, rest: BodyTensors, locate: Locate) -> InferBody:
    """Return the compiled reader's result with the tensors that lie elsewhere. Raises ServeError."""
    body = InferBody(read.id)
    for name, value in read.parameters.items():
        set_parameter(body.parameters, name, _value(value))
    names: set[str] = set()
    for part in read.inputs:
        check_unique(part.name, names, read.id)
        if part.data is not None:
            found = InputPart(part.name, part.datatype, part.shape, part.data, is_json=True)
        else:
            found = InputPart(part.name, part.datatype, part.shape, *_find_data(part, rest, locate))
        body.inputs.append(found)
    if read.outputs is not None:
        rest.finish()
        body.outputs = [_make_output(part.name, _members(part.parameters)) for part in read.outputs]
    return body


def _find_data(
    part: InferInput, rest: BodyTensors, locate: Locate
) -> tuple[Memory, Range | None, Lent | None]:
    parameters = _members(part.parameters)
    if "binary_data_size" in part.parameters:
        return rest.take(part.name, member(parameters, "binary_data_size", as_uint)), None, None
    range = _read_range(parameters)
    assert range is not None  # the reader found one of the three places
    return b"", range, locate(range)


def _members(parameters: Mapping[str, Scalar]) -> Members:
    return Members([(to_bytes(name), _value(value)) for name, value in parameters.items()])


def _value(value: Scalar) -> Value:
    """Return a scalar as `json_values` has it: strings are bytes."""
    return to_bytes(value) if isinstance(value, str) else value


def _read_range(parameters: Value) -> Range | None:
    """Return the shared memory that a tensor's parameters name, None without any. Raises ServeError."""
    if not find(parameters, "shared_memory_region")[0]:
        return None
    name = member(parameters, "shared_memory_region", as_string)
    offset = optional(parameters, "shared_memory_offset", as_uint, 0)
    return Range(name, offset, optional(parameters, "shared_memory_byte_size", as_uint, 0))


def _check_output(parameters: Value) -> None:
    """Raise ServeError for options of an output that exclude each other."""
    if not find(parameters, "shared_memory_region")[0]:
        return
    classes = find(parameters, "classification")[0]
    if classes or optional(parameters, "binary_data", as_bool, False, "Unable to set 'binary_data'"):
        taken = "classification" if classes else "binary_data"
        raise invalid(f"Output can't set both 'shared_memory_region' and '{taken}'")


def _make_output(name: str, parameters: Value) -> OutputPart:
    _check_output(parameters)
    classes = optional(parameters, "classification", as_uint, 0, "Unable to set 'classification'")
    range = _read_range(parameters)
    binary = range is None and optional(parameters, "binary_data", as_bool, False)
    return OutputPart(name, binary, classes, range)
