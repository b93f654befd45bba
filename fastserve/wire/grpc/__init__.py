"""gRPC behind a face of bytes: path -> read, run, write. What dialects hand in knows no transport.

    listener = GrpcListener("127.0.0.1", 0, methods, GrpcOptions())
    await listener.open(); host, port = listener.address

    method      what a dialect says of an RPC, and what an RPC may know of its call
    listener    one port, of either transport; it has health and reflection beside the dialects' methods
    native      the transport on fastserve.wire.http2: calls -> call, inbox, deadlines, metadata, coding
    grpcio      the transport of the library of that name, with pause
    awaited     exchanges that a coroutine waits for

Nothing but `grpcio` imports that library.
"""

from fastserve.wire.grpc.awaited import Awaited
from fastserve.wire.grpc.listener import GrpcListener
from fastserve.wire.grpc.method import AccessLog, Exchange, Method, Rpc

__all__ = ["AccessLog", "Awaited", "Exchange", "GrpcListener", "Method", "Rpc"]
