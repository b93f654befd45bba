"""gRPC's interoperability cases by their names, with grpcio's client of threads."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from tests.net.grpc.interop_service import (
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

pytestmark = pytest.mark.lingers  # grpcio keeps its poller's thread and pipe
PACKINGS = (grpc.Compression.Gzip, grpc.Compression.Deflate, grpc.Compression.NoCompression)


def failed(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details() or ""


def empty_unary(channel: grpc.Channel) -> None:
    assert channel.unary_unary(SERVICE + "EmptyCall")(b"") == b""


def large_unary(channel: grpc.Channel) -> None:
    assert channel.unary_unary(SERVICE + "UnaryCall")(LARGE) == bytes(LARGE_ANSWERED)


def client_compressed_unary(channel: grpc.Channel) -> None:
    call = channel.unary_unary(SERVICE + "UnaryCall")
    for compression in PACKINGS:
        assert call(LARGE, compression=compression) == bytes(LARGE_ANSWERED)


def server_compressed_unary(channel: grpc.Channel) -> None:
    assert channel.unary_unary(SERVICE + "UnaryCall")(b"packed %d" % LARGE_ANSWERED) == bytes(LARGE_ANSWERED)


def client_streaming(channel: grpc.Channel) -> None:
    sent = iter([bytes(size) for size in SIZES_SENT])
    assert channel.stream_unary(SERVICE + "StreamingInputCall")(sent) == b"74922"


def client_compressed_streaming(channel: grpc.Channel) -> None:
    call = channel.stream_unary(SERVICE + "StreamingInputCall")
    for compression in PACKINGS:
        assert call(iter([bytes(size) for size in SIZES_SENT]), compression=compression) == b"74922"


def server_streaming(channel: grpc.Channel) -> None:
    pieces = channel.unary_stream(SERVICE + "StreamingOutputCall")(b"31415 9 2653 58979")
    assert [len(piece) for piece in pieces] == list(SIZES_ANSWERED)


def server_compressed_streaming(channel: grpc.Channel) -> None:
    pieces = channel.unary_stream(SERVICE + "StreamingOutputCall")(b"packed 31415 92653")
    assert [len(piece) for piece in pieces] == [31415, 92653]


def ping_pong(channel: grpc.Channel) -> None:
    """Each request is sent when the last one has been answered."""
    sent: queue.Queue[bytes | None] = queue.Queue()
    replies = channel.stream_stream(SERVICE + "FullDuplexCall")(iter(sent.get, None))
    for size in SIZES_ANSWERED:
        sent.put(b"%d" % size)
        assert len(next(replies)) == size
    sent.put(None)
    assert list(replies) == []


def empty_stream(channel: grpc.Channel) -> None:
    assert list(channel.stream_stream(SERVICE + "FullDuplexCall")(iter([]))) == []


def cancel_after_begin(channel: grpc.Channel) -> None:
    sent: queue.Queue[bytes | None] = queue.Queue()
    call = channel.stream_unary(SERVICE + "StreamingInputCall").future(iter(sent.get, None))
    call.cancel()
    assert call.code() is grpc.StatusCode.CANCELLED
    sent.put(None)


def cancel_after_first_response(channel: grpc.Channel) -> None:
    sent: queue.Queue[bytes | None] = queue.Queue()
    call = channel.stream_stream(SERVICE + "FullDuplexCall")(iter(sent.get, None))
    sent.put(b"31415")
    assert len(next(call)) == 31415
    call.cancel()
    assert call.code() is grpc.StatusCode.CANCELLED
    sent.put(None)


def timeout_on_sleeping_server(channel: grpc.Channel) -> None:
    call = channel.stream_stream(SERVICE + "Sleeping")(iter([bytes(27182)]), timeout=0.05)
    assert failed(lambda: list(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED


def custom_metadata(channel: grpc.Channel) -> None:
    sent = ((ECHO_TRAILING, b"\xab\xab\xab"),)
    reply, call = channel.unary_unary(SERVICE + "UnaryCall").with_call(b"3", metadata=sent)
    assert reply == bytes(3)
    assert dict(call.trailing_metadata())[ECHO_TRAILING] == b"\xab\xab\xab"
    stream = channel.stream_stream(SERVICE + "FullDuplexCall")(iter([b"3"]), metadata=sent)
    assert list(stream) == [bytes(3)]
    assert dict(stream.trailing_metadata())[ECHO_TRAILING] == b"\xab\xab\xab"


def status_code_and_message(channel: grpc.Channel) -> None:
    told, request = (grpc.StatusCode.UNKNOWN, "test status message"), b"status test status message"
    assert failed(lambda: channel.unary_unary(SERVICE + "UnaryCall")(request)) == told
    stream = channel.stream_stream(SERVICE + "FullDuplexCall")(iter([request]))
    assert failed(lambda: next(stream)) == told


def special_status_message(channel: grpc.Channel) -> None:
    call = channel.unary_unary(SERVICE + "UnaryCall")
    assert failed(lambda: call(b"status " + SPECIAL.encode())) == (grpc.StatusCode.UNKNOWN, SPECIAL)


def unimplemented_method(channel: grpc.Channel) -> None:
    call = channel.unary_unary(SERVICE + "UnimplementedCall")
    assert failed(lambda: call(b""))[0] is grpc.StatusCode.UNIMPLEMENTED


def unimplemented_service(channel: grpc.Channel) -> None:
    call = channel.unary_unary("/grpc.testing.UnimplementedService/UnimplementedCall")
    assert failed(lambda: call(b""))[0] is grpc.StatusCode.UNIMPLEMENTED


CASES = [
    empty_unary, large_unary, client_compressed_unary, server_compressed_unary, client_streaming,
    client_compressed_streaming, server_streaming, server_compressed_streaming, ping_pong, empty_stream,
    cancel_after_begin, cancel_after_first_response, timeout_on_sleeping_server, custom_metadata,
    status_code_and_message, special_status_message, unimplemented_method, unimplemented_service,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_sync(case: Callable[[grpc.Channel], None]) -> None:
    def ask(place: str) -> None:
        with contextlib.closing(grpc.insecure_channel(place)) as channel:
            case(channel)

    async def main() -> None:
        async with serving() as place:
            asked = asyncio.get_running_loop().run_in_executor(None, ask, place)
            await asyncio.wait_for(asked, WAIT_S)

    run(main())
