"""gRPC reflection, v1alpha and v1, from a descriptor pool of its own.

The pool is private because two dialects may bring files of one name, and so may a client library in
the same process; the default pool would refuse the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

_NAMES = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")


def reflection_handlers(
    services: Sequence[str], descriptors: Sequence[bytes]
) -> list[grpc.GenericRpcHandler]:
    """Handlers that list `services` and show the files of the serialized FileDescriptorSets."""
    pool = make_pool(descriptors)
    servicer = reflection.aio.ReflectionServicer([*services, _NAMES[0]], pool=pool)
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )  # v1 differs from v1alpha in nothing but its package's name
    return [grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}) for name in _NAMES]


def make_pool(descriptors: Sequence[bytes]) -> DescriptorPool:
    """A pool of the given files and of the health and reflection services."""
    pool = DescriptorPool()
    own = [_to_proto(health_pb2.DESCRIPTOR), _to_proto(reflection_pb2.DESCRIPTOR)]
    files = [file for blob in descriptors for file in FileDescriptorSet.FromString(blob).file]
    added: set[str] = set()
    for file in own + files:
        if file.name not in added:
            added.add(file.name)
            pool.Add(file)
    return pool


def _to_proto(descriptor: FileDescriptor) -> FileDescriptorProto:
    proto = FileDescriptorProto()
    descriptor.CopyToProto(proto)
    return proto
