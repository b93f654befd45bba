"""The `parameters` of a request: those with a meaning of their own, and the model's (spec 4)."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastserve.dialects.kserve_v2.errors import invalid, to_bytes, to_text, unsupported
from fastserve.dialects.kserve_v2.values import (
    INT64_MAX,
    Value,
    as_bool,
    as_string,
    as_uint,
    find,
    is_uint,
    members_of,
)

MEANT = (
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "headers",
    "binary_data_output",
)
"""Names that mean something to the server; any other is the model's."""
SEQUENCE_ID_BYTES = 128
RESERVED = "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."


@dataclass(slots=True)
class Parameters:
    """What a request's parameters say. `own` are handed to the model."""

    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    timeout_us: int = 0
    binary_output: bool = False
    own: dict[str, object] = field(default_factory=dict)


def read_parameters(document: Value) -> Parameters:
    """The parameters of a request. Raises ServeError."""
    parameters = Parameters()
    found, members = find(document, "parameters")
    if not found:
        return parameters
    seen: set[bytes] = set()
    for key, value in members_of(members, "failed to get request params."):
        if key not in seen:  # the first of equal keys counts
            seen.add(key)
            set_parameter(parameters, to_text(key), value)
    return parameters


def set_parameter(parameters: Parameters, name: str, value: Value) -> None:
    """Take over one parameter. Raises ServeError."""
    where = f"Unable to parse '{name}'"
    if name == "sequence_id":
        parameters.sequence_id = _read_sequence_id(value, where)
    elif name in ("sequence_start", "sequence_end"):
        setattr(parameters, name, as_bool(value, where))
    elif name == "priority":
        parameters.priority = as_uint(value, where)
    elif name == "timeout":
        parameters.timeout_us = as_uint(value, where)
    elif name == "binary_data_output":
        parameters.binary_output = as_bool(value, where)
    elif name.startswith("triton_"):
        raise invalid(RESERVED)
    elif name != "headers":
        parameters.own[name] = read_own(name, value)


def read_own(name: str, value: Value) -> object:
    """A parameter of the model's own: a string, a number or a boolean. Raises ServeError."""
    if isinstance(value, bytes):
        return to_text(value)
    if isinstance(value, int) and abs(value) > INT64_MAX:
        return float(value)
    if isinstance(value, bool | int | float):
        return value
    raise invalid(f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _read_sequence_id(value: Value, where: str) -> int | str:
    if is_uint(value):
        assert isinstance(value, int)
        return value
    return check_sequence_id(as_string(value, where))


def check_sequence_id(id: str) -> str:
    """Raises ServeError UNIMPLEMENTED for an id that is too long."""
    if len(to_bytes(id)) > SEQUENCE_ID_BYTES:
        raise unsupported(f"string correlation ID cannot be longer than {SEQUENCE_ID_BYTES} characters")
    return id
