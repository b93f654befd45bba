"""Who has sent more than a turn of the event loop has time for: it waits its turn, and is not read meanwhile.

    a read of 256 KiB --what a turn takes of a connection--> the rest is kept --the next turn--> as much more

Ten thousand requests and thirty thousand frames fit into one read. Whoever else has sent something is served
between any two turns of theirs. Connections that are behind share a turn: what many clients cost in it is
what one does, as long as little is kept for them. How much a turn takes is the protocol's to say.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from fastserve.each import each

KEPT_BYTES = 1 << 20  # for each of these one connection more goes on in a turn


class Waiting(Protocol):
    """A connection."""

    def catch_up(self) -> None:
        """Go on with what is kept, one turn more; it may join again."""

    def abort(self) -> None:
        """Cut it: it cannot go on."""


class Row:
    """The connections of a listener that are behind, in the order in which they go on."""

    def __init__(self) -> None:
        self._row: deque[tuple[Waiting, int]] = deque()
        self._kept = 0
        self.loop: asyncio.AbstractEventLoop | None = None  # of an open listener: turns come by themselves

    def __len__(self) -> int:
        return len(self._row)

    def join(self, connection: Waiting, kept: int) -> None:
        """Go on in a turn to come; so many bytes are kept until then."""
        if self.loop is not None and not self._row:
            self.loop.call_soon(self.turn)
        self._row.append((connection, kept))
        self._kept += kept

    def turn(self) -> None:
        """As many as go on in one turn of the loop."""
        count = min(len(self._row), 1 + self._kept // KEPT_BYTES)
        some = [self._row.popleft() for _ in range(count)]
        self._kept -= sum(kept for _, kept in some)
        if self._row and self.loop is not None:  # else who joins first asks for a turn
            self.loop.call_soon(self.turn)
        each((connection for connection, _ in some), _catch_up, _abort)


def _catch_up(connection: Waiting) -> None:
    connection.catch_up()


def _abort(connection: Waiting) -> None:
    connection.abort()
