"""The life of a stream as a table (RFC 9113 5.1), as far as a server without push goes through it.

The connection's streams are those that are neither IDLE nor CLOSED; a number above the last one that was
begun is IDLE, any other is CLOSED. docs/wire-http2.md draws its picture from TRANSITIONS.
"""

from __future__ import annotations

from enum import Enum, auto


class State(Enum):
    """What a stream is for both sides."""

    IDLE = auto()
    OPEN = auto()
    HALF_CLOSED_REMOTE = auto()  # the request is complete
    HALF_CLOSED_LOCAL = auto()  # the reply is complete, the request is not
    CLOSED = auto()


class Event(Enum):
    """What moves one. Frames that move none, such as DATA without END_STREAM, are not here."""

    HEADERS = auto()  # received, without END_STREAM
    WHOLE = auto()  # HEADERS received with END_STREAM, or at once with the only DATA
    RECEIVED_END = auto()
    SENT_END = auto()
    RESET = auto()  # by either side


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.IDLE, Event.HEADERS): State.OPEN,
    (State.IDLE, Event.WHOLE): State.HALF_CLOSED_REMOTE,
    (State.OPEN, Event.RECEIVED_END): State.HALF_CLOSED_REMOTE,
    (State.OPEN, Event.SENT_END): State.HALF_CLOSED_LOCAL,
    (State.OPEN, Event.RESET): State.CLOSED,
    (State.HALF_CLOSED_REMOTE, Event.SENT_END): State.CLOSED,
    (State.HALF_CLOSED_REMOTE, Event.RESET): State.CLOSED,
    (State.HALF_CLOSED_LOCAL, Event.RECEIVED_END): State.CLOSED,
    (State.HALF_CLOSED_LOCAL, Event.RESET): State.CLOSED,
}
# What may still come from the client: DATA, trailers. Elsewhere they are STREAM_CLOSED.
RECEIVING = frozenset((State.OPEN, State.HALF_CLOSED_LOCAL))
