"""From a stream of tokens to the reply of its call, without a task's turn for each token.

    async with stream:
        ending = await pour(stream, reply, write, frames)   write([Token, ...]) -> bytes, b"" for nothing

While the client reads, tokens are written where they are heard, in the doorbell's own turn of the loop: all
that came together as one piece. The task that called sleeps until the end, or until a client that had stopped
reading reads again; meanwhile tokens stay with the engine, which holds the sequence up.

With `frames` all but the first and the last of them take a shorter way (text_tokens.Flow): a step of the
engine is passed on at once, for all streams together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from fastserve._ext.text_tokens import Flow, Frames, Token
from fastserve.serving.text.stream import Ending, TextStream


class Reply(Protocol):
    """What a stream is poured into: wire.stream.Stream."""

    @property
    def ready(self) -> bool: ...

    async def wait(self) -> None: ...

    def send(self, data: bytes) -> None: ...


class Pouring:
    """One stream on its way."""

    __slots__ = ("_news", "_reply", "_stream", "_write", "fault", "flow", "stuck")

    def __init__(self, stream: TextStream, reply: Reply, write: Callable[[list[Token]], bytes]) -> None:
        self._stream, self._reply, self._write = stream, reply, write
        self._news: asyncio.Future[None] | None = None
        self.fault: Exception | None = None
        self.flow: Flow | None = None
        self.stuck = False  # the client does not read

    def heard(self) -> None:
        """For the stream: there is news. May not raise: whoever waits hears of it."""
        stream = self._stream
        if self.stuck:
            return
        if not self._reply.ready:
            self.stuck = True
            self._flows(False)
            self._wake()
            return
        try:
            data = self._write(stream.take())
            if data:
                self._reply.send(data)
            self._flows(True)
        except Exception as fault:
            self.fail(fault)
        if stream.ending is not None:
            self._wake()

    def fail(self, fault: Exception) -> None:
        """Nothing more can be written."""
        self.fault = fault
        self._flows(False)
        self._wake()

    def _flows(self, flows: bool) -> None:
        if self.flow is not None:
            self.flow.open = flows

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def close(self) -> None:
        """Nobody pours any more."""
        self._flows(False)
        self.flow = None
        self._stream.unflow()

    async def run(self) -> Ending:
        """To the end."""
        stream = self._stream
        self.heard()
        while True:
            if self.fault is not None:
                raise self.fault
            if self.stuck:
                await self._reply.wait()
                self.stuck = False
                self.heard()
            elif stream.ending is not None:
                return stream.ending
            else:
                self._news = asyncio.get_running_loop().create_future()
                await self._news


async def pour(
    stream: TextStream,
    reply: Reply,
    write: Callable[[list[Token]], bytes],
    frames: Frames | None = None,
) -> Ending:
    """Write every token to the reply; its ending is left to the caller. `write` is called with no tokens too,
    where the ending has none. `frames` are what `write` makes of plain tokens, where it does nothing else.
    Raises ConnectionResetError when the client has gone, and what `write` raises.
    """
    pouring = Pouring(stream, reply, write)
    stream.told = pouring.heard
    if frames is not None:
        pouring.flow = stream.flow(frames, reply, pouring.fail)
    try:
        return await pouring.run()
    finally:
        stream.told = None
        pouring.close()
