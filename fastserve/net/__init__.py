"""Sockets, TLS, HTTP/1.1, HTTP/2 and gRPC framing, flow control and limits. Knows no model and no dialect by
name.

    async def hello(call): call.reply(200, b'{"hello": "there"}')
    listener = HttpListener("127.0.0.1", 0, [dialect], Limits()); await listener.open()

`fastserve.net.grpc` is imported only when a gRPC listener is configured: messages of protobuf cost some MB.
"""

from fastserve.net.compression import inflate
from fastserve.net.listener import HttpListener
from fastserve.net.request import Call, Endpoint, ReplyStream
from fastserve.net.router import HttpDialect, Route
from fastserve.net.sockets import AddressError, InheritedSockets, shown, take_inherited

__all__ = [
    "AddressError",
    "Call",
    "Endpoint",
    "HttpDialect",
    "HttpListener",
    "InheritedSockets",
    "ReplyStream",
    "Route",
    "inflate",
    "shown",
    "take_inherited",
]
