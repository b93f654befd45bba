"""What a client has sent beyond what one turn of the event loop takes of its connection: 256 frames, or as
many as cost calm.A_TURN points. fastserve.wire.row says whose turn it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastserve.wire.http2.retract import Event


class Behind:
    """Of one connection: frames that were read, and then bytes."""

    __slots__ = ("data", "events")

    def __init__(self, events: list[Event], data: bytes | memoryview) -> None:
        self.events = [_own(event) for event in events]
        self.data = memoryview(data)

    def __len__(self) -> int:
        return len(self.data)

    def add(self, scratch: bytearray, nbytes: int) -> None:
        """Bytes more."""
        self.data = memoryview(bytes(self.data) + scratch[:nbytes])


def _own(event: Event) -> Event:
    """With a payload that does not lie in what is read into next."""
    kind, flags, number, payload, value = event
    return (kind, flags, number, bytes(payload), value) if isinstance(payload, memoryview) else event
