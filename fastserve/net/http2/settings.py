"""SETTINGS (RFC 9113 6.5) of both sides, and the lifetime of a connection: keepalive and greatest age."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from fastserve._ext.http2_frames import PING, frame
from fastserve.net.http2 import abuse_budget
from fastserve.net.http2.stream import STREAM_WINDOW, ConnectionFault, ErrorCode

PREFACE = b"PRI * HTTP/2.0\r\n\r\n"  # distinguishes HTTP/1.1; the rest of the preface is for the reader
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 1, 2, 3, 4
MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE, NO_RFC7540_PRIORITIES = 5, 6, 9
MOST_WINDOW = (1 << 31) - 1
FIRST_WINDOW = 65535  # of a connection, and of its streams until SETTINGS say otherwise
LEAST_FRAME_BYTES = 16384
CONNECTION_WINDOW = 16 << 20
FRAME_BYTES = 16384  # longest frame taken; longer ones would only keep a client's other streams waiting
# A block is read to its end even when what it says is too large: then its request alone is refused.
BLOCK_BYTES = 65536
CONTINUATIONS = 16  # of one header block; a frame of it has room for 16 KiB
_PAIR = struct.Struct(">HI")


def write_settings(streams: int, header_list_bytes: int) -> bytes:
    """Return the payload of the server's SETTINGS."""
    pairs = (
        (MAX_CONCURRENT_STREAMS, streams),
        (INITIAL_WINDOW_SIZE, STREAM_WINDOW),
        (MAX_FRAME_SIZE, FRAME_BYTES),
        (MAX_HEADER_LIST_SIZE, header_list_bytes),
        (NO_RFC7540_PRIORITIES, 1),
    )
    return b"".join(_PAIR.pack(*pair) for pair in pairs)


def cost(payload: bytes) -> int:
    """Return the points of a SETTINGS frame: more where it has more pairs than there are settings."""
    return abuse_budget.SETTINGS + len(payload) // (_PAIR.size * abuse_budget.SETTINGS_PAIRS)


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Yield the checked pairs of a client's SETTINGS. Raises ConnectionFault."""
    for name, value in _PAIR.iter_unpack(payload):
        if name in (ENABLE_PUSH, NO_RFC7540_PRIORITIES) and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"setting {name} is neither 0 nor 1")
        if name == INITIAL_WINDOW_SIZE and value > MOST_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE above 2^31-1")
        if name == MAX_FRAME_SIZE and not LEAST_FRAME_BYTES <= value < 1 << 24:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE out of its bounds")
        yield name, value


PATIENCE_S = 2.0  # that a connection which is to end waits for a moment without streams
ANSWER_S = 20.0  # for a client to answer a PING, as in gRPC's own library
SPREAD = 0.1  # of the age, either way: connections that began together do not all come back together
QUESTION = b"keepaliv"
DRAIN = b"draining"  # the answer to this PING says that the client has read GOAWAY
# Sent to a client that has sent FIN: a closed socket answers it with a reset.
ANYBODY = frame(PING, 0, 0, b"anybody?")


class Lifetimes(NamedTuple):
    """The keepalive and greatest age of a listener's connections, in seconds; 0 for none."""

    keepalive_s: float = 0.0
    keepalive_timeout_s: float = ANSWER_S
    max_age_s: float = 0.0
    max_age_grace_s: float = 0.0


class AgingConnection(Protocol):
    """The part of a connection that its lifetime uses."""

    def write(self, data: bytes) -> None:
        """Send a frame."""

    def cut(self, cause: str) -> None:
        """Count the end under `cause`, and abort."""


class Lifetime:
    """Keep one connection alive by PING, and end it at its greatest age. `active` is whether something has
    come since the last look.

    TCP notices a machine that was switched off only when something is sent, so a quiet client gets a
    PING, and is cut off without an answer. An old connection gets GOAWAY, so that its client connects
    through a load balancer anew; its streams may finish within a grace. The terms are gRPC's."""

    __slots__ = ("_age_s", "_asked_s", "_born_s", "_quiet_s", "_terms", "active")

    def __init__(self, terms: Lifetimes) -> None:
        self._terms = terms
        self._age_s = terms.max_age_s * random.uniform(1 - SPREAD, 1 + SPREAD)
        # When it was first looked at; since when nothing has come; when it was asked.
        self._born_s = self._quiet_s = self._asked_s = -1.0
        self.active = True

    def look(self, now: float, connection: AgingConnection) -> bool:
        """Send a PING or cut the connection off where it is time; return whether the connection is to end."""
        if self._born_s < 0:
            self._born_s = now
        if self._terms.keepalive_s:
            self._ask(now, connection)
        if not self._age_s or now - self._born_s < self._age_s:
            return False
        grace_s = self._terms.max_age_grace_s
        if grace_s and now - self._born_s >= self._age_s + grace_s:
            connection.cut("max_connection_age_grace_s")
        return True

    def _ask(self, now: float, connection: AgingConnection) -> None:
        if self.active:
            self.active, self._quiet_s, self._asked_s = False, now, -1.0
        elif self._asked_s >= 0:
            if now - self._asked_s >= self._terms.keepalive_timeout_s:
                connection.cut("keepalive")
        elif now - self._quiet_s >= self._terms.keepalive_s:
            self._asked_s = now
            connection.write(frame(PING, 0, 0, QUESTION))
