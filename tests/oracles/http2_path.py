"""The compiled part of a request's way over HTTP/2, in plain Python: the fields of streams and calls, the
decisions of the way in and out, and the frames of an answer."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from time import monotonic_ns
from typing import Any

from hyperframe.frame import DataFrame, HeadersFrame

MOST_AT_ONCE = 16384


class StreamFields:
    __slots__ = ("connection", "context", "head", "id", "inlet", "outbox", "state", "window")

    def __init__(self, connection: Any, number: int, head: Any, state: Any) -> None:
        self.connection, self.id, self.head, self.state = connection, number, head, state
        self.context = self.inlet = self.outbox = None
        self.window = connection.client_window


class CallPath:
    __slots__ = (
        "begun", "coding", "deadline_ns", "head", "on_gone", "over", "received_ns", "sent_bytes", "stream",
        "trailing", "writable",
    )  # fmt: skip

    def __init__(self, head: Any, stream: Any) -> None:
        self.head, self.stream = head, stream
        self.received_ns = now = monotonic_ns()
        self.deadline_ns = now + head.timeout_ns if head.timeout_ns >= 0 else 0
        self.on_gone = self.writable = None
        self.over = self.begun = False
        self.sent_bytes, self.coding, self.trailing = 0, b"", ()


def goes_short(number: int, body: bytes, head: Any, at: Mapping[str, int], streams: int) -> str:
    """Decide on a whole request: "answer", "anew" or "length"."""
    known = head is not None and number == at["last"] + 2 and number <= at["stop"]
    if not known or streams >= at["most"] or at["queued"] > at["most_queued"]:
        return "anew"
    return "answer" if head.body_bytes in (len(body), -1) else "length"


def fits(size: int, blocks: int, stream: int, connection: int, *, waits: bool) -> bool:
    """Whether a reply of `size` bytes and `blocks` of header blocks goes at once."""
    return size <= min(stream, connection) and not waits and size + blocks <= MOST_AT_ONCE


def answer_frames(stream: int, block: bytes, message: bytes, trailers: bytes) -> bytes:
    body = struct.pack(">BI", 0, len(message)) + message
    frames = (
        HeadersFrame(stream, data=block, flags=["END_HEADERS"]),
        DataFrame(stream, data=body),
        HeadersFrame(stream, data=trailers, flags=["END_HEADERS", "END_STREAM"]),
    )
    return b"".join(frame.serialize() for frame in frames)
