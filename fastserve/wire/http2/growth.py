"""Windows of streams that grow beyond STREAM_WINDOW for large bodies: bounded, oldest first.

Everything a client may send without being asked again is memory it can make the server hold. So growth
comes out of one budget of the connection; who finds it spent waits until somebody's body is complete, or one
message of a stream of them is done with: what was had for that is not given again, and the next one asks
anew. Who has grown for longest always grows, however much it asks for and however often (a body whose length
is not told asks again and again): of any number of bodies one can be completed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastserve.wire.http2.stream import Stream

GROWTH_BYTES = 32 << 20


class Growth:
    """One connection's."""

    __slots__ = ("_grown", "_out", "_waiting")

    def __init__(self) -> None:
        self._out = 0
        self._grown: dict[Stream, None] | None = None  # who has some of it, the oldest first
        self._waiting: dict[Stream, int] | None = None  # what each wants in all

    def ask(self, stream: Stream, nbytes: int) -> None:
        """Let this stream have so many bytes beyond its window in all, now or later."""
        inlet = stream.inlet
        if inlet is None or nbytes <= inlet.grown:
            return
        more = nbytes - inlet.grown
        if self._grown is None or self._waiting is None:
            self._grown, self._waiting = {}, {}
        oldest = next(iter(self._grown), stream)
        if oldest is not stream and self._out + more > GROWTH_BYTES:
            self._waiting[stream] = nbytes
            return
        self._waiting.pop(stream, None)
        self._grown[stream] = None
        self._out += more
        inlet.grown = nbytes
        stream.connection.widen(stream, more)

    def release(self, stream: Stream) -> None:
        """The stream's body is complete, or dropped."""
        if self._waiting is not None and stream.inlet is not None:
            self._waiting.pop(stream, None)
            self.shrink(stream, stream.inlet.grown)

    def shrink(self, stream: Stream, nbytes: int) -> None:
        """So much of what this stream has was used, and is not given to it again."""
        inlet = stream.inlet
        if self._grown is None or self._waiting is None or inlet is None or not nbytes:
            return
        self._out -= nbytes
        inlet.grown -= nbytes
        if not inlet.grown:
            del self._grown[stream]
        for other, nbytes in list(self._waiting.items()):
            self.ask(other, nbytes)
