"""What a listener's TLS connections share: certificates, the buffer for reads, and a bound on handshakes."""

from __future__ import annotations

import asyncio
import ssl
from operator import methodcaller
from typing import TYPE_CHECKING

from fastserve.config.tls import TlsOptions
from fastserve.each import each
from fastserve.wire.tls.credentials import Credentials

if TYPE_CHECKING:
    from fastserve.wire.tls.handshake import Handshake
    from fastserve.wire.tls.transport import TlsTransport

# A buffer of OpenSSL's that once held a read, or what one became, keeps its size: 64 KiB each way.
SCRATCH_BYTES = 1 << 16
H2, HTTP_1_1 = "h2", "http/1.1"


class TlsPort:
    """One listener's. `protocols` are ALPN's names of what it speaks, the best first."""

    def __init__(self, credentials: Credentials, protocols: tuple[str, ...]) -> None:
        self.credentials = credentials
        self.protocols = protocols
        self.view = memoryview(b"")
        self._under_way: dict[Handshake, None] = {}
        self._flushing: list[TlsTransport] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def options(self) -> TlsOptions:
        return self.credentials.options

    def open(self) -> None:
        """On the running loop."""
        self._loop = asyncio.get_running_loop()
        self.view = memoryview(bytearray(SCRATCH_BYTES))

    def wrap(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        """The server's side of a new connection, with the certificate of now."""
        context = self.credentials.context(self.protocols)
        return context.wrap_bio(incoming, outgoing, server_side=True)

    def speaks_one_of(self, offered: list[bytes]) -> bool:
        """Whether there is a protocol for a client that offers these; one that offers none may have any."""
        return not offered or any(name.encode() in offered for name in self.protocols)

    def begin(self, handshake: Handshake) -> Handshake | None:
        """One more is under way; which one has to end for it. The oldest: who takes his time makes room for
        the others, who are done a round trip later."""
        self._under_way[handshake] = None
        if len(self._under_way) <= self.options.handshakes:
            return None
        return next(iter(self._under_way))

    def end(self, handshake: Handshake) -> None:
        """Idempotent."""
        self._under_way.pop(handshake, None)

    def flush_soon(self, transport: TlsTransport) -> None:
        """Encrypt what it was given at the end of the loop's turn: a reply of two pieces, or several replies,
        are one record."""
        assert self._loop is not None
        if not self._flushing:
            self._loop.call_soon(self._flush)
        self._flushing.append(transport)

    def _flush(self) -> None:
        flushing, self._flushing = self._flushing, []
        each(flushing, methodcaller("flush"), methodcaller("abort"))
