"""Streamed replies: server-sent events, or other pieces that an API sends one after the other.

    async with EventStream(call, options.keepalive_s) as out:
        await out.write(b"data: {}\\n\\n")

    await send_events(service, call, name, send, tell)          send(out) writes all events

Nothing is sent before the first event: errors until then are refused with a status by the caller. A later
error is one more event, made by `tell`, and ends the reply. A stream left without `close` is cut off, so
that no client takes half an answer for a whole one. After a while without events a comment is sent, which
parsers drop, so that proxies keep the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from time import monotonic_ns
from types import TracebackType

from fastserve.dialects.text_common.service import TextService
from fastserve.errors import ServeError
from fastserve.net.request import Call, ReplyStream
from fastserve.serving.exchange import internal_error
from fastserve.serving.text import Ending, Frames, TextStream, Token, stream_to

EVENTS = b"text/event-stream"
COMMENT = b": keep-alive\n\n"
HEADERS = ((b"Cache-Control", b"no-cache"), (b"X-Accel-Buffering", b"no"))


class EventStream:
    """One streamed reply. Its status is sent with the first event: until then the call may be refused."""

    def __init__(
        self,
        call: Call,
        keepalive_s: float = 0.0,
        content_type: bytes = EVENTS,
        headers: tuple[tuple[bytes, bytes], ...] = HEADERS,
    ) -> None:
        self._call, self._content_type, self._headers = call, content_type, headers
        self._stream: ReplyStream | None = None
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
        """Whether the status has been sent."""
        return self._stream is not None

    def _begin(self) -> ReplyStream:
        if self._stream is None:
            self._stream = self._call.stream(200, self._content_type, self._headers)
        return self._stream

    async def write(self, data: bytes) -> None:
        """Send one or several whole events. Raises ConnectionResetError when the client has gone."""
        self._wrote_ns = monotonic_ns()
        await self._begin().write(data)

    async def stream_to(
        self, stream: TextStream, write: Callable[[list[Token]], bytes], frames: Frames | None = None
    ) -> Ending:
        """Send the tokens of a sequence as `write` encodes them, and return its ending. Raises as `write`
        does. `frames`: see serving.text.stream_to."""
        self._poured.append(stream)
        return await stream_to(stream, self._begin(), write, frames)

    async def close(self) -> None:
        """End the reply: it is complete."""
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


Headers = tuple[tuple[bytes, bytes], ...]


async def send_events(
    service: TextService,
    call: Call,
    model: str,
    send: Callable[[EventStream], Awaitable[None]],
    tell: Callable[[ServeError], bytes],
    headers: Headers = HEADERS,
    content_type: bytes = EVENTS,
) -> bool:
    """Send all there is; whether it ended well. Raises ServeError while nothing is sent."""
    every_s = service.options.keepalive_s if content_type is EVENTS else 0.0
    async with EventStream(call, every_s, content_type, headers) as out:
        try:
            await send(out)
        except ConnectionResetError:
            raise
        except Exception as error:
            if not out.begun:
                raise
            fault = error if isinstance(error, ServeError) else internal_error(call, error)
            service.traffic.refused(model, fault.kind.name, message=fault.message, exchange=call)
            await out.write(tell(fault))
            await out.close()
            return False
        await out.close()
    return True
