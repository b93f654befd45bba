"""What an inference asks for, as both codecs read it: neutral of HTTP and gRPC, and of the model.

    InferBody("7", inputs=[InputPart("x", "FP32", (1, 2), b"...")], outputs=[OutputPart("y")])

`body` makes one of JSON, `messages` of a ModelInferRequest; `inference` holds it against the model. Both
transports have the same parameters (spec 4). JSON's values are told apart by what is there; protobuf's have a
type of their own, and a wrong one is told by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastserve._ext.proto_wire import Unsigned
from fastserve.codec.client_text import to_bytes, to_text
from fastserve.dialects.kserve_v2.errors import tag
from fastserve.dialects.kserve_v2.values import INT64_MAX, Value, as_bool, as_string, as_uint, is_uint
from fastserve.errors import ServeError, invalid, unsupported
from fastserve.request import Lent
from fastserve.serving.shared_memory import Range

Memory = bytes | bytearray | memoryview


@dataclass(slots=True)
class Parameters:
    """What a request's parameters say. `own` are handed to the model; `empty_final` is of streams."""

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
    """One input as sent. `datatype` is the client's text, which may name no type at all. `lent` is memory on
    a device, whose bytes are not here: `data` is empty then."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Memory
    lent: Lent | None = None
    is_json: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.data) if self.lent is None else self.lent.nbytes


@dataclass(slots=True)
class OutputPart:
    """One requested output. `classes` 0: no classification."""

    name: str
    binary: bool = False
    classes: int = 0
    range: Range | None = None


@dataclass(slots=True)
class InferBody:
    """What one infer request asks for. No `outputs`: all the model has."""

    request_id: str = ""
    inputs: list[InputPart] = field(default_factory=list)
    outputs: list[OutputPart] = field(default_factory=list)
    parameters: Parameters = field(default_factory=Parameters)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says of its reply, without its tensors. `ranges`: of outputs that go into client memory;
    `parameters.binary_output`: how outputs go that it does not name."""

    parts: dict[str, OutputPart]
    ranges: dict[str, Range]
    parameters: Parameters

    @classmethod
    def of(cls, body: InferBody) -> Asked:
        parts = {part.name: part for part in reversed(body.outputs)}  # the first of a name counts
        ranges = {name: part.range for name, part in parts.items() if part.range is not None}
        return cls(parts, ranges, body.parameters)

    @property
    def classifies(self) -> bool:
        return any(part.classes for part in self.parts.values())

    def form(self, name: str) -> str:
        """How an output goes over HTTP: "json", "binary" or "outside"."""
        part = self.parts.get(name)
        if part is None:
            return "binary" if self.parameters.binary_output else "json"
        return "outside" if part.range is not None else "binary" if part.binary else "json"


def refuse_double(name: str, names: set[str], request_id: str) -> None:
    """Raises ServeError for an input that is sent a second time; `names` are those before it."""
    if name in names:
        raise invalid(f"{tag(request_id)}input '{name}' already exists in request")
    names.add(name)


Given = Mapping[str, str | int | float | bool | None]
SEQUENCE_ID_BYTES = 128
UINT64_MASK = 2**64 - 1
EMPTY_FINAL = "triton_enable_empty_final_response"
RESERVED = "parameter keys starting with 'triton_' are reserved for Triton usage"
_ALLOWED = f"Only the following keys starting with 'triton_' are allowed: {EMPTY_FINAL}"
NOT_OWN = "parameter '%s' has invalid type. It should be either 'int', 'bool', or 'string'."


def set_parameter(parameters: Parameters, name: str, value: Value) -> None:
    """Take over one parameter of a JSON request. Raises ServeError."""
    if name in _JSON:
        field, read = _JSON[name]
        setattr(parameters, field, read(value, f"Unable to parse '{name}'"))
    elif name.startswith("triton_"):
        raise invalid(f"{RESERVED} and should not be specified.")
    else:
        parameters.own[name] = read_own(name, value)


def read_own(name: str, value: Value) -> object:
    """A parameter of the model's own: a string, a number or a boolean. Raises ServeError."""
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


# name -> the field of Parameters, and what reads it
_JSON: dict[str, tuple[str, Callable[[Value, str], Any]]] = {
    "sequence_id": ("sequence_id", _sequence_id),
    "sequence_start": ("sequence_start", as_bool),
    "sequence_end": ("sequence_end", as_bool),
    "priority": ("priority", as_uint),
    "timeout": ("timeout_us", as_uint),
    "binary_data_output": ("binary_output", as_bool),
}


# --- protobuf -------------------------------------------------------------------------------------------


def read_rpc_parameters(given: Given) -> Parameters:
    """The parameters of a message. Raises ServeError."""
    found = Parameters()
    for name, value in given.items():
        if name in _RPC:
            field, read = _RPC[name]
            setattr(found, field, read(name, value))
        elif name.startswith("triton_"):
            raise invalid(f"{RESERVED}. {_ALLOWED}")
        elif value is None or isinstance(value, Unsigned):
            raise mistyped(f"'{name}' parameter", "int64_param, bool_param, or string_param")
        else:
            found.own[name] = value
    return found


def read_int(what: str, value: object, wanted: str = "int64_param") -> int:
    """An int64_param. Raises ServeError."""
    if not isinstance(value, int) or isinstance(value, bool | Unsigned):
        raise mistyped(what, wanted)
    return value


def mistyped(what: str, wanted: str) -> ServeError:
    """What is said of a value of the wrong type."""
    return invalid(f"invalid value type for {what}, expected {wanted}.")


def _rpc_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise mistyped(f"'{name}' parameter", "bool_param")
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


class Forwarding:
    """Headers whose names hold a pattern become parameters of the model's.

    --http-header-forward-pattern '^X-'      X-User: ann  ->  parameters {"X-User": "ann"}
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern, re.IGNORECASE)

    def add(self, headers: Iterable[tuple[str, str | bytes]], parameters: Parameters) -> None:
        """Take over those that fit. Raises ServeError for a name that has a meaning."""
        for name, value in headers:
            if self._pattern.search(name) is None:
                continue
            if name in _JSON or name == "headers" or name.startswith("triton_"):
                raise invalid(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
            parameters.own[name] = value.decode("latin-1") if isinstance(value, bytes) else value
