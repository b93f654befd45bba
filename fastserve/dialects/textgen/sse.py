"""A reply of server-sent events, for all APIs of this dialect.

    async with EventStream(call, options.keepalive_s) as out:
        await out.write(b"data: {}\\n\\n")

Left without `close`, it is cut off, so that no client takes half an answer for a whole one. Where nothing
came for a while it may have a comment, which parsers of events drop, so that proxies keep the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from time import monotonic_ns
from types import TracebackType

from fastserve.serving.text import Ending, Frames, TextStream, Token, pour
from fastserve.wire.call import Call
from fastserve.wire.stream import Stream

EVENTS = b"text/event-stream"
COMMENT = b": keep-alive\n\n"
HEADERS = ((b"Cache-Control", b"no-cache"), (b"X-Accel-Buffering", b"no"))


class EventStream:
    """One reply. It begins, with its status, when something is first written: until then the call may be
    refused."""

    def __init__(
        self,
        call: Call,
        keepalive_s: float = 0.0,
        content_type: bytes = EVENTS,
        headers: tuple[tuple[bytes, bytes], ...] = HEADERS,
    ) -> None:
        self._call, self._content_type, self._headers = call, content_type, headers
        self._stream: Stream | None = None
        self._every = keepalive_s
        self._wrote_ns = monotonic_ns()
        self._poured: list[TextStream] = []
        self._beat: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EventStream:
        if self._every:
            self._beat = asyncio.get_running_loop().create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._beat is not None:
            self._beat.cancel()

    @property
    def begun(self) -> bool:
        """Whether a status has been sent."""
        return self._stream is not None

    def _begin(self) -> Stream:
        if self._stream is None:
            self._stream = self._call.stream(200, self._content_type, self._headers)
        return self._stream

    async def write(self, data: bytes) -> None:
        """One or several whole events. Raises ConnectionResetError when the client has gone."""
        self._wrote_ns = monotonic_ns()
        await self._begin().write(data)

    async def pour(
        self, stream: TextStream, write: Callable[[list[Token]], bytes], frames: Frames | None = None
    ) -> Ending:
        """What comes of a sequence, by `write`, without a turn of the loop for each token; its ending is left
        to the caller. Raises as `write` does, of this and of its own. `frames`: as of serving.text.pour."""
        self._poured.append(stream)
        return await pour(stream, self._begin(), write, frames)

    async def close(self) -> None:
        """It is whole."""
        await self._begin().close()

    async def _keep_alive(self) -> None:
        with contextlib.suppress(ConnectionResetError, RuntimeError):  # gone, or closed meanwhile
            while True:
                last_ns = max([self._wrote_ns, *[stream.heard_ns for stream in self._poured]])
                left = self._every - (monotonic_ns() - last_ns) / 1e9
                if left <= 0:
                    await self.write(COMMENT)
                else:
                    await asyncio.sleep(left)
