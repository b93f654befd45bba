"""Large bodies, read by the kernel straight into their place: no pieces, no join.

A body of 600 KB in pieces costs two copies besides the kernel's own (one into a bytes object per read,
one to join them); read this way it costs none. The connection hands its socket over for the rest of
one body and takes it back at the last byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastserve._ext.slab import blank_bytes

if TYPE_CHECKING:
    from fastserve.wire.connection import Connection

BULK_BYTES = 65536  # rest of a body from which the change of protocol pays
# The head alone claims a length: memory for more than this is only taken as bytes arrive.
CLAIMED_BYTES = 16 << 20


class BulkBody(asyncio.BufferedProtocol):
    """The rest of one body. Every event but its bytes is the connection's."""

    __slots__ = ("_at", "_body", "_connection", "_view")

    def __init__(self, connection: Connection, pieces: Iterable[bytes | bytearray], need: int) -> None:
        self._connection = connection
        have = b"".join(pieces)
        self._body = blank_bytes(len(have) + need)
        self._view = memoryview(self._body)
        self._at = len(have)
        self._view[: self._at] = have

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: never past the end of this body."""
        return self._view[self._at :]

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        if self._at == len(self._body):
            self._view.release()
        self._connection.bulk_received(nbytes, self._body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
