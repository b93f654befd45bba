"""gRPC's interoperability cases by their names, with grpcio's clients, sync and asyncio, and with grpc-js.

grpc-js runs where FASTSERVE_GRPC_JS names a folder in which `npm install @grpc/grpc-js` was done.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from fastserve.config import GrpcOptions
from fastserve.errors import Kind, ServeError
from fastserve.wire.grpc import GrpcListener, Method, Rpc
from tests.transports import both_transports as both_transports
from tests.transports import transport
from tests.wire.kit import WAIT_S
from tests.wire.test_grpc import run

pytestmark = pytest.mark.lingers  # grpcio keeps its poller's thread and pipe
LARGE_SENT, LARGE_ANSWERED = 271828, 314159
SIZES_SENT, SIZES_ANSWERED = (27182, 8, 1828, 45904), (31415, 9, 2653, 58979)
SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"
SERVICE = "/grpc.testing.TestService/"
ECHO_INITIAL, ECHO_TRAILING = "x-grpc-test-echo-initial", "x-grpc-test-echo-trailing-bin"


# -- the service: requests are b"size" of the answer, or b"status TEXT" ---------------------------


def respond(request: bytes) -> bytes:
    word, _, rest = request.partition(b" ")
    if word == b"status":
        raise ServeError(Kind.UNKNOWN, rest.decode())
    return bytes(int(word or b"0"))


def _echo_metadata(rpc: Rpc) -> None:
    rpc.set_trailing([(name, value) for name, value in rpc.metadata if name == ECHO_TRAILING])


async def empty(request: bytes, rpc: Rpc) -> bytes:
    return b""


async def unary(request: bytes, rpc: Rpc) -> bytes:
    _echo_metadata(rpc)
    if request.startswith(b"packed "):
        rpc.compress()
        request = request.removeprefix(b"packed ")
    return respond(request.rstrip(b"\0"))


async def streamed_in(requests: AsyncIterator[bytes], rpc: Rpc) -> bytes:
    return b"%d" % sum([len(request) async for request in requests])


async def streamed_out(request: bytes, rpc: Rpc) -> AsyncIterator[bytes]:
    for size in request.split():
        yield respond(size)


async def duplex(requests: AsyncIterator[bytes], rpc: Rpc) -> AsyncIterator[bytes]:
    _echo_metadata(rpc)
    async for request in requests:
        yield respond(request)


async def sleeping(requests: AsyncIterator[bytes], rpc: Rpc) -> AsyncIterator[bytes]:
    async for _ in requests:
        await asyncio.sleep(60)
    yield b""


def methods() -> list[Method]:
    rows: list[tuple[str, Any, bool, bool]] = [
        ("EmptyCall", empty, False, False),
        ("UnaryCall", unary, False, False),
        ("StreamingInputCall", streamed_in, True, False),
        ("StreamingOutputCall", streamed_out, False, True),
        ("FullDuplexCall", duplex, True, True),
        ("Sleeping", sleeping, True, True),
    ]
    return [Method(SERVICE + name, bytes, run, bytes, takes, gives) for name, run, takes, gives in rows]


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[str]:
    listener = GrpcListener("127.0.0.1", 0, methods(), GrpcOptions(transport=transport()))
    await listener.open()
    yield "{}:{}".format(*listener.address)
    await listener.close()


# -- asyncio ---------------------------------------------------------------------------------------


async def failed(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def empty_unary(channel: grpc.aio.Channel) -> None:
    assert await channel.unary_unary(SERVICE + "EmptyCall")(b"") == b""


async def large_unary(channel: grpc.aio.Channel) -> None:
    request = b"%d" % LARGE_ANSWERED + bytes(LARGE_SENT - 6)
    assert await channel.unary_unary(SERVICE + "UnaryCall")(request) == bytes(LARGE_ANSWERED)


async def client_compressed_unary(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary(SERVICE + "UnaryCall")
    request = b"%d" % LARGE_ANSWERED + bytes(LARGE_SENT - 6)
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate, grpc.Compression.NoCompression):
        assert await call(request, compression=compression) == bytes(LARGE_ANSWERED)


async def server_compressed_unary(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary(SERVICE + "UnaryCall")
    assert await call(b"packed %d" % LARGE_ANSWERED) == bytes(LARGE_ANSWERED)


async def client_streaming(channel: grpc.aio.Channel) -> None:
    sent = iter([bytes(size) for size in SIZES_SENT])
    assert await channel.stream_unary(SERVICE + "StreamingInputCall")(sent) == b"74922"


async def server_streaming(channel: grpc.aio.Channel) -> None:
    call = channel.unary_stream(SERVICE + "StreamingOutputCall")(b"31415 9 2653 58979")
    assert [len(piece) async for piece in call] == list(SIZES_ANSWERED)


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
    server_streaming, ping_pong, empty_stream, cancel_after_begin, cancel_after_first_response,
    timeout_on_sleeping_server, custom_metadata, status_code_and_message, special_status_message,
    unimplemented_method, unimplemented_service,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_asyncio(case: Callable[[grpc.aio.Channel], Any]) -> None:
    async def main() -> None:
        async with serving() as place, grpc.aio.insecure_channel(place) as channel:
            await asyncio.wait_for(case(channel), WAIT_S)

    run(main())


# -- sync ------------------------------------------------------------------------------------------


def ask_everything(place: str) -> None:
    """The cases, as a client of threads asks them."""
    with grpc.insecure_channel(place) as channel:
        assert channel.unary_unary(SERVICE + "EmptyCall")(b"") == b""
        request = b"%d" % LARGE_ANSWERED + bytes(LARGE_SENT - 6)
        unary_call = channel.unary_unary(SERVICE + "UnaryCall")
        for compression in (None, grpc.Compression.Gzip, grpc.Compression.Deflate):
            assert unary_call(request, compression=compression) == bytes(LARGE_ANSWERED)
        assert unary_call(b"packed 1000") == bytes(1000)
        sent = iter([bytes(size) for size in SIZES_SENT])
        assert channel.stream_unary(SERVICE + "StreamingInputCall")(sent) == b"74922"
        pieces = channel.unary_stream(SERVICE + "StreamingOutputCall")(b"31415 9 2653 58979")
        assert [len(piece) for piece in pieces] == list(SIZES_ANSWERED)
        duplex_call = channel.stream_stream(SERVICE + "FullDuplexCall")
        assert [len(piece) for piece in duplex_call(iter([b"9", b"8"]))] == [9, 8]
        assert list(duplex_call(iter([]))) == []
        first = duplex_call(iter([b"1", b"2"]))
        next(first)
        first.cancel()
        assert first.code() is grpc.StatusCode.CANCELLED
        for path, wanted in (("UnimplementedCall", grpc.StatusCode.UNIMPLEMENTED), ("UnaryCall", None)):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(SERVICE + path)(b"status " + SPECIAL.encode())
            assert caught.value.code() is (wanted or grpc.StatusCode.UNKNOWN)
            assert wanted is not None or caught.value.details() == SPECIAL
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.stream_stream(SERVICE + "Sleeping")(iter([b""]), timeout=0.05))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_sync() -> None:
    async def main() -> None:
        async with serving() as place:
            await asyncio.get_running_loop().run_in_executor(None, ask_everything, place)

    run(main())


# -- grpc-js ---------------------------------------------------------------------------------------

SCRIPT = r"""
const grpc = require("@grpc/grpc-js");
const client = new grpc.Client(process.argv[2], grpc.credentials.createInsecure());
const S = "/grpc.testing.TestService/", same = x => x;
const unary = (name, body) => new Promise(done => {
  const metadata = new grpc.Metadata();
  metadata.set("x-grpc-test-echo-trailing-bin", Buffer.from([0xab, 0xab]));
  let trailing = null;
  client.makeUnaryRequest(S + name, same, same, body, metadata, (fault, reply) =>
    setImmediate(() => done({fault, reply, trailing}))).on("status", s => { trailing = s.metadata; });
});
const stream = (name, sizes) => new Promise(done => {
  const call = client.makeBidiStreamRequest(S + name, same, same), found = [];
  call.on("data", piece => found.push(piece.length));
  call.on("status", status => done({found, code: status.code}));
  call.on("error", () => {});
  for (const size of sizes) call.write(Buffer.from(String(size)));
  call.end();
});
const must = (true_, what) => { if (!true_) { console.error("failed: " + what); process.exit(1); } };
(async () => {
  must((await unary("EmptyCall", Buffer.alloc(0))).reply.length === 0, "empty_unary");
  const large = Buffer.concat([Buffer.from("314159"), Buffer.alloc(271822)]);
  const answer = await unary("UnaryCall", large);
  must(answer.reply.length === 314159, "large_unary");
  must(answer.trailing.get("x-grpc-test-echo-trailing-bin")[0].equals(Buffer.from([0xab, 0xab])), "metadata");
  must((await unary("UnaryCall", Buffer.from("packed 1000"))).reply.length === 1000, "compressed");
  const pong = await stream("FullDuplexCall", [31415, 9, 2653, 58979]);
  must(pong.found.join() === "31415,9,2653,58979" && pong.code === 0, "ping_pong");
  must((await stream("FullDuplexCall", [])).code === 0, "empty_stream");
  const told = (await unary("UnaryCall", Buffer.from("status \u263a 100%"))).fault;
  must(told.code === 2 && told.details === "\u263a 100%", "special_status_message");
  must((await unary("None", Buffer.alloc(0))).fault.code === 12, "unimplemented_method");
  client.close();
})();
"""


@pytest.fixture
def js_folder() -> Path:
    folder = os.environ.get("FASTSERVE_GRPC_JS", "")
    if not folder or shutil.which("node") is None:
        pytest.skip("FASTSERVE_GRPC_JS names no folder with node_modules/@grpc/grpc-js, or there is no node")
    return Path(folder)


def test_grpc_js(js_folder: Path) -> None:
    async def main() -> None:
        async with serving() as place:
            command = ["node", "-e", SCRIPT.replace("process.argv[2]", f'"{place}"')]
            ask = partial(
                subprocess.run, command, cwd=js_folder, capture_output=True, timeout=30, check=False
            )
            asked = await asyncio.get_running_loop().run_in_executor(None, ask)
            assert asked.returncode == 0, asked.stderr.decode()

    run(main())
