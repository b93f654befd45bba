"""When trying again makes sense, in the two ways clients of gRPC look for it.

grpc-retry-pushback-ms: 500         for retry policies of channels (gRFC A6)
grpc-status-details-bin: ...        google.rpc.Status with a RetryInfo, for grpcio-status and its like
"""

from __future__ import annotations

from fastserve.errors import ServeError
from fastserve.protos import load
from fastserve.wire.grpc.method import Metadata

PUSHBACK = "grpc-retry-pushback-ms"
DETAILS = "grpc-status-details-bin"
RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"
# Clients take 8 KiB of trailers, and the text stands in them a second time.
MOST_CHARS = 1000


def advise(error: ServeError, text: str) -> Metadata:
    """Trailers of a call that ends with this error and this grpc-message; none without a time to wait."""
    if error.retry_after_s is None:
        return ()
    told_ms = int(error.retry_after_s * 1000)
    pushback = (PUSHBACK, str(told_ms))
    if len(text) > MOST_CHARS:
        return (pushback,)
    return (pushback, (DETAILS, _details(error.kind.value, text, told_ms)))


def _details(code: int, text: str, told_ms: int) -> bytes:
    rpc = load("google_rpc")
    retry = rpc.RetryInfo()
    retry.retry_delay.FromMilliseconds(told_ms)
    status = rpc.Status(code=code, message=text)
    status.details.add(type_url=RETRY_INFO, value=retry.SerializeToString())
    raw: bytes = status.SerializeToString()
    return raw
