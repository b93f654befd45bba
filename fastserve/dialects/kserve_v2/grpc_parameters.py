"""InferParameters of requests, inputs and outputs, with the original's words (spec 4, 5, 6).

The gRPC twin of `parameters`: here a value has a type of its own, and a wrong one is told by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastserve._ext.proto_wire import Unsigned
from fastserve.dialects.kserve_v2.body import OutputPart
from fastserve.dialects.kserve_v2.errors import invalid
from fastserve.dialects.kserve_v2.parameters import Parameters, check_sequence_id
from fastserve.errors import ServeError
from fastserve.serving.shared_memory import Range

Given = Mapping[str, str | int | float | bool | None]

EMPTY_FINAL = "triton_enable_empty_final_response"
UINT64_MASK = 2**64 - 1
_RESERVED = (
    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting "
    f"with 'triton_' are allowed: {EMPTY_FINAL}"
)


@dataclass(slots=True)
class GrpcParameters(Parameters):
    """With what only a stream has."""

    empty_final: bool = False


def read_parameters(given: Given) -> GrpcParameters:
    """The parameters of a request. Raises ServeError."""
    found = GrpcParameters()
    for name, value in given.items():
        _set(found, name, value)
    return found


def _set(found: GrpcParameters, name: str, value: object) -> None:
    if name == "sequence_id":
        found.sequence_id = _read_sequence_id(value)
    elif name in ("sequence_start", "sequence_end"):
        setattr(found, name, _as_bool(name, value))
    elif name == "priority":
        plain = int(value) if isinstance(value, Unsigned) else value
        found.priority = _as_int(name, plain, "int64_param or uint64_param")
        if found.priority < 0:
            raise invalid("invalid value for 'priority', expected value >= 0.")
    elif name == "timeout":
        found.timeout_us = max(0, _as_int(name, value, "int64_param"))
    elif name == EMPTY_FINAL:
        found.empty_final = _as_bool(name, value)
    elif name.startswith("triton_"):
        raise invalid(_RESERVED)
    elif value is None or isinstance(value, Unsigned):
        raise _mistyped(name, "int64_param, bool_param, or string_param")
    else:
        found.own[name] = value


def _read_sequence_id(value: object) -> int | str:
    if isinstance(value, str):
        return check_sequence_id(value)
    return _as_int("sequence_id", value, "int64_param or string_param") & UINT64_MASK


def _as_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _mistyped(name, "bool_param")
    return value


def _as_int(name: str, value: object, wanted: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool | Unsigned):
        raise _mistyped(name, wanted)
    return value


def _mistyped(name: str, wanted: str) -> ServeError:
    return invalid(f"invalid value type for '{name}' parameter, expected {wanted}.")


def read_range(tensor: str, given: Given) -> Range | None:
    """The shared memory a tensor's parameters name, None without any. Raises ServeError."""
    if not given:
        return None
    region = given.get("shared_memory_region")
    if "shared_memory_region" not in given:
        for name in ("shared_memory_offset", "shared_memory_byte_size"):
            if name in given:
                raise invalid(
                    f"'{name}' can not be specified without 'shared_memory_region' parameter "
                    f"for tensor '{tensor}'"
                )
        return None
    if not isinstance(region, str):
        raise _memory_fault("shared_memory_region", tensor, "string_param")
    if "shared_memory_byte_size" not in given:
        raise invalid(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter "
            f"for tensor '{tensor}'"
        )
    return Range(
        region,
        _read_size("shared_memory_offset", tensor, given.get("shared_memory_offset", 0)),
        _read_size("shared_memory_byte_size", tensor, given["shared_memory_byte_size"]),
    )


def _read_size(name: str, tensor: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool | Unsigned):
        raise _memory_fault(name, tensor, "int64_param")
    return value & UINT64_MASK  # a negative one is far outside of every region


def _memory_fault(name: str, tensor: str, wanted: str) -> ServeError:
    return invalid(f"invalid value type for '{name}' parameter for tensor '{tensor}', expected {wanted}.")


def read_output(name: str, given: Given) -> OutputPart:
    """A requested output. Raises ServeError."""
    part = OutputPart(name, range=read_range(name, given))
    if "classification" in given:
        classes = given["classification"]
        if not isinstance(classes, int) or isinstance(classes, bool | Unsigned):
            raise invalid("invalid value type for 'classification' parameter, expected int64_param")
        if classes <= 0:
            raise invalid("invalid value for 'classification' parameter, expected >= 0")
        if part.range is not None:
            raise invalid("output can't set both 'shared_memory_region' and 'classification'")
        part.classes = classes
    return part
