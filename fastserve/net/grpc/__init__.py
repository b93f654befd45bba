"""gRPC behind a face of bytes: path -> read, run, write. Dialects declare methods, and know no transport.

    listener = GrpcListener("127.0.0.1", 0, methods, GrpcOptions())
    await listener.open(); host, port = listener.address

    method      one RPC as a dialect declares it, and the facts of a call that it may use
    listener    one port; it has health and reflection beside the dialects' methods
    calls       calls on HTTP/2 streams: inbox, deadlines, heads
    metadata    headers and trailers

Nothing here imports the library grpcio.
"""

from fastserve.net.grpc.listener import GrpcListener
from fastserve.net.grpc.method import AccessLog, AwaitedExchange, GrpcExchange, Method, Rpc

__all__ = ["AccessLog", "AwaitedExchange", "GrpcExchange", "GrpcListener", "Method", "Rpc"]
