"""Error kind -> grps's code (spec 5), and a status in both forms. The only such table of this dialect."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import msgspec

from fastserve.config import GrpsOptions
from fastserve.errors import Kind, ServeError
from fastserve.protos import load

CODE: dict[Kind, int] = {
    Kind.CANCELLED: 499,
    Kind.UNKNOWN: 500,
    Kind.INVALID_ARGUMENT: 400,
    Kind.DEADLINE_EXCEEDED: 504,
    Kind.NOT_FOUND: 404,
    Kind.ALREADY_EXISTS: 409,
    Kind.PERMISSION_DENIED: 403,
    Kind.RESOURCE_EXHAUSTED: 503,
    Kind.FAILED_PRECONDITION: 400,
    Kind.ABORTED: 503,
    Kind.OUT_OF_RANGE: 400,
    Kind.UNIMPLEMENTED: 501,
    Kind.INTERNAL: 500,
    Kind.UNAVAILABLE: 503,
    Kind.DATA_LOSS: 500,
    Kind.UNAUTHENTICATED: 401,
}
OK_JSON = b'{"status":{"code":200,"msg":"OK","status":"SUCCESS"}'
invalid = partial(ServeError, Kind.INVALID_ARGUMENT)
internal = partial(ServeError, Kind.INTERNAL)


class UnknownModel(ServeError):
    """A model that is not there, for whose code there is a setting."""

    def __init__(self, name: str) -> None:
        super().__init__(Kind.NOT_FOUND, f"Model {name} not found.")


class NotReady(ServeError):
    """What a readiness probe is told."""

    def __init__(self) -> None:
        super().__init__(Kind.UNAVAILABLE, "Service Unavailable")


def code_of(fault: ServeError, options: GrpsOptions) -> int:
    """The code of a failure."""
    return options.unknown_model_code if isinstance(fault, UnknownModel) else CODE[fault.kind]


def failure_json(code: int, message: str) -> bytes:
    """A failure as a JSON message. Bytes that were not UTF-8 are replaced."""
    text = msgspec.json.encode(message.encode("utf-8", "replace").decode("utf-8", "replace"))
    return b'{"status":{"code":%d,"msg":%b,"status":"FAILURE"}}' % (code, text)


def failure_message(code: int, message: str) -> bytes:
    """The same as a serialized message."""
    status = load("grps").Status(code=code, msg=message.encode("utf-8", "replace").decode(), status="FAILURE")
    return bytes(load("grps").GrpsMessage(status=status).SerializeToString())


@lru_cache(maxsize=1)
def ok_message() -> bytes:
    """A serialized message that is nothing but good: a status put before the rest of one."""
    data: Any = load("grps").GrpsMessage(status={"code": 200, "msg": "OK", "status": "SUCCESS"})
    return bytes(data.SerializeToString())
