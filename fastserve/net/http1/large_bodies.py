"""Large bodies, read by the kernel straight into their place: no pieces, no join.

A body of 600 KB in pieces costs two copies besides the kernel's own (one into a bytes object per read, one to
join them); read this way it costs none. The connection lends its socket for the rest of one body, and gets it
back at the last byte.

    connection --head of a large body--> BulkBody --its last byte--> ShortReads --a short read--> connection
                                             ^----head of a large body-----|

An endpoint with a method `take` is asked before a body that has come as a whole is read. It takes the call
and reads the body into the rows of a batch, or leaves no trace and is called with the whole body. No rows are
reserved for a slow client: the bytes are there. A body that comes after its head is awaited for that as a
whole: the kernel wakes the loop once, when the last byte is there.

    connection --head of a large body, and nothing behind it--> AwaitedBody --all has come--> connection

    body = find_arrived(transport, pieces, need)      None: some of it is still on its way
    body.read_into([memory])                          all of it; False: bytes are missing after all
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from fcntl import ioctl
from termios import FIONREAD
from typing import Protocol, TypeVar, cast

from fastserve._ext.slab import blank_bytes, grow_bytes
from fastserve.net.callback_guard import guarded

_NUMBER = bytes(4)  # what FIONREAD answers


class ArrivedBody:
    """A body that is complete but for `left` bytes, which wait in the socket; `begin` are the others. Its
    length is that of both, before and after reading."""

    __slots__ = ("_file", "_size", "begin", "left")

    def __init__(self, file: int, begin: bytes, left: int) -> None:
        self._file, self._size = file, len(begin) + left
        self.begin, self.left = begin, left

    def __len__(self) -> int:
        return self._size

    def read_into(self, places: Sequence[memoryview], skip: int = 0) -> bool:
        """Read all but the first `skip` bytes into `places`, which have that size together. Returns False
        if bytes are missing after all; then `begin` has what there was, and the places are undefined."""
        rest = []
        for place in places:
            given = self.begin[skip : skip + len(place)]
            place[: len(given)] = given
            skip += len(given)
            rest.append(place[len(given) :])
        if skip != len(self.begin) or sum(map(len, rest)) != self.left:
            raise ValueError(f"the places for {self._size} bytes have another size")
        got = self._read(rest)
        self.left -= got
        self.begin = self.begin + b"".join(rest)[:got] if self.left else b""
        return not self.left

    def _read(self, places: Sequence[memoryview]) -> int:
        try:
            return os.readv(self._file, places)
        except OSError:  # the loop's own next read reports it
            return 0

    def drop(self) -> bool:
        """Discard bytes that were not read, so that they are not taken for a request. Returns False if
        some are missing."""
        if self.left:
            self.left -= self._read([memoryview(bytearray(self.left))])
        return not self.left


class FailingExchange(Protocol):
    """An exchange that an unexpected error ends."""

    def fail(self, error: BaseException) -> None:
        """Log the error and answer with an internal one."""


TakenExchange = TypeVar("TakenExchange", bound=FailingExchange)
Take = Callable[[TakenExchange, ArrivedBody], bool]


def find_arrived(
    transport: asyncio.Transport, pieces: Sequence[bytes | bytearray], need: int
) -> ArrivedBody | None:
    """Return the body of which `pieces` were read, if the `need` missing bytes can be read at once."""
    bare = bare_socket(transport)
    if bare is None:
        return None
    file = bare.fileno()
    there = int.from_bytes(ioctl(file, FIONREAD, _NUMBER), sys.byteorder)
    return ArrivedBody(file, b"".join(pieces), need) if there >= need else None


def wake_at(transport: asyncio.Transport, nbytes: int) -> bool:
    """Set SO_RCVLOWAT: the loop wakes when the socket has `nbytes`, or no more will come; 1 is the
    default. Returns False for a socket without the option. The kernel caps it at its receive buffer, and
    wakes then."""
    bare = bare_socket(transport)
    if bare is None:
        return False
    try:
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
    except OSError:
        return False
    return True


def bare_socket(transport: asyncio.Transport) -> socket.socket | None:
    """Return the socket below the transport; None with TLS, and for a closed one, whose descriptor may be
    another's."""
    if transport.get_extra_info("ssl_object") is not None or transport.is_closing():
        return None
    return cast("socket.socket | None", transport.get_extra_info("socket"))


def offer(take: Take[TakenExchange], call: TakenExchange, body: ArrivedBody) -> bool:
    """Offer the body to the endpoint; return whether it took the call, which is answered then, even if
    taking it failed."""
    try:
        taken = take(call, body)
        if not taken and not body.left:
            raise RuntimeError("the endpoint has read the body of a call that it does not take")
    except Exception as error:
        call.fail(error)
        return True
    return taken


SIP_BYTES = 4096  # room for a head
BULK_BYTES = 65536  # rest of a body from which the change of protocol pays
# The head alone claims a length: memory for more than this is taken as bytes arrive, as much again each time.
CLAIMED_BYTES = 16 << 20
# Bodies that are awaited as a whole; larger ones do not fit into receive buffers of the usual size.
MOST_AWAITED_BYTES = 4 << 20


class SocketOwner(Protocol):
    """The connection that lends its socket to the reader of a large body."""

    def bulk_received(self, nbytes: int, body: bytearray) -> None:
        """Some of a large body has come."""

    def callback_failed(self, error: Exception) -> None:
        """Report an exception, and end the connection."""

    def connection_lost(self, exc: Exception | None) -> None: ...

    def data_received(self, data: bytes) -> None: ...

    def eof_received(self) -> bool | None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def stop_awaiting(self) -> None:
        """Go on with what is there."""


class _SocketLoan(asyncio.BufferedProtocol):
    """Read a connection's socket for a while; all other events are passed on to the connection."""

    __slots__ = ("_connection",)

    def __init__(self, connection: SocketOwner) -> None:
        self._connection = connection

    def callback_failed(self, error: Exception) -> None:
        self._connection.callback_failed(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


class BulkBody(_SocketLoan):
    """Read the rest of one body into its buffer."""

    __slots__ = ("_at", "_body", "_error", "_total", "_view")

    def __init__(self, connection: SocketOwner, pieces: Iterable[bytes | bytearray], need: int) -> None:
        super().__init__(connection)
        self._error: Exception | None = None  # of growing: raised with the bytes that have no place
        have = b"".join(pieces)
        self._total = len(have) + need
        self._body = blank_bytes(min(self._total, len(have) + CLAIMED_BYTES))
        self._view = memoryview(self._body)
        self._at = len(have)
        self._view[: self._at] = have

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the place of the next bytes, which never goes past the end of this body."""
        try:
            if self._at == len(self._body) and self._at < self._total:
                self._view.release()
                grow_bytes(self._body, min(self._total, 2 * self._at))
                self._view = memoryview(self._body)
            return self._view[self._at :]
        except Exception as error:  # the socket must not be touched within this callback
            self._error = error
            return memoryview(bytearray(1))

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._error is not None:
                raise self._error
            self._at += nbytes
            if self._at == self._total:
                self._view.release()
            self._connection.bulk_received(nbytes, self._body)
        except Exception as error:
            self._connection.callback_failed(error)


class AwaitedBody(_SocketLoan):
    """Wait for a body of which nothing has been read. Its first bytes end the wait; the connection finds
    out whether the rest is there."""

    __slots__ = ("_buffer", "_transport")

    def __init__(self, connection: SocketOwner, transport: asyncio.Transport) -> None:
        super().__init__(connection)
        self._transport = transport
        self._buffer = bytearray(SIP_BYTES)  # what an endpoint wants to see before it takes the rest

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return the place of the first bytes."""
        return self._buffer

    @guarded
    def buffer_updated(self, nbytes: int) -> None:
        self._connection.stop_awaiting()
        self._transport.set_protocol(cast(asyncio.BaseProtocol, self._connection))
        self._connection.data_received(bytes(memoryview(self._buffer)[:nbytes]))


class ShortReads(_SocketLoan):
    """Read at most SIP_BYTES at a time after a large body. The next body is likely to be as large, and
    bytes that are read with a head are copied twice (of 600 KB 250, an eighth of a request's time). A
    read that does not fill the buffer returns the socket to the connection."""

    __slots__ = ("_buffer", "_transport")

    def __init__(self, connection: SocketOwner, transport: asyncio.Transport) -> None:
        super().__init__(connection)
        self._transport = transport
        self._buffer = bytearray(SIP_BYTES)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return the place of the next read."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if nbytes < SIP_BYTES:
                self._transport.set_protocol(cast(asyncio.BaseProtocol, self._connection))
            self._connection.data_received(bytes(memoryview(self._buffer)[:nbytes]))
        except Exception as error:
            self._connection.callback_failed(error)
