"""This API's names for element types and for what went wrong. The only such tables of this dialect."""

from __future__ import annotations

from fastserve.errors import Kind

# Spec 3.2. There is no bfloat16 in V1, and there are no complex numbers.
TYPE_OF: dict[str, str] = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16",
    "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "bytes": "TYPE_STRING",
}

# Spec 1: RequestStatusCode, by the name of the server's own code.
SUCCESS = "SUCCESS"
STATUS_OF: dict[Kind, str] = {
    Kind.CANCELLED: "UNKNOWN",
    Kind.UNKNOWN: "UNKNOWN",
    Kind.INVALID_ARGUMENT: "INVALID_ARG",
    Kind.DEADLINE_EXCEEDED: "UNAVAILABLE",
    Kind.NOT_FOUND: "NOT_FOUND",
    Kind.ALREADY_EXISTS: "ALREADY_EXISTS",
    Kind.PERMISSION_DENIED: "UNSUPPORTED",
    Kind.RESOURCE_EXHAUSTED: "UNAVAILABLE",
    Kind.FAILED_PRECONDITION: "INVALID_ARG",
    Kind.ABORTED: "UNAVAILABLE",
    Kind.OUT_OF_RANGE: "INVALID_ARG",
    Kind.UNIMPLEMENTED: "UNSUPPORTED",
    Kind.INTERNAL: "INTERNAL",
    Kind.UNAVAILABLE: "UNAVAILABLE",
    Kind.DATA_LOSS: "INTERNAL",
    Kind.UNAUTHENTICATED: "UNSUPPORTED",
}
CODE_OF: dict[str, int] = {
    "SUCCESS": 1,
    "UNKNOWN": 2,
    "INTERNAL": 3,
    "NOT_FOUND": 4,
    "INVALID_ARG": 5,
    "UNAVAILABLE": 6,
    "UNSUPPORTED": 7,
    "ALREADY_EXISTS": 8,
}
