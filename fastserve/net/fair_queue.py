"""Fair turns of the event loop for connections and streams that have sent more than one turn takes.

    a read of 256 KiB --one turn's share--> the rest is the backlog --the next turn--> another share

Ten thousand requests, or thirty thousand frames, fit into one read. A connection with a backlog is not read,
and all other clients are served between two of its turns. Connections with a backlog share a turn: many
clients cost as much of it as one, while little is kept for them. The protocol decides how much one turn
takes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic
from typing import Protocol

from fastserve.net.callback_guard import report
from fastserve.util.rate_limited_log import run_all

KEPT_BYTES = 1 << 20  # for each of these one connection more goes on in a turn
SHARE_S = 0.002  # of a turn, for the messages of streams
AT_ONCE = 8  # streams that go on in one turn, as far as its time goes


class QueuedConnection(Protocol):
    """A connection with input for more than one turn of the loop."""

    def catch_up(self) -> None:
        """Go on with the input that was kept, for one turn; the connection may join again."""

    def callback_failed(self, error: Exception) -> None:
        """End the connection after an exception in its turn."""


class FairQueue:
    """Give turns of the event loop to the connections of a listener that have a backlog, first in first
    out."""

    def __init__(self) -> None:
        self._row: deque[tuple[QueuedConnection, int]] = deque()
        self._kept = 0
        self.loop: asyncio.AbstractEventLoop | None = None  # of an open listener: turns come by themselves

    def __len__(self) -> int:
        return len(self._row)

    def join(self, connection: QueuedConnection, kept: int) -> None:
        """Queue the connection, which keeps `kept` bytes meanwhile."""
        if self.loop is not None and not self._row:
            self.loop.call_soon(self.turn)
        self._row.append((connection, kept))
        self._kept += kept

    def turn(self) -> None:
        """Let as many connections go on as fit into one turn of the loop."""
        count = min(len(self._row), 1 + self._kept // KEPT_BYTES)
        some = [self._row.popleft() for _ in range(count)]
        self._kept -= sum(kept for _, kept in some)
        if self._row and self.loop is not None:  # else the first to join asks for a turn
            self.loop.call_soon(self.turn)
        run_all((connection for connection, _ in some), _catch_up, report)


class TimeShare:
    """Bound the time that all streams of a listener take of one turn of the event loop. A stream asks before
    each message; once the time is spent it waits for a later turn, first in first out.

        if share.spent():
            await share.turn()
    """

    __slots__ = ("_ends_s", "_row")

    def __init__(self) -> None:
        self._ends_s = 0.0  # 0: no time of this turn is taken
        self._row: deque[asyncio.Future[None]] = deque()

    def spent(self) -> bool:
        """Return whether this turn of the loop has no time left."""
        if self._ends_s:
            return monotonic() >= self._ends_s
        self._begin()
        return False

    def _begin(self) -> None:
        self._ends_s = monotonic() + SHARE_S
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Start the next share, and wake the first streams that wait."""
        self._ends_s = 0.0
        if self._row:
            for _ in range(min(len(self._row), AT_ONCE)):
                waiting = self._row.popleft()
                if not waiting.done():
                    waiting.set_result(None)
            self._begin()

    async def turn(self) -> None:
        """Wait for a turn of the loop that has time left."""
        waiting = asyncio.get_running_loop().create_future()
        self._row.append(waiting)
        await waiting
        while self.spent():  # others went on before in the same turn
            waiting = asyncio.get_running_loop().create_future()
            self._row.appendleft(waiting)
            await waiting


def _catch_up(connection: QueuedConnection) -> None:
    connection.catch_up()
