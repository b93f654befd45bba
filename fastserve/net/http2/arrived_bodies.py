"""Large bodies over HTTP/2 whose rest waits in the socket, for endpoints that read it into a batch's rows.

    connection --a read has ended within a large body--> FIONREAD: is all of it there?
        yes: ArrivedFrames --BodyTaker.take_arrived--> the endpoint: reserve rows, read into them, submit
        no: SO_RCVLOWAT, the loop wakes when it is, or after WAIT_S; then reads go on as ever

As over HTTP/1.1 (`net/http1/large_bodies.py`) the endpoint gets an ArrivedBody, and reads it in the call
that has reserved the rows: no row waits for a client. Between the payloads lie the heads of DATA frames.
Where they lie is guessed: clients fill frames up to SETTINGS_MAX_FRAME_SIZE and end the stream with the last
one. One `readv` puts payloads into the rows and heads beside them (`FrameReader.receive`), and then heads are
looked at:

    all as expected        the request is complete
    another from one on    bytes before it are body, those from it on are `odd`, the next input of the
                           connection; the rows are given back, the body goes the usual way, and so do the
                           connection's next SKIPPED_BODIES
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from operator import methodcaller
from typing import Protocol

from fastserve.net.callback_guard import Guarded, report
from fastserve.net.http1.large_bodies import ArrivedBody
from fastserve.net.http2.stream import Http2Stream
from fastserve.util.rate_limited_log import run_all

SKIPPED_BODIES = 16  # that are not offered, after one whose frames were not as expected: it cost two copies

WAIT_S = 0.005  # for the rest of a body, up to twice that: a stream begun behind it waits so long, at most


class AwaitingConnection(Guarded, Protocol):
    """A connection whose reads wait for the rest of a body."""

    def give_up_awaiting(self) -> None:
        """Read what there is."""


class BodyWaits:
    """The connections of a listener that wait for the rest of a body. One timer ends their waits."""

    __slots__ = ("_new", "_old", "_timer")

    def __init__(self) -> None:
        self._new: dict[AwaitingConnection, None] = {}  # since the timer was set
        self._old: dict[AwaitingConnection, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def add(self, connection: AwaitingConnection) -> None:
        """Let a connection wait."""
        self._new[connection] = None
        if self._timer is None:
            self._set_timer()

    def remove(self, connection: AwaitingConnection) -> None:
        """End a wait."""
        self._new.pop(connection, None)
        self._old.pop(connection, None)

    def close(self) -> None:
        """Cancel the timer; no connection is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WAIT_S, self._look)

    def _look(self) -> None:
        """End waits that were there at the look before."""
        self._timer = None
        late, self._old, self._new = self._old, self._new, {}
        run_all(list(late), methodcaller("give_up_awaiting"), report)
        if self._old:
            self._set_timer()


class FrameSource(Protocol):
    """The connection that a body is read from."""

    def receive(self, file: int, stream: Http2Stream, places: list[memoryview]) -> tuple[int, bytes]:
        """Read the rest of a body; return how many bytes lie in place, and the odd ones behind them."""


class ArrivedFrames(ArrivedBody):
    """A body whose missing bytes wait in the socket as DATA frames of one stream."""

    __slots__ = ("_connection", "_stream", "odd")

    def __init__(
        self, file: int, begin: bytes, left: int, connection: FrameSource, stream: Http2Stream
    ) -> None:
        super().__init__(file, begin, left)
        self._connection, self._stream = connection, stream
        self.odd = b""

    def _read(self, places: Sequence[memoryview]) -> int:
        got, self.odd = self._connection.receive(self._file, self._stream, list(places))
        return got
