"""Windows of streams that grow beyond STREAM_WINDOW for large bodies: bounded, oldest first.

Everything a client may send without being asked again is memory it can make the server hold. So growth comes
out of one budget of the connection; who finds it spent waits until somebody's body is complete. The first
always grows, however much it asks for: of any number of bodies one can be completed.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastserve.wire.http2.stream import Stream

GROWTH_BYTES = 32 << 20


class Growth:
    """One connection's."""

    __slots__ = ("_out", "_waiting")

    def __init__(self) -> None:
        self._out = 0
        self._waiting: deque[tuple[Stream, int]] | None = None

    def ask(self, stream: Stream, nbytes: int) -> None:
        """Let this stream have so many bytes beyond its window in all, now or later."""
        inlet = stream.inlet
        if inlet is None or nbytes <= inlet.grown:
            return
        more = nbytes - inlet.grown
        if self._out and self._out + more > GROWTH_BYTES:
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.append((stream, nbytes))
            return
        self._out += more
        inlet.grown = nbytes
        stream.connection.widen(stream, more)

    def release(self, stream: Stream) -> None:
        """The stream's body is complete, or dropped."""
        if stream.inlet is None or not stream.inlet.grown:
            return
        self._out -= stream.inlet.grown
        stream.inlet.grown = 0
        waiting, self._waiting = self._waiting, None
        while waiting:
            other, nbytes = waiting.popleft()
            if not other.complete:
                self.ask(other, nbytes)
