"""Large bodies, read by the kernel straight into their place: no pieces, no join.

A body of 600 KB in pieces costs two copies besides the kernel's own (one into a bytes object per read,
one to join them); read this way it costs none. The connection hands its socket over for the rest of
one body and takes it back at the last byte.

    Connection --head of a large body--> BulkBody --its last byte--> Sips --a short read--> Connection
                                             ^----head of a large body--|

Of a body that has come as a whole even the place may be another's: see arrived.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from fastserve._ext.slab import blank_bytes, grow_bytes
from fastserve.wire.arrived import find_arrived, offer
from fastserve.wire.call import Call
from fastserve.wire.replies import CLOSE

if TYPE_CHECKING:
    from fastserve.wire.connection import Connection
    from fastserve.wire.head import Head

HEAD, BODY, CHUNKS, DEAF = range(4)  # what a connection waits for: see there

SIP_BYTES = 4096  # room for a head
BULK_BYTES = 65536  # rest of a body from which the change of protocol pays
# The head alone claims a length: memory for more than this is taken as bytes arrive, as much again each time.
CLAIMED_BYTES = 16 << 20


class _Borrowed(asyncio.BufferedProtocol):
    """A connection's socket for a while: every event but its bytes is the connection's."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def eof_received(self) -> bool:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


class BulkBody(_Borrowed):
    """The rest of one body."""

    __slots__ = ("_at", "_body", "_total", "_view")

    def __init__(self, connection: Connection, pieces: Iterable[bytes | bytearray], need: int) -> None:
        super().__init__(connection)
        have = b"".join(pieces)
        self._total = len(have) + need
        self._body = blank_bytes(min(self._total, len(have) + CLAIMED_BYTES))
        self._view = memoryview(self._body)
        self._at = len(have)
        self._view[: self._at] = have

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: never past the end of this body."""
        if self._at == len(self._body) and self._at < self._total:
            self._view.release()
            grow_bytes(self._body, min(self._total, 2 * self._at))
            self._view = memoryview(self._body)
        return self._view[self._at :]

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        if self._at == self._total:
            self._view.release()
        self._connection.bulk_received(nbytes, self._body)


class Sips(_Borrowed):
    """What follows a large body, in small bites: the next is likely to be as large, and what is read of a
    body together with its head is copied twice (of 600 KB 250, an eighth of a request's time). A bite that is
    not full hands the socket back."""

    __slots__ = ("_buffer", "_transport")

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        super().__init__(connection)
        self._transport = transport
        self._buffer = bytearray(SIP_BYTES)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Where the next bite goes."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if nbytes < SIP_BYTES:
            self._transport.set_protocol(self._connection)
        self._connection.data_received(bytes(memoryview(self._buffer)[:nbytes]))


class BulkReader:
    """A connection's part in this."""

    __slots__ = ("_current", "_head", "_need", "_pieces", "_state", "_transport", "served")
    _current: Call | None
    _head: Head | None
    _need: int
    _pieces: list[bytes | bytearray]
    _state: int
    _transport: asyncio.Transport
    served: int

    def abort(self) -> None:
        raise NotImplementedError

    def _end_body(self, head: Head, body: bytes | bytearray) -> None:
        raise NotImplementedError

    def _take_bulk(self, head: Head) -> None:
        """The body of `head` has begun, and much of it is missing."""
        if not self._take_arrived(head):
            connection = cast("Connection", self)
            self._transport.set_protocol(BulkBody(connection, self._pieces, self._need))
        self._pieces = []

    def _take_arrived(self, head: Head) -> bool:
        """Begin its call, if all of it has come and the endpoint reads it out of the socket itself."""
        take = getattr(head.endpoint, "take", None)
        if take is None or self._current is not None or head.mode == CLOSE:
            return False
        body = find_arrived(self._transport, self._pieces, self._need)
        if body is None:
            return False
        connection = cast("Connection", self)
        call = self._current = Call(connection, head, cast(bytes, body))  # of which only the length is asked
        self._state = HEAD
        if not offer(take, call, body):
            self._state, self._current = BODY, None
            self._pieces, self._need = [body.begin], body.left
            return False
        self.served += 1
        self._transport.set_protocol(Sips(connection, self._transport))
        if not body.drop():  # the socket has lied: nobody knows where the next request begins
            self.abort()
        return True

    def bulk_received(self, nbytes: int, body: bytearray) -> None:
        """Some of a large body has arrived in its place; with the last of it the call begins."""
        self._need -= nbytes
        if self._need == 0:
            self._transport.set_protocol(Sips(cast("Connection", self), self._transport))
            if self._state == BODY:
                self._end_body(cast("Head", self._head), body)
