"""The service of gRPC's interoperability cases. Not grpc.testing's messages: what a request asks for is text
in it, so that any client can be written without generated code.

    b"31415"             a reply of so many bytes        b"status TEXT"      UNKNOWN, with this text
    b"packed REQUEST"    the same, compressed for who takes that
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastserve.errors import Kind, ServeError
from fastserve.net.access_control import Scope
from fastserve.net.grpc import GrpcListener, Method, Rpc
from fastserve.net.tls import Credentials
from fastserve.settings import GrpcOptions

SERVICE = "/grpc.testing.TestService/"
ECHO_INITIAL, ECHO_TRAILING = "x-grpc-test-echo-initial", "x-grpc-test-echo-trailing-bin"
LARGE_SENT, LARGE_ANSWERED = 271828, 314159
LARGE = b"%d" % LARGE_ANSWERED + bytes(LARGE_SENT - 6)
SIZES_SENT, SIZES_ANSWERED = (27182, 8, 1828, 45904), (31415, 9, 2653, 58979)
SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"


def respond(request: bytes, rpc: Rpc) -> bytes:
    if request.startswith(b"packed "):
        rpc.compress()
        request = request.removeprefix(b"packed ")
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
    return respond(request.rstrip(b"\0"), rpc)


async def streamed_in(requests: AsyncIterator[bytes], rpc: Rpc) -> bytes:
    return b"%d" % sum([len(request) async for request in requests])


async def streamed_out(request: bytes, rpc: Rpc) -> AsyncIterator[bytes]:
    if request.startswith(b"packed "):
        rpc.compress()
    for size in request.removeprefix(b"packed ").split():
        yield respond(size, rpc)


async def duplex(requests: AsyncIterator[bytes], rpc: Rpc) -> AsyncIterator[bytes]:
    _echo_metadata(rpc)
    async for request in requests:
        yield respond(request, rpc)


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
    return [
        Method(SERVICE + name, bytes, run, bytes, takes, gives, scope=Scope.INFER)
        for name, run, takes, gives in rows
    ]


@contextlib.asynccontextmanager
async def serving(tls: Credentials | None = None) -> AsyncIterator[str]:
    """Where it listens, on the transport of the running test."""
    listener = GrpcListener("127.0.0.1", 0, methods(), GrpcOptions(), tls=tls)
    await listener.open()
    yield "{}:{}".format(*listener.address)
    await listener.close()
