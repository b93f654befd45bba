"""Whether a client that says nothing is still there: asked by PING, and cut off when it does not answer.

TCP alone tells of a machine that was switched off, or of a path that was lost, only when something is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve._ext.http2_frames import PING, frame

if TYPE_CHECKING:
    from fastserve.wire.http2.connection import Http2Connection

ANSWER_S = 20.0  # for a client to answer, as in gRPC's own library
QUESTION = b"keepaliv"


class Keepalive:
    """One connection's. `heard`: something has come since the last look."""

    __slots__ = ("_asked_s", "_every_s", "_quiet_s", "heard")

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._quiet_s = self._asked_s = -1.0  # since when nothing has come; when it was asked
        self.heard = True

    def look(self, now: float, connection: Http2Connection) -> None:
        if self.heard:
            self.heard, self._quiet_s, self._asked_s = False, now, -1.0
        elif self._asked_s >= 0:
            if now - self._asked_s >= ANSWER_S:
                connection.listener.count_refusal("keepalive")
                connection.abort()
        elif now - self._quiet_s >= self._every_s:
            self._asked_s = now
            connection.write(frame(PING, 0, 0, QUESTION))
