"""Sockets, HTTP/1.1 and gRPC framing, flow control and limits. Knows no model and no dialect by name.

    async def hello(call): call.reply(200, b'{"hello": "there"}')
    listener = HttpListener("127.0.0.1", 0, [dialect], Limits()); await listener.open()

`fastserve.wire.grpc` is imported only when a gRPC listener is configured: messages of protobuf cost some MB.
"""

from fastserve.wire.call import Call, Endpoint
from fastserve.wire.dialect import HttpDialect, Route
from fastserve.wire.inflate import inflate
from fastserve.wire.listener import HttpListener, check_free, shown
from fastserve.wire.stream import Stream

__all__ = [
    "Call",
    "Endpoint",
    "HttpDialect",
    "HttpListener",
    "Route",
    "Stream",
    "check_free",
    "inflate",
    "shown",
]
