"""Error kind -> grps's code (spec 5), and a status in both forms. The only such table of this dialect."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from fastserve.config import GrpsOptions
from fastserve.errors import Kind, ServeError
from fastserve.protos import load
from fastserve.wire.dialect import CANONICAL_STATUS

CODE = CANONICAL_STATUS | {Kind.RESOURCE_EXHAUSTED: 503, Kind.ABORTED: 503}
OK_JSON = b'{"status":{"code":200,"msg":"OK","status":"SUCCESS"}'


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
