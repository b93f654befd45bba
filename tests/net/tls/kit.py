"""A TLS client whose records and alerts are sent by hand, and a listener with a certificate."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fastserve.net import Endpoint, HttpListener
from fastserve.net.tls import Credentials
from fastserve.settings.server_settings import TlsOptions
from tests import certificates
from tests.net import kit


@functools.lru_cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process, which is gone with it; processes that were forked have one each."""
    return tempfile.TemporaryDirectory(prefix="fastserve-tls-")


@functools.lru_cache
def issued() -> TlsOptions:
    return certificates.issue(Path(_folder().name))


def credentials(**options: Any) -> Credentials:
    made = Credentials(msgspec.structs.replace(issued(), **options))
    made.load()
    return made


@contextlib.asynccontextmanager
async def serving(
    endpoints: Mapping[str, Endpoint], tls: Credentials | None = None, **options: Any
) -> AsyncIterator[HttpListener]:
    async with kit.serving(endpoints, tls=tls or credentials(), **options) as listener:
        yield listener


@contextlib.asynccontextmanager
async def client(listener: HttpListener, context: ssl.SSLContext | None = None) -> AsyncIterator[kit.Client]:
    reader, writer = await asyncio.open_connection(
        *listener.address, ssl=context or certificates.trusting(), server_hostname="127.0.0.1"
    )
    try:
        yield kit.Client(reader, writer)
    finally:
        writer.close()


class HandClient:
    """A client that decides what goes out when: `step` bytes at a time if that is above 0."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, step: int = 0) -> None:
        self.reader, self.writer, self.step = reader, writer, step
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = certificates.trusting()
        self.ssl = context.wrap_bio(self.incoming, self.outgoing, server_hostname="127.0.0.1")

    @classmethod
    async def connect(cls, listener: HttpListener, step: int = 0) -> HandClient:
        return cls(*await asyncio.open_connection(*listener.address), step)

    async def flush(self) -> None:
        data = self.outgoing.read()
        size = self.step or max(1, len(data))
        for start in range(0, len(data), size):
            self.writer.write(data[start : start + size])
            await asyncio.sleep(0)

    async def pull(self) -> bool:
        """Take one read in; False at the connection's end."""
        data = await asyncio.wait_for(self.reader.read(65536), kit.WAIT_S)
        self.incoming.write(data)
        return bool(data)

    async def shake(self) -> None:
        while True:
            try:
                self.ssl.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self.flush()
                assert await self.pull()
        await self.flush()

    async def send(self, data: bytes) -> None:
        self.ssl.write(data)
        await self.flush()

    async def send_alert(self) -> None:
        """close_notify; the socket stays open."""
        with contextlib.suppress(ssl.SSLError):
            self.ssl.unwrap()
        await self.flush()

    async def read(self) -> bytes:
        """Some of what was said, b"" at the server's close_notify. Raises EOFError for an end without it."""
        while True:
            try:
                return self.ssl.read(65536)
            except ssl.SSLWantReadError:
                if not await self.pull():
                    raise EOFError from None
            except ssl.SSLZeroReturnError:
                return b""

    async def rest(self) -> bytes:
        told = b""
        while piece := await self.read():
            told += piece
        return told

    def close(self) -> None:
        self.writer.close()
