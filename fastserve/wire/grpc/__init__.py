"""gRPC behind a face of bytes: path -> read, run, write. What dialects hand in knows no transport.

listener = GrpcListener("127.0.0.1", 0, methods, GrpcOptions())
await listener.open(); host, port = listener.address

method      what a dialect says of an RPC, and what an RPC may know of its call
listener    one port, of either transport
grpcio      the transport of the library of that name
health, reflection      the services that every listener has
"""

from fastserve.wire.grpc.listener import GrpcListener
from fastserve.wire.grpc.method import AccessLog, Method, Rpc

__all__ = ["AccessLog", "GrpcListener", "Method", "Rpc"]
