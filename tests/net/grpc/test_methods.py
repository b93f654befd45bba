"""The gRPC listener with real clients of grpcio."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
import uvloop
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.rpc.error_details_pb2 import RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from fastserve.errors import Kind, ServeError
from fastserve.net.access_control import Scope
from fastserve.net.grpc import GrpcListener, Method, Rpc
from fastserve.settings import GrpcOptions
from tests.net.kit import WAIT_S, until

pytestmark = pytest.mark.lingers  # grpcio keeps its poller's thread and pipe


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work, 200)

    uvloop.run(bounded())


async def echo(request: bytes, rpc: Rpc) -> bytes:
    return request


async def fail(request: bytes, rpc: Rpc) -> bytes:
    if request == b"secret":
        raise RuntimeError("secret /etc/path")
    raise ServeError(Kind[request.decode()], "as asked", retry_after_s=0.5)


async def look(request: bytes, rpc: Rpc) -> bytes:
    rpc.set_trailing([("seen", dict(rpc.metadata)["tag"])])
    left = rpc.seconds_left()
    return b"none" if left is None else b"%d" % left


async def count(request: bytes, rpc: Rpc) -> AsyncIterator[bytes]:
    for i in range(int(request)):
        yield b"%d" % i


async def twice(request: bytes, rpc: Rpc) -> bytes:
    return request * 2


async def add(requests: AsyncIterator[bytes], rpc: Rpc) -> bytes:
    return b"+".join([request async for request in requests])


async def double(requests: AsyncIterator[bytes], rpc: Rpc) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request * 2


def refuse(request: bytes) -> bytes:
    raise ServeError(Kind.INVALID_ARGUMENT, "unreadable")


GOAWAY = b"\7"  # a type of frames
METHODS = [
    Method("/t.T/Echo", bytes, echo, bytes, scope=Scope.INFER),
    Method("/t.T/Fail", bytes, fail, bytes, scope=Scope.INFER),
    Method("/t.T/Twice", bytes, twice, bytes, scope=Scope.INFER),
    Method("/t.T/Look", bytes, look, bytes, scope=Scope.INFER),
    Method("/t.T/Refuse", refuse, echo, bytes, scope=Scope.INFER),
    Method("/t.T/Count", bytes, count, bytes, gives_stream=True, scope=Scope.INFER),
    Method("/t.T/Add", bytes, add, bytes, takes_stream=True, scope=Scope.INFER),
    Method("/t.T/Double", bytes, double, bytes, takes_stream=True, gives_stream=True, scope=Scope.INFER),
]


@contextlib.asynccontextmanager
async def serving(*more: Method, **options: Any) -> AsyncIterator[tuple[GrpcListener, grpc.aio.Channel]]:
    descriptors, access_log = options.pop("descriptors", ()), options.pop("access_log", None)
    usual = msgspec.structs.replace(GrpcOptions(), **options)
    listener = GrpcListener(
        "127.0.0.1", 0, [*METHODS, *more], usual, descriptors=descriptors, access_log=access_log
    )
    await listener.open()
    async with grpc.aio.insecure_channel("{}:{}".format(*listener.address)) as channel:
        yield listener, channel
    await listener.close()


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def test_the_four_kinds_of_calls() -> None:
    async def main() -> None:
        async with serving() as (_, channel):
            assert await channel.unary_unary("/t.T/Echo")(b"hi") == b"hi"
            assert [piece async for piece in channel.unary_stream("/t.T/Count")(b"3")] == [b"0", b"1", b"2"]
            assert await channel.stream_unary("/t.T/Add")(iter([b"a", b"b"])) == b"a+b"
            doubled = channel.stream_stream("/t.T/Double")(iter([b"a", b"b"]))
            assert [piece async for piece in doubled] == [b"aa", b"bb"]

    run(main())


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_has_its_status(kind: Kind) -> None:
    async def main() -> None:
        async with serving() as (_, channel):
            error = await refused(channel.unary_unary("/t.T/Fail")(kind.name.encode()))
            assert (error.code().name, error.details()) == (kind.name, "as asked")
            assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "500"
            status = rpc_status.from_call(error)  # raises where it has another code or text than the call
            advice = RetryInfo()
            assert [detail.Unpack(advice) for detail in status.details] == [True]
            assert advice.retry_delay.ToMilliseconds() == 500

    run(main())


def test_a_long_text_is_not_told_twice() -> None:
    async def wordy(request: bytes, rpc: Rpc) -> bytes:
        raise ServeError(Kind.UNAVAILABLE, "long " * 300, retry_after_s=2)

    async def main() -> None:
        async with serving(Method("/t.T/Wordy", bytes, wordy, bytes, scope=Scope.INFER)) as (_, channel):
            error = await refused(channel.unary_unary("/t.T/Wordy")(b""))
            assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "2000"
            assert rpc_status.from_call(error) is None
            assert error.details().startswith("long long")

    run(main())


def test_other_exceptions_tell_the_client_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving() as (_, channel):
            error = await refused(channel.unary_unary("/t.T/Fail")(b"secret"))
            assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "Internal error")
            error = await refused(channel.unary_unary("/t.T/Refuse")(b""))
            assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "unreadable")
            error = await refused(channel.unary_unary("/t.T/None")(b""))
            assert error.code() == grpc.StatusCode.UNIMPLEMENTED

    run(main())
    assert "secret" in caplog.text


def test_an_access_log_sees_every_call() -> None:
    lines: list[tuple[str, str, int, bool]] = []
    ids: list[str] = []
    started = asyncio.Event()

    def note(
        path: str, status: str, nbytes: int, received_ns: int, request_id: str, client: str, address: str
    ) -> None:
        lines.append((path, status, nbytes, 0 < received_ns < time.monotonic_ns()))
        ids.append(request_id)
        assert client == ""
        assert address.startswith("127.0.0.1:")

    async def wait(request: bytes, rpc: Rpc) -> bytes:
        started.set()
        await asyncio.sleep(60)
        return b""

    async def main() -> None:
        async with serving(Method("/t.T/Wait", bytes, wait, bytes, scope=Scope.INFER), access_log=note) as (
            _,
            channel,
        ):
            sent = (("x-request-id", "r-1"),)
            assert await channel.unary_unary("/t.T/Echo")(b"hi", metadata=sent) == b"hi"
            await refused(channel.unary_unary("/t.T/Fail")(b"NOT_FOUND"))
            await refused(channel.unary_unary("/t.T/Fail")(b"secret"))
            assert [piece async for piece in channel.unary_stream("/t.T/Count")(b"3")] == [b"0", b"1", b"2"]
            held = channel.unary_unary("/t.T/Wait")(b"")
            await started.wait()
            held.cancel()
            await until(lambda: len(lines) == 5)

    run(main())
    assert lines == [
        ("/t.T/Echo", "OK", 2, True),
        ("/t.T/Fail", "NOT_FOUND", 0, True),
        ("/t.T/Fail", "INTERNAL", 0, True),
        ("/t.T/Count", "OK", 3, True),
        ("/t.T/Wait", "CANCELLED", 0, True),
    ]
    assert ids[0] == "r-1"
    assert len(set(ids)) == 5


def test_what_fails_is_logged_under_its_id(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving() as (_, channel):
            for word, sent in ((b"INTERNAL", "r-1"), (b"secret", "r-2"), (b"NOT_FOUND", "r-3")):
                await refused(channel.unary_unary("/t.T/Fail")(word, metadata=(("x-request-id", sent),)))

    run(main())
    ours = [one for one in caplog.records if one.name.startswith("fastserve")]  # asyncio tells of slow turns
    logged = [(one.levelname, vars(one)["request_id"], bool(one.exc_info)) for one in ours]
    assert logged == [("WARNING", "r-1", False), ("ERROR", "r-2", True)]
    assert "was answered INTERNAL: as asked" in caplog.text


def test_metadata_and_deadlines() -> None:
    async def main() -> None:
        async with serving() as (_, channel):
            call = channel.unary_unary("/t.T/Look")(b"", metadata=(("tag", "x"),))
            assert await call == b"none"
            assert dict(await call.trailing_metadata())["seen"] == "x"
            assert await channel.unary_unary("/t.T/Look")(b"", metadata=(("tag", "x"),), timeout=9.9) == b"9"

    run(main())


def test_a_client_that_leaves_cancels_its_call() -> None:
    async def main() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def wait(request: bytes, rpc: Rpc) -> bytes:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return b""

        async with serving(Method("/t.T/Wait", bytes, wait, bytes, scope=Scope.INFER)) as (_, channel):
            call = channel.unary_unary("/t.T/Wait")(b"")
            task = asyncio.ensure_future(call.code())
            await asyncio.wait_for(begun.wait(), WAIT_S)
            call.cancel()
            await asyncio.wait_for(ended.wait(), WAIT_S)
            assert await task == grpc.StatusCode.CANCELLED

    run(main())


def test_limits_of_size_and_number() -> None:
    async def main() -> None:
        begun = asyncio.Event()

        async def wait(request: bytes, rpc: Rpc) -> bytes:
            begun.set()
            await asyncio.Event().wait()
            return b""

        method = Method("/t.T/Wait", bytes, wait, bytes, scope=Scope.INFER)
        async with serving(method, message_bytes=1000, concurrent_calls=1) as (_, channel):
            assert len(await channel.unary_unary("/t.T/Echo")(bytes(1000))) == 1000
            error = await refused(channel.unary_unary("/t.T/Echo")(bytes(1001)))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            call = channel.unary_unary("/t.T/Wait")(b"")
            await asyncio.wait_for(begun.wait(), WAIT_S)
            error = await refused(channel.unary_unary("/t.T/Echo")(b""))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            call.cancel()

    run(main())


def test_replies_have_the_limit_too() -> None:
    async def main() -> None:
        said = "the reply has 1002 bytes, grpc_options.message_bytes allows 1000"
        async with serving(message_bytes=1000) as (_, channel):
            assert len(await channel.unary_unary("/t.T/Twice")(bytes(500))) == 1000
            error = await refused(channel.unary_unary("/t.T/Twice")(bytes(501)))
            assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, said)
            double = channel.stream_stream("/t.T/Double")(iter([bytes(500), bytes(501)]))
            assert len(await double.read()) == 1000
            error = await refused(double.read())
            assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, said)

    run(main())


def test_health() -> None:
    async def main() -> None:
        async with serving() as (listener, channel):
            stub = health_pb2_grpc.HealthStub(channel)

            async def check(service: str) -> str:
                reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))

            assert await check("") == "NOT_SERVING"
            error = await refused(stub.Check(health_pb2.HealthCheckRequest(service="digits")))
            assert error.code() == grpc.StatusCode.NOT_FOUND
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="digits"))
            seen = [(await watch.read()).status]
            listener.set_health("", True)
            listener.set_health("digits", True)
            assert (await check(""), await check("digits")) == ("SERVING", "SERVING")
            seen.append((await watch.read()).status)
            await listener.drain(WAIT_S)
            seen.append((await watch.read()).status)
            assert await watch.read() is grpc.aio.EOF
            assert seen == [3, 1, 2]
            error = await refused(channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff"))
            assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE)

    run(main())


@pytest.mark.parametrize("package", ["grpc.reflection.v1alpha", "grpc.reflection.v1"])
def test_reflection(package: str) -> None:
    file = FileDescriptorProto(name="t.proto", package="t", syntax="proto3")
    file.message_type.add(name="M")
    file.service.add(name="T").method.add(name="Echo", input_type=".t.M", output_type=".t.M")
    descriptors = [FileDescriptorSet(file=[file]).SerializeToString()] * 2

    async def main() -> None:
        async with serving(descriptors=descriptors) as (_, channel):
            ask = channel.stream_stream(
                f"/{package}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="t.T"),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
                reflection_pb2.ServerReflectionRequest(file_by_filename="t.proto"),
                reflection_pb2.ServerReflectionRequest(all_extension_numbers_of_type="t.M"),
                reflection_pb2.ServerReflectionRequest(file_by_filename="none.proto", host="h"),
                reflection_pb2.ServerReflectionRequest(),
            ]
            listed, ours, health, by_name, extensions, none, nothing = [
                reply async for reply in ask(iter(requests))
            ]
            names = {service.name for service in listed.list_services_response.service}
            assert {"t.T", "grpc.health.v1.Health", f"{package}.ServerReflection"} <= names
            (blob,) = ours.file_descriptor_response.file_descriptor_proto
            assert FileDescriptorProto.FromString(blob).service[0].name == "T"
            assert len(health.file_descriptor_response.file_descriptor_proto) == 1
            assert by_name.file_descriptor_response == ours.file_descriptor_response
            assert extensions.all_extension_numbers_response.base_type_name == "t.M"
            assert (none.error_response.error_code, none.original_request.host) == (5, "h")
            assert nothing.error_response.error_code == 3

    run(main())


def test_drain_finishes_what_is_in_flight() -> None:
    async def main() -> None:
        begun, go = asyncio.Event(), asyncio.Event()

        async def wait(request: bytes, rpc: Rpc) -> bytes:
            begun.set()
            await go.wait()
            return b"done"

        async with serving(Method("/t.T/Wait", bytes, wait, bytes, scope=Scope.INFER)) as (listener, channel):
            call = asyncio.ensure_future(_await(channel.unary_unary("/t.T/Wait")(b"")))
            await asyncio.wait_for(begun.wait(), WAIT_S)
            drained = asyncio.ensure_future(listener.drain(WAIT_S))
            go.set()
            assert await call == b"done"
            await drained

    run(main())


async def _await(call: Any) -> bytes:
    answer: bytes = await call
    return answer


def test_a_taken_port_is_an_os_error() -> None:
    async def main() -> None:
        async with serving() as (listener, _):
            second = GrpcListener("127.0.0.1", listener.address[1], [], GrpcOptions())
            with pytest.raises(OSError):
                await second.open()

    run(main())


def test_grpc_is_not_imported_without_a_grpc_listener() -> None:
    code = "import sys, fastserve.net; sys.exit(any(n in sys.modules for n in ('grpc', 'numpy', 'google')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_connections_and_metadata_have_a_limit() -> None:
    """One connection more is closed; those there are go on, and another one is let in when one has ended. Its
    client hears of it: after SETTINGS grpcio's would try its call again until its time is up."""

    async def main() -> None:
        async with serving(connections=1, metadata_bytes=4096) as (listener, channel):
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await check(b"") is not None
            async with grpc.aio.insecure_channel(
                "{}:{}".format(*listener.address), options=[("grpc.use_local_subchannel_pool", 1)]
            ) as second:
                fault = await refused(second.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60))
                assert fault.code() is grpc.StatusCode.UNAVAILABLE
            reader, writer = await asyncio.open_connection(*listener.address)
            told = await asyncio.wait_for(reader.read(), 60)  # to its end, at once, and without SETTINGS
            assert told[3:4] in (b"", GOAWAY)
            writer.close()
            assert await check(b"") is not None
            fault = await refused(check(b"", metadata=[("a", "b" * 8000)], timeout=60))
            assert fault.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(main())
