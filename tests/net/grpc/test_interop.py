"""gRPC's interoperability cases by their names, with grpcio's client of asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.certificates import authority
from tests.net.grpc.interop_service import (
    ECHO_INITIAL,
    ECHO_TRAILING,
    LARGE,
    LARGE_ANSWERED,
    SERVICE,
    SIZES_ANSWERED,
    SIZES_SENT,
    SPECIAL,
    serving,
)
from tests.net.grpc.test_methods import run
from tests.net.kit import WAIT_S
from tests.net.tls.kit import credentials

pytestmark = pytest.mark.lingers  # grpcio keeps its poller's thread and pipe


async def failed(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def empty_unary(channel: grpc.aio.Channel) -> None:
    assert await channel.unary_unary(SERVICE + "EmptyCall")(b"") == b""


async def large_unary(channel: grpc.aio.Channel) -> None:
    assert await channel.unary_unary(SERVICE + "UnaryCall")(LARGE) == bytes(LARGE_ANSWERED)


async def client_compressed_unary(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary(SERVICE + "UnaryCall")
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate, grpc.Compression.NoCompression):
        assert await call(LARGE, compression=compression) == bytes(LARGE_ANSWERED)


async def server_compressed_unary(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary(SERVICE + "UnaryCall")
    assert await call(b"packed %d" % LARGE_ANSWERED) == bytes(LARGE_ANSWERED)


async def client_streaming(channel: grpc.aio.Channel) -> None:
    sent = iter([bytes(size) for size in SIZES_SENT])
    assert await channel.stream_unary(SERVICE + "StreamingInputCall")(sent) == b"74922"


async def server_streaming(channel: grpc.aio.Channel) -> None:
    call = channel.unary_stream(SERVICE + "StreamingOutputCall")(b"31415 9 2653 58979")
    assert [len(piece) async for piece in call] == list(SIZES_ANSWERED)


async def client_compressed_streaming(channel: grpc.aio.Channel) -> None:
    call = channel.stream_unary(SERVICE + "StreamingInputCall")
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        assert await call(iter([bytes(size) for size in SIZES_SENT]), compression=compression) == b"74922"


async def server_compressed_streaming(channel: grpc.aio.Channel) -> None:
    call = channel.unary_stream(SERVICE + "StreamingOutputCall")(b"packed 31415 92653")
    assert [len(piece) async for piece in call] == [31415, 92653]


async def ping_pong(channel: grpc.aio.Channel) -> None:
    call = channel.stream_stream(SERVICE + "FullDuplexCall")()
    for size in SIZES_ANSWERED:
        await call.write(b"%d" % size)
        assert len(await call.read()) == size
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def empty_stream(channel: grpc.aio.Channel) -> None:
    call = channel.stream_stream(SERVICE + "FullDuplexCall")()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def cancel_after_begin(channel: grpc.aio.Channel) -> None:
    call = channel.stream_unary(SERVICE + "StreamingInputCall")()
    await asyncio.sleep(0)
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED


async def cancel_after_first_response(channel: grpc.aio.Channel) -> None:
    call = channel.stream_stream(SERVICE + "FullDuplexCall")()
    await call.write(b"%d" % SIZES_ANSWERED[0])
    assert len(await call.read()) == SIZES_ANSWERED[0]
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED


async def timeout_on_sleeping_server(channel: grpc.aio.Channel) -> None:
    call = channel.stream_stream(SERVICE + "Sleeping")(timeout=0.05)
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        await call.write(bytes(27182))
        await call.read()
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def custom_metadata(channel: grpc.aio.Channel) -> None:
    sent = ((ECHO_INITIAL, "test_initial_metadata_value"), (ECHO_TRAILING, b"\xab\xab\xab"))
    call = channel.unary_unary(SERVICE + "UnaryCall")(b"3", metadata=sent)
    assert await call == bytes(3)
    assert dict(await call.trailing_metadata())[ECHO_TRAILING] == b"\xab\xab\xab"
    stream = channel.stream_stream(SERVICE + "FullDuplexCall")(iter([b"3"]), metadata=sent)
    assert [piece async for piece in stream] == [bytes(3)]
    assert dict(await stream.trailing_metadata())[ECHO_TRAILING] == b"\xab\xab\xab"


async def status_code_and_message(channel: grpc.aio.Channel) -> None:
    told = (grpc.StatusCode.UNKNOWN, "test status message")
    assert await failed(channel.unary_unary(SERVICE + "UnaryCall")(b"status test status message")) == told
    stream = channel.stream_stream(SERVICE + "FullDuplexCall")(iter([b"status test status message"]))
    assert await failed(stream.read()) == told


async def special_status_message(channel: grpc.aio.Channel) -> None:
    request = b"status " + SPECIAL.encode()
    found = await failed(channel.unary_unary(SERVICE + "UnaryCall")(request))
    assert found == (grpc.StatusCode.UNKNOWN, SPECIAL)


async def unimplemented_method(channel: grpc.aio.Channel) -> None:
    code, _ = await failed(channel.unary_unary(SERVICE + "UnimplementedCall")(b""))
    assert code is grpc.StatusCode.UNIMPLEMENTED


async def unimplemented_service(channel: grpc.aio.Channel) -> None:
    code, _ = await failed(channel.unary_unary("/grpc.testing.UnimplementedService/UnimplementedCall")(b""))
    assert code is grpc.StatusCode.UNIMPLEMENTED


CASES = [
    empty_unary, large_unary, client_compressed_unary, server_compressed_unary, client_streaming,
    client_compressed_streaming, server_streaming, server_compressed_streaming, ping_pong, empty_stream,
    cancel_after_begin, cancel_after_first_response, timeout_on_sleeping_server, custom_metadata,
    status_code_and_message, special_status_message, unimplemented_method, unimplemented_service,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_asyncio(case: Callable[[grpc.aio.Channel], Any]) -> None:
    async def main() -> None:
        async with serving() as place, grpc.aio.insecure_channel(place) as channel:
            await asyncio.wait_for(case(channel), WAIT_S)

    run(main())


def test_asyncio_over_tls() -> None:
    """All of them on one connection."""
    trusted = grpc.ssl_channel_credentials(authority().cert_pem.bytes())

    async def main() -> None:
        async with serving(credentials()) as place, grpc.aio.secure_channel(place, trusted) as channel:
            for case in CASES:
                await asyncio.wait_for(case(channel), WAIT_S)

    run(main())
