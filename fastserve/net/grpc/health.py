"""grpc.health.v1 and gRPC reflection (v1alpha and v1). Knows messages, not transports.

Reflection has a descriptor pool of its own: two dialects may bring files of one name, and so may a client
library in the same process; the default pool would refuse the second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError

from fastserve.errors import Kind, ServeError, malformed_call
from fastserve.net.access_control import Scope
from fastserve.net.grpc.method import Method, Rpc
from fastserve.protos import load

messages = load("grpc")
SERVING: int = messages.HealthCheckResponse.SERVING
NOT_SERVING: int = messages.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = messages.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """Serving states by service name. "" is the whole server; with `nameless` its state is also that of
    services without one of their own."""

    def __init__(self, *, nameless: bool = False) -> None:
        self._states = {"": NOT_SERVING}
        self._nameless = nameless
        self._closed = False
        self._changed: asyncio.Event | None = None  # set, and replaced, at every change

    def set(self, service: str, serving: bool) -> None:
        if not self._closed:
            self._states[service] = SERVING if serving else NOT_SERVING
            self._wake()

    def close(self) -> None:
        """Report every service as not serving, and end all watches."""
        self._closed = True
        self._states = dict.fromkeys(self._states, NOT_SERVING)
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()

    def check(self, service: str) -> int:
        """Return the state of a service. Raises ServeError NOT_FOUND for an unknown one."""
        state = self._find(service)
        if state == SERVICE_UNKNOWN:
            raise ServeError(Kind.NOT_FOUND, "unknown service")
        return state

    def _find(self, service: str) -> int:
        return self._states.get(service, self._states[""] if self._nameless else SERVICE_UNKNOWN)

    async def watch(self, service: str) -> AsyncIterator[int]:
        """Yield the state now and at every change, until close()."""
        last = -1
        while True:
            if self._changed is None:
                self._changed = asyncio.Event()
            changed = self._changed
            state = self._find(service)
            if state != last:
                yield state
                last = state
            if self._closed:
                return
            await changed.wait()

    @staticmethod
    def read(message: bytes) -> str:
        """Return the service name of a serialized HealthCheckRequest."""
        try:
            service: str = messages.HealthCheckRequest.FromString(message).service
        except DecodeError:
            raise ServeError(Kind.INVALID_ARGUMENT, "malformed HealthCheckRequest") from None
        return service

    @staticmethod
    def write(state: int) -> bytes:
        """Return a state as a serialized HealthCheckResponse."""
        message: bytes = messages.HealthCheckResponse(status=state).SerializeToString()
        return message


MOST_ASKED = 4096
"""Requests of one stream: tools ask for each service and each file once."""
_NAMES = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")


def reflection_methods(services: Sequence[str], descriptors: Sequence[bytes]) -> list[Method]:
    """Return the RPCs that list `services` and show the files of the serialized FileDescriptorSets."""
    reflection = Reflection([*services, *_NAMES], make_pool(descriptors))
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
    """Parse a ServerReflectionRequest. Raises ServeError."""
    try:
        return messages.ServerReflectionRequest.FromString(message)
    except DecodeError:
        raise malformed_call("malformed ServerReflectionRequest") from None


def write_response(response: Any) -> bytes:
    data: bytes = response.SerializeToString()
    return data


class Reflection:
    """Answer reflection requests from a descriptor pool."""

    def __init__(self, services: Sequence[str], pool: DescriptorPool) -> None:
        self._services = sorted(set(services))
        self._pool = pool
        self._shown: dict[str, list[bytes]] = {}
        self._answers: dict[str, Callable[[Any, Any], None]] = {
            "file_by_filename": self._file_by_filename,
            "file_containing_symbol": self._file_containing_symbol,
            "file_containing_extension": self._file_containing_extension,
            "all_extension_numbers_of_type": self._all_extension_numbers,
            "list_services": self._list_services,
        }

    async def run(self, requests: AsyncIterator[Any], rpc: Rpc) -> AsyncIterator[Any]:
        """Yield a response to each request. Raises ServeError after MOST_ASKED."""
        asked = 0
        async for request in requests:
            if (asked := asked + 1) > MOST_ASKED:
                raise ServeError(Kind.RESOURCE_EXHAUSTED, f"more than {MOST_ASKED} requests of one stream")
            yield self.answer(request)

    def answer(self, request: Any) -> Any:
        """Return the response to a request; an unknown name is an error in the response, not of the call."""
        response = messages.ServerReflectionResponse(original_request=request)
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
        self._show(self._pool.FindFileByName(request.file_by_filename), response)

    def _file_containing_symbol(self, request: Any, response: Any) -> None:
        self._show(self._pool.FindFileContainingSymbol(request.file_containing_symbol), response)

    def _file_containing_extension(self, request: Any, response: Any) -> None:
        asked = request.file_containing_extension
        extended = self._pool.FindMessageTypeByName(asked.containing_type)
        extension: Any = self._pool.FindExtensionByNumber(extended, asked.extension_number)
        self._show(extension.file, response)

    def _all_extension_numbers(self, request: Any, response: Any) -> None:
        extended = self._pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
        numbers = sorted(extension.number for extension in self._pool.FindAllExtensions(extended))
        response.all_extension_numbers_response.base_type_name = extended.full_name
        response.all_extension_numbers_response.extension_number.extend(numbers)

    def _show(self, file: FileDescriptor, response: Any) -> None:
        """Append a file and its dependencies, which are serialized once."""
        protos = self._shown.get(file.name)
        if protos is None:
            protos = self._shown[file.name] = _needed(file)
        response.file_descriptor_response.file_descriptor_proto.extend(protos)

    def _list_services(self, request: Any, response: Any) -> None:
        listed = response.list_services_response
        for service in self._services:
            listed.service.add(name=service)


def _refuse(response: Any, kind: Kind, text: str) -> None:
    response.error_response.error_code = kind.value
    response.error_response.error_message = text


def _needed(file: FileDescriptor) -> list[bytes]:
    """Return the file and all its dependencies, serialized."""
    files: dict[str, FileDescriptor] = {}
    waiting = [file]
    while waiting:
        one = waiting.pop()
        if one.name not in files:
            files[one.name] = one
            waiting += one.dependencies
    return [_to_proto(one).SerializeToString() for one in files.values()]


def _as_v1alpha(file: FileDescriptorProto) -> FileDescriptorProto:
    """Return reflection's file under the names that older tools ask for."""
    found, old, new = FileDescriptorProto(), "reflection.v1", "reflection.v1alpha"
    found.CopyFrom(file)
    found.name = file.name.replace("reflection_v1", "reflection_v1alpha")
    found.package = file.package.replace(old, new)
    for field in (field for message in found.message_type for field in message.field if field.type_name):
        field.type_name = field.type_name.replace(old, new)
    for method in found.service[0].method:
        method.input_type = method.input_type.replace(old, new)
        method.output_type = method.output_type.replace(old, new)
    return found


def make_pool(descriptors: Sequence[bytes]) -> DescriptorPool:
    """Return a pool of the given files and of the health and reflection services."""
    pool = DescriptorPool()
    sets = [messages.descriptor_set, *descriptors]
    files = [file for blob in sets for file in FileDescriptorSet.FromString(blob).file]
    files += [_as_v1alpha(file) for file in files if file.package == "grpc.reflection.v1"]
    added: set[str] = set()
    for file in files:
        if file.name not in added:
            added.add(file.name)
            pool.Add(file)
    return pool


def _to_proto(descriptor: FileDescriptor) -> FileDescriptorProto:
    proto = FileDescriptorProto()
    descriptor.CopyToProto(proto)
    return proto
