"""A reply in pieces: chunked for HTTP/1.1, until close for HTTP/1.0. Flow-controlled, in order.

`write` returns when the piece is handed to the socket's buffer and that buffer is below its high water
mark; a client that stops reading stops its writer, and limits.write_stall_s ends both.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastserve._ext.stream_path import StreamPath

if TYPE_CHECKING:
    from fastserve.wire.call import Call
    from fastserve.wire.connection import Connection


class Turns:
    """Streams of one connection that wait to write: for replies before them, or for a client that reads."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Until the next `wake`."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def wake(self) -> None:
        """Everybody looks again whether it is their turn."""
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)


class Stream(StreamPath):
    """Made by Call.stream. Ends with close(); a stream that is dropped cuts the connection off, so that
    the client can tell a whole reply from a broken one. `sent_bytes` are those of its body."""

    __slots__ = ("_closes", "_status", "_turns")

    def __init__(
        self, call: Call, connection: Connection, turns: Turns, status: int, head: bytes, closes: bool
    ) -> None:
        super().__init__(call, connection, head, not call.head.http_1_0, call.head.bodiless)
        self._turns = turns
        self._status = status
        self._closes = closes

    def ahead(self) -> bytes | None:
        """What may be sent ahead of the next piece without changing the reply: the next chunk's size may
        begin with a zero (RFC 9112 7.1). None while nothing is sent."""
        if self._head:
            return None
        return b"0" if self._chunked and not self._silent else b""

    async def write(self, data: bytes) -> None:
        """Send one piece. Raises ConnectionResetError when the client has gone, RuntimeError when closed."""
        if self._closed:
            raise RuntimeError("the stream is closed")
        await self._wait_turn()
        self.send(data)

    async def wait(self) -> None:
        """Until `ready`. Raises ConnectionResetError when the client has gone."""
        await self._wait_turn()

    async def close(self) -> None:
        """End the reply. Does nothing the second time or when the client has gone."""
        if self._closed:
            return
        self._closed = True
        if self._call.gone:
            return
        try:
            await self._wait_turn()
        except ConnectionResetError:
            return
        self._log()
        self._send_end()

    def give_up(self) -> None:
        """The endpoint ended without close(): cut the reply off."""
        if not self._closed and not self._call.gone:
            self._closed = True
            self._log()
            self._cut()

    def leave(self) -> None:
        """The client is gone."""
        if not self._closed:
            self._log()

    async def _wait_turn(self) -> None:
        while not self._call.gone and not self._may_send():
            await self._turns.wait()
        if self._call.gone:
            raise ConnectionResetError("the client has gone")

    def _log(self) -> None:
        access_log = self._connection.listener.access_log
        if access_log is not None:
            access_log(self._call, self._status, self.sent_bytes)

    # ---- how HTTP/1.1 does it; its pieces are StreamPath's

    def _send_end(self) -> None:
        end = b"0\r\n\r\n" if self._chunked and not self._silent else b""
        head, self._head = self._head, b""
        self._connection.finish(self._call, head + end, b"", self._closes)

    def _cut(self) -> None:
        self._connection.abort()
