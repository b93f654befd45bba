"""Streams of requests: any number in, their answers out, many under way at once.

    requests --begin--> [ turn 3 | turn 2 | turn 1 ] --answers, oldest first-->
                        a turn that stepped out of line: messages as they come

A turn is the exchange of one request. `begin` takes a request at once, as the fast path does, without a task
or a future, or gives the coroutine that will answer it. It is called in the order of the requests, and a
coroutine runs until it first waits before the next one is begun.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from functools import partial
from time import monotonic_ns
from typing import Any, TypeVar

from fastserve.errors import Kind, ServeError

Request = TypeVar("Request")
MOST_WAITING = 64
"""Messages out of line that may wait for a client to read them; in line there is one for each request."""


class Turn:
    """The exchange of one request. `stream` is what its dialect knows of the stream.

    One that is answered in several messages steps out of line, says them, and leaves; what it then replies or
    fails with is its last."""

    __slots__ = ("_line", "_out", "answer", "on_gone", "received_ns", "stream")

    def __init__(self, line: Line, stream: Any) -> None:
        self._line, self.stream = line, stream
        self._out = False
        self.received_ns = monotonic_ns()
        self.on_gone: Callable[[], object] | None = None
        self.answer: bytes | BaseException | None = None

    def reply(self, message: bytes) -> None:
        """Answer when it is this one's turn."""
        self._settle(message)

    def fail(self, error: BaseException) -> None:
        """End the stream with an error when it is this one's turn."""
        self._settle(error)

    def refuse(self, fault: ServeError) -> None:
        """The same: a dialect whose streams go on replies with its words instead."""
        self._settle(fault)

    def _settle(self, answer: bytes | BaseException) -> None:
        if self._out:
            self._line.say(answer)
            self.leave()
        elif self.answer is None:
            self.answer = answer
            self._line.wake()

    def step_out(self) -> None:
        """From now on messages go out as they are said, and hold up nobody."""
        self._out = True
        self._line.step_out(self)

    async def say(self, message: bytes) -> None:
        """Send one message of a turn out of line; returns when there is room for another."""
        self._line.say(message)
        await self._line.has_room()

    def leave(self) -> None:
        """A turn out of line has said everything; what it says from now on is too late."""
        if self._out:
            self._out = False
            self._line.leave()


class Line:
    """The turns of one stream."""

    def __init__(self, most: int) -> None:
        self._turns: deque[Turn] = deque()
        self._said: deque[bytes | BaseException] = deque()
        self._room, self._read = asyncio.Semaphore(most), asyncio.Event()
        self._out_of_line = 0
        self._ended: BaseException | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def read(
        self,
        requests: AsyncIterator[Request],
        begin: Callable[[Request, Turn], Coroutine[Any, Any, None] | None],
        stream: Any,
    ) -> None:
        """Begin every request. What `requests` raises comes after the answers to what it gave before."""
        create_task = asyncio.get_running_loop().create_task
        try:
            async for request in requests:
                await self._room.acquire()
                turn = Turn(self, stream)
                self._turns.append(turn)
                try:
                    work = begin(request, turn)
                except Exception as error:  # in its turn, or the stream would wait for it for ever
                    turn.fail(error)
                    continue
                if work is not None:
                    task = create_task(self._run(work, turn))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                    task.add_done_callback(partial(_drop, work))
            self._ended = StopAsyncIteration()
        except Exception as error:
            self._ended = error
        self.wake()

    async def _run(self, work: Coroutine[Any, Any, None], turn: Turn) -> None:
        try:
            await work
        except asyncio.CancelledError:  # not always by `close`: what it waited for may have been
            turn.fail(ServeError(Kind.CANCELLED, "the request was cancelled"))
            raise
        except Exception as error:
            turn.fail(error)

    async def next(self) -> bytes | None:
        """The next message; None when there are no more. Raises what ends the stream."""
        while (message := self._take()) is None:
            if self._ended is not None and not self._turns and not self._out_of_line:
                if isinstance(self._ended, StopAsyncIteration):
                    return None
                raise self._ended
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if isinstance(message, BaseException):
            raise message
        return message

    def _take(self) -> bytes | BaseException | None:
        if self._said:
            self._read.set()
            return self._said.popleft()
        if self._turns and self._turns[0].answer is not None:
            self._room.release()
            return self._turns.popleft().answer
        return None

    def wake(self) -> None:
        """There may be a message."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def step_out(self, turn: Turn) -> None:
        self._turns.remove(turn)
        self._out_of_line += 1
        self.wake()

    def say(self, message: bytes | BaseException) -> None:
        self._said.append(message)
        self.wake()

    async def has_room(self) -> None:
        while len(self._said) > MOST_WAITING:
            self._read.clear()
            await self._read.wait()

    def leave(self) -> None:
        self._out_of_line -= 1
        self._room.release()
        self.wake()

    async def close(self, reader: asyncio.Task[None]) -> None:
        """End whatever is under way."""
        tasks = [reader, *self._tasks]
        for task in tasks:
            task.cancel()
        for turn in self._turns:
            gone, turn.on_gone = turn.on_gone, None
            if gone is not None:
                gone()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._turns.clear()


def _drop(work: Coroutine[Any, Any, None], task: asyncio.Task[None]) -> None:
    """Of a task that is cancelled before it began, the work has not begun either."""
    work.close()


async def answer_stream(
    requests: AsyncIterator[Request],
    begin: Callable[[Request, Turn], Coroutine[Any, Any, None] | None],
    most: int,
    stream: Any = None,
) -> AsyncGenerator[bytes, None]:
    """The messages of a stream whose requests are begun by `begin`, with at most `most` under way. Closing it
    cancels whatever is under way."""
    line = Line(most)
    reader = asyncio.get_running_loop().create_task(line.read(requests, begin, stream))
    try:
        while (message := await line.next()) is not None:
            yield message
    finally:
        await line.close(reader)
