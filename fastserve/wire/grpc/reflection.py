"""gRPC reflection, v1alpha and v1, from a descriptor pool of its own. Knows messages, not transports.

The pool is private because two dialects may bring files of one name, and so may a client library in
the same process; the default pool would refuse the second.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from fastserve.errors import Kind, ServeError
from fastserve.wire.grpc.method import Method, Rpc
from fastserve.wire.scope import Scope

_NAMES = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")


def reflection_methods(services: Sequence[str], descriptors: Sequence[bytes]) -> list[Method]:
    """Methods that list `services` and show the files of the serialized FileDescriptorSets."""
    reflection = Reflection([*services, _NAMES[0]], make_pool(descriptors))
    # v1 differs from v1alpha in nothing but its package's name.
    return [
        Method(
            f"/{name}/ServerReflectionInfo",
            read_request,
            reflection.run,
            write_response,
            takes_stream=True,
            gives_stream=True,
            scope=Scope.METADATA,
        )
        for name in _NAMES
    ]


def read_request(message: bytes) -> Any:
    """A ServerReflectionRequest. Raises ServeError."""
    try:
        return reflection_pb2.ServerReflectionRequest.FromString(message)
    except DecodeError:
        raise ServeError(Kind.INTERNAL, "malformed ServerReflectionRequest") from None


def write_response(response: Any) -> bytes:
    data: bytes = response.SerializeToString()
    return data


class Reflection:
    """What `pool` holds, by the questions of the protocol."""

    def __init__(self, services: Sequence[str], pool: DescriptorPool) -> None:
        self._services = sorted(set(services))
        self._pool = pool
        self._answers: dict[str, Callable[[Any, Any], None]] = {
            "file_by_filename": self._file_by_filename,
            "file_containing_symbol": self._file_containing_symbol,
            "file_containing_extension": self._file_containing_extension,
            "all_extension_numbers_of_type": self._all_extension_numbers,
            "list_services": self._list_services,
        }

    async def run(self, requests: AsyncIterator[Any], rpc: Rpc) -> AsyncIterator[Any]:
        """A response to each request."""
        async for request in requests:
            yield self.answer(request)

    def answer(self, request: Any) -> Any:
        """What is not there is an error in the response, not one of the call."""
        response = reflection_pb2.ServerReflectionResponse(original_request=request)
        asked = self._answers.get(request.WhichOneof("message_request") or "")
        if asked is None:
            _refuse(response, Kind.INVALID_ARGUMENT, "invalid argument")
            return response
        try:
            asked(request, response)
        except KeyError:
            _refuse(response, Kind.NOT_FOUND, "not found")
        return response

    def _file_by_filename(self, request: Any, response: Any) -> None:
        _show(self._pool.FindFileByName(request.file_by_filename), response)

    def _file_containing_symbol(self, request: Any, response: Any) -> None:
        _show(self._pool.FindFileContainingSymbol(request.file_containing_symbol), response)

    def _file_containing_extension(self, request: Any, response: Any) -> None:
        asked = request.file_containing_extension
        extended = self._pool.FindMessageTypeByName(asked.containing_type)
        extension: Any = self._pool.FindExtensionByNumber(extended, asked.extension_number)
        _show(extension.file, response)

    def _all_extension_numbers(self, request: Any, response: Any) -> None:
        extended = self._pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
        numbers = sorted(extension.number for extension in self._pool.FindAllExtensions(extended))
        response.all_extension_numbers_response.base_type_name = extended.full_name
        response.all_extension_numbers_response.extension_number.extend(numbers)

    def _list_services(self, request: Any, response: Any) -> None:
        listed = response.list_services_response
        for service in self._services:
            listed.service.add(name=service)


def _refuse(response: Any, kind: Kind, text: str) -> None:
    response.error_response.error_code = kind.value
    response.error_response.error_message = text


def _show(file: FileDescriptor, response: Any) -> None:
    """The file, and all that it needs."""
    files: dict[str, FileDescriptor] = {}
    waiting = [file]
    while waiting:
        one = waiting.pop()
        if one.name not in files:
            files[one.name] = one
            waiting += one.dependencies
    protos = [_to_proto(one).SerializeToString() for one in files.values()]
    response.file_descriptor_response.file_descriptor_proto.extend(protos)


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
