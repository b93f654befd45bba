"""The access log: one line for each reply, over HTTP and gRPC, whose facts are fields.

    fastserve.access: POST /v2/models/m/infer protocol=http status=200 bytes=31 duration_ms=0.4 request_id=4f

It costs a formatted line a reply, and replies are not sent raw while it is on.
"""

from __future__ import annotations

import logging
from time import monotonic_ns

from fastserve.wire import Call

access = logging.getLogger("fastserve.access")


def log_http(call: Call, status: int, nbytes: int) -> None:
    """`nbytes` are those of the body; status 499 says that the client left before its reply."""
    # A request that was refused before it was understood has neither.
    text = f"{call.method or '-'} {call.target or '-'}"
    _log(text, "http", status, nbytes, call.received_ns, call.request_id, call.client)


def log_rpc(path: str, status: str, nbytes: int, received_ns: int, request_id: str, client: str) -> None:
    """`nbytes` are those of all messages of the answer, `status` is gRPC's name for it."""
    _log(path, "grpc", status, nbytes, received_ns, request_id, client)


def _log(
    text: str,
    protocol: str,
    status: int | str,
    nbytes: int,
    received_ns: int,
    request_id: str,
    client: str,
) -> None:
    """`client` is the subject of its certificate, "" for one without."""
    fields = {
        **{"protocol": protocol, "status": status, "bytes": nbytes},
        **{"duration_ms": round((monotonic_ns() - received_ns) / 1e6, 3), "request_id": request_id},
        **({"client": client} if client else {}),
    }
    access.info("%s", text, extra=fields)
