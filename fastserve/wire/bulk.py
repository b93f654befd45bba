"""Large bodies, read by the kernel straight into their place: no pieces, no join.

A body of 600 KB in pieces costs two copies besides the kernel's own (one into a bytes object per read,
one to join them); read this way it costs none. The connection hands its socket over for the rest of
one body and takes it back at the last byte.

    Connection --head of a large body--> BulkBody --its last byte--> Sips --a short read--> Connection
                                             ^----head of a large body--|

Of a body that has come as a whole even the place may be another's: see arrived.py. One that comes apart from
its head is awaited for that, as a whole: the kernel wakes the loop once, when the last byte is there, and
nothing is kept for it meanwhile but what the kernel keeps.

    Connection --head of a large body, and nothing behind it--> AwaitedBody --all has come--> Connection
"""

from __future__ import annotations

import asyncio
from asyncio import get_running_loop
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from fastserve._ext.slab import blank_bytes, grow_bytes
from fastserve.wire.arrived import find_arrived, offer, wake_at
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
# Bodies that are awaited as a whole; larger ones do not fit into receive buffers of the usual size.
MOST_AWAITED_BYTES = 4 << 20


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


class AwaitedBody(_Borrowed):
    """A body of which nothing has been read. Its beginning ends the wait, however that came about: the
    connection finds out whether the rest is there."""

    __slots__ = ("_buffer", "_transport")

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        super().__init__(connection)
        self._transport = transport
        self._buffer = bytearray(SIP_BYTES)  # what an endpoint wants to see before it takes the rest

    def get_buffer(self, sizehint: int) -> bytearray:
        """Where the beginning goes."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.stop_awaiting()
        self._transport.set_protocol(self._connection)
        self._connection.data_received(bytes(memoryview(self._buffer)[:nbytes]))


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

    __slots__ = (
        "_awaited", "_awaits", "_current", "_head", "_need", "_paused", "_pieces", "_state", "_transport",
        "served",
    )  # fmt: skip
    _awaited: bool  # the kernel has been asked to wait for the rest of a body
    _awaits: bool  # it may be
    _current: Call | None
    _head: Head | None
    _need: int
    _paused: bool
    _pieces: list[bytes | bytearray]
    _state: int
    _transport: asyncio.Transport
    served: int

    def abort(self) -> None:
        raise NotImplementedError

    def _end_body(self, head: Head, body: bytes | bytearray) -> None:
        raise NotImplementedError

    def begin_bulk(self, head: Head, available: int) -> None:
        """A large body is to come, of which so many bytes have been read with its head."""
        self._awaits = SIP_BYTES < self._need <= MOST_AWAITED_BYTES
        if not available:
            self._await_bulk(head)

    def _await_bulk(self, head: Head) -> bool:
        """Hear of the rest of the body when all of it can be taken at once; False: it is not to be awaited,
        or was before."""
        if not (self._awaits and self._may_take(head) and wake_at(self._transport, self._need)):
            return False
        self._awaits, self._awaited = False, True
        self._transport.set_protocol(AwaitedBody(cast("Connection", self), self._transport))
        return True

    def _pause_for_turn(self) -> None:
        """Who has just read may read on in the same turn of the loop, without having waited."""
        self._transport.pause_reading()
        get_running_loop().call_soon(self._end_pause)

    def _end_pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def stop_awaiting(self) -> None:
        """Go on with what is there, and with what comes as it comes. Also after a second or less of waiting:
        how fast its client sends is to be seen."""
        if self._awaited:
            self._awaited = False
            wake_at(self._transport, 1)

    def _may_take(self, head: Head) -> bool:
        """Whether the endpoint is to be asked to read the body out of the socket itself."""
        return self._current is None and head.mode != CLOSE and hasattr(head.endpoint, "take")

    def _take_bulk(self, head: Head) -> None:
        """The body of `head` has begun, and much of it is missing."""
        if self._take_arrived(head):
            self._pieces = []
        elif self._await_bulk(head):
            self._pause_for_turn()
        else:
            self._transport.set_protocol(BulkBody(cast("Connection", self), self._pieces, self._need))
            self._pieces = []

    def _take_arrived(self, head: Head) -> bool:
        """Begin its call, if all of it has come and the endpoint reads it out of the socket itself."""
        body = find_arrived(self._transport, self._pieces, self._need) if self._may_take(head) else None
        if body is None:
            return False
        connection = cast("Connection", self)
        call = self._current = Call(connection, head, cast(bytes, body))  # of which only the length is asked
        self._state = HEAD
        if not offer(head.endpoint.take, call, body):  # type: ignore[attr-defined]
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
