"""How long a connection lives: whether a client that says nothing is there, and when it has lived enough.

TCP alone tells of a machine that was switched off, or of a path that was lost, only when something is sent: a
quiet client is asked by PING, and cut off when it does not answer. An old connection is ended so that its
client looks for a server anew, where a load balancer chooses once for a connection: it is told by GOAWAY,
streams under way are finished, and what is left after a grace is cut off. The words are gRPC's.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from fastserve._ext.http2_frames import PING, frame

if TYPE_CHECKING:
    from fastserve.wire.http2.connection import Http2Connection

PATIENCE_S = 2.0  # that a connection which is to end waits for a moment without streams
ANSWER_S = 20.0  # for a client to answer a PING, as in gRPC's own library
SPREAD = 0.1  # of the age, either way: connections that began together do not all come back together
QUESTION = b"keepaliv"
DRAIN = b"draining"  # the PING whose answer says that a client has heard of the end
# For who has sent its last byte: a socket that is closed answers it with a reset.
ANYBODY = frame(PING, 0, 0, b"anybody?")


class Lifetimes(NamedTuple):
    """Seconds, 0 for no end. Those of a listener."""

    keepalive_s: float = 0.0
    keepalive_timeout_s: float = ANSWER_S
    max_age_s: float = 0.0
    max_age_grace_s: float = 0.0


class Lifetime:
    """One connection's. `heard`: something has come since the last look."""

    __slots__ = ("_age_s", "_asked_s", "_born_s", "_quiet_s", "_terms", "heard")

    def __init__(self, terms: Lifetimes) -> None:
        self._terms = terms
        self._age_s = terms.max_age_s * random.uniform(1 - SPREAD, 1 + SPREAD)
        # When it was first looked at; since when nothing has come; when it was asked.
        self._born_s = self._quiet_s = self._asked_s = -1.0
        self.heard = True

    def look(self, now: float, connection: Http2Connection) -> bool:
        """Ask, or cut off; whether it is to end."""
        if self._born_s < 0:
            self._born_s = now
        if self._terms.keepalive_s:
            self._ask(now, connection)
        if not self._age_s or now - self._born_s < self._age_s:
            return False
        grace_s = self._terms.max_age_grace_s
        if grace_s and now - self._born_s >= self._age_s + grace_s:
            connection.listener.count_refusal("max_connection_age_grace_s")
            connection.abort()
        return True

    def _ask(self, now: float, connection: Http2Connection) -> None:
        if self.heard:
            self.heard, self._quiet_s, self._asked_s = False, now, -1.0
        elif self._asked_s >= 0:
            if now - self._asked_s >= self._terms.keepalive_timeout_s:
                connection.listener.count_refusal("keepalive")
                connection.abort()
        elif now - self._quiet_s >= self._terms.keepalive_s:
            self._asked_s = now
            connection.write(frame(PING, 0, 0, QUESTION))
