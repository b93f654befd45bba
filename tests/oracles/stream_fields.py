"""The fields of a stream and of a call as plain Python."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any


class StreamFields:
    __slots__ = ("connection", "context", "head", "id", "inlet", "outbox", "state", "window")

    def __init__(self, connection: Any, number: int, head: Any, state: Any) -> None:
        self.connection, self.id, self.head, self.state = connection, number, head, state
        self.context = self.inlet = self.outbox = None
        self.window = connection.client_window


class CallFields:
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
