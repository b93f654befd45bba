"""What a listener's HTTP/2 connections share: services, heads, reply blocks and the buffer for reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING

from fastserve.each import each
from fastserve.wire.bulk import SIP_BYTES
from fastserve.wire.faults import WireFault
from fastserve.wire.head import Head
from fastserve.wire.http2.exchange import Exchanges, Refusal
from fastserve.wire.http2.heads import Fields, ReplyBlocks, read_head
from fastserve.wire.http2.stream import Finder

if TYPE_CHECKING:
    from fastserve.wire.http2.connection import Http2Connection
    from fastserve.wire.listener import HttpListener

SCRATCH_BYTES = 1 << 18
KNOWN_HEADS = 512
KNOWN_HEAD_BYTES = 2048  # longer ones are read anew: what clients send must not fill the memory


class Shared:
    """One listener's. `services` are asked in turn who serves a head; plain HTTP takes what is left."""

    def __init__(self, listener: HttpListener, services: Sequence[Finder]) -> None:
        self._listener = listener
        self.exchanges = Exchanges(listener)
        self._services = tuple(services)
        self.blocks = ReplyBlocks()
        self.scratch = bytearray()
        self.sip = memoryview(self.scratch)  # the beginning of it
        self._gathering: list[Http2Connection] = []
        self._heads: dict[tuple[tuple[bytes, bytes], ...], Head] = {}

    def open(self) -> None:
        """Before the first connection: a listener that has none needs no buffer."""
        if not self.scratch:
            self.scratch = bytearray(SCRATCH_BYTES)
            self.sip = memoryview(self.scratch)[:SIP_BYTES]

    def pour(self, data: bytes | bytearray, hand_on: Callable[[int], None]) -> None:
        """Bytes that were received elsewhere come as if they had been received in the scratch buffer."""
        scratch = self.scratch
        for at in range(0, len(data), SCRATCH_BYTES):
            piece = data[at : at + SCRATCH_BYTES]
            scratch[: len(piece)] = piece
            hand_on(len(piece))

    def add(self, service: Finder) -> None:
        """One more service, asked before the others. Before the listener is open."""
        self._services = (service, *self._services)

    def flush_soon(self, connection: Http2Connection) -> None:
        """Flush this connection at the end of the loop's turn, with all the others that ask for it."""
        loop = self._listener.row.loop
        if loop is None:
            connection.flush()
            return
        if not self._gathering:
            loop.call_soon(self._flush)
        self._gathering.append(connection)

    def _flush(self) -> None:
        gathering, self._gathering = self._gathering, []
        each(gathering, methodcaller("flush"), methodcaller("abort"))

    def find(self, fields: Fields) -> Head:
        """The head of a request and who serves it: the same one for equal fields. Raises StreamFault."""
        key = tuple(fields)
        head = self._heads.get(key)
        if head is None:
            head = self._read(fields)
            if sum(len(name) + len(value) for name, value in key) <= KNOWN_HEAD_BYTES:
                if len(self._heads) >= KNOWN_HEADS:
                    self._heads.clear()
                self._heads[key] = head
        return head

    def _read(self, fields: Fields) -> Head:
        try:
            head = read_head(fields, self._listener.limits)
        except WireFault as fault:
            return self.refusal(fault, fields)
        self.serve(head)
        return head

    def serve(self, head: Head) -> None:
        """Find who serves it."""
        found = (service.find(head) for service in self._services)
        head.service = next(filter(None, found), None) or self.exchanges.find(head)

    def refusal(self, fault: WireFault, fields: Fields) -> Head:
        """The head of requests that are answered with a fault."""
        head = Head(b"")
        head.body_bytes = -1
        found = (service.refuse(fields, fault) for service in self._services)
        head.service = next(filter(None, found), None) or Refusal(self.exchanges, fault)
        return head
