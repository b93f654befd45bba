"""Streamed replies: server-sent events, or other pieces that an API sends one after the other.

    async with EventStream(call, options.keepalive_s) as out:
        await out.write(b"data: {}\\n\\n")

    await send_events(service, call, name, send, tell)          send(out) writes all events

Nothing is sent before the first event: errors until then are refused with a status by the caller. A later
error is one more event, made by `tell`, and ends the reply. A stream left without `close` is cut off, so
that no client takes half an answer for a whole one. After a while without events a comment is sent, which
parsers drop, so that proxies keep the connection.

The sequences of one request are read to their ends or streamed, within its timeouts (spec 2.4):

    async with SequenceGroup(service, call, model, streams, timeout_s) as sequences:
        tokens = await sequences.rest(keep=True)                          whole
        await sequences.first()
        await sequences.stream_to(out, write, frames)                     write(index, tokens) -> bytes

    with RequestTimeout(stream, call, asked.timeout_s, options) as timeout:
        await stream.rest()
    if timeout.fault is not None: ...          the time was up: the stream was cancelled

All raise ServeError. Leaving the group cancels what still runs. The client's timeout, the server's and that
between two tokens each end a request, and the message says which. The engine gets the deadline too
(`deadline_ns`), to drop requests that still wait; RequestTimeout holds whatever a worker does meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from time import monotonic, monotonic_ns
from typing import Protocol

from fastserve.dialects.text_common.endpoint_parts import TextService
from fastserve.errors import DeadlineError, ServeError
from fastserve.net.deadlines import time_is_up
from fastserve.net.request import Call, ReplyStream
from fastserve.serving.exchange import internal_error
from fastserve.serving.text import Ending, EventTemplate, TextModel, TextStream, Token, stream_to, together
from fastserve.settings import TextgenOptions

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

    async def __aexit__(self, *raised: object) -> None:
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
        self, stream: TextStream, write: Callable[[list[Token]], bytes], frames: EventTemplate | None = None
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
                last_ns = max([self._wrote_ns, *[stream.taken_ns for stream in self._poured]])
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
            service.count_fault(model, fault, call)
            await out.write(tell(fault))
            await out.close()
            return False
        await out.close()
    return True


CLIENT = "Engine callback timeout: client timeout"
BETWEEN_TOKENS = "Engine callback timeout: server tokenTimeout"
END_TO_END = "Engine callback timeout: server e2eTimeout"


class TimedWork(Protocol):
    """Work that a RequestTimeout cancels."""

    @property
    def taken_ns(self) -> int:
        """The time of the last progress, 0 before the first."""

    def cancel(self) -> None: ...


MakeFault = Callable[[], DeadlineError]


def time_of(call: Call, timeout_s: float, options: TextgenOptions) -> tuple[float, MakeFault]:
    """Return the end of a request's time, in seconds of time.monotonic, and a function that makes the error
    of that timeout. The call's own deadline may be sooner."""
    timeout_ns = call.head.timeout_ns
    if 0 <= timeout_ns < 1e9 * min(timeout_s, options.e2e_timeout_s):
        return (call.received_ns + timeout_ns) / 1e9, partial(time_is_up, timeout_ns)
    if timeout_s <= options.e2e_timeout_s:
        return call.received_ns / 1e9 + timeout_s, partial(DeadlineError, CLIENT, queued=False)
    return call.received_ns / 1e9 + options.e2e_timeout_s, partial(DeadlineError, END_TO_END, queued=False)


def deadline_ns(call: Call, timeout_s: float, options: TextgenOptions) -> int:
    """Return the end of a request's time in nanoseconds of time.monotonic_ns, for the engine."""
    return int(time_of(call, timeout_s, options)[0] * 1e9)


class RequestTimeout:
    """The timeouts of one request."""

    def __init__(self, stream: TimedWork, call: Call, timeout_s: float, options: TextgenOptions) -> None:
        self._stream = stream
        self._end, self._late = time_of(call, timeout_s, options)
        self._between = options.token_timeout_s
        self._began = monotonic()
        self.fault: DeadlineError | None = None
        """The error of the timeout that ended the request, None if none did."""

    def __enter__(self) -> RequestTimeout:
        self._look()
        return self

    def __exit__(self, *raised: object) -> None:
        self._timer.cancel()

    def cause_of(self, fault: ServeError) -> ServeError:
        """Return why a request has failed, given the error of its sequence: of its time where that is up. The
        engine, which has the same deadline, may have noticed it first."""
        if self.fault is not None:
            return self.fault
        return self._late() if isinstance(fault, DeadlineError) else fault

    def _look(self) -> None:
        now = monotonic()
        until = min(self._end, max(self._began, self._stream.taken_ns / 1e9) + self._between)
        if now < until:  # one timer a request
            self._timer = asyncio.get_running_loop().call_later(until - now + 0.001, self._look)
            return
        self.fault = self._late() if now >= self._end else DeadlineError(BETWEEN_TOKENS, queued=False)
        self._timer = asyncio.get_running_loop().call_later(0, lambda: None)
        self._stream.cancel()


Write = Callable[[int, list[Token]], bytes]


class SequenceGroup:
    """The sequences of one request."""

    def __init__(
        self,
        service: TextService,
        call: Call,
        model: TextModel,
        streams: Sequence[TextStream],
        timeout_s: float,
    ) -> None:
        self.streams = streams
        self.first_ns = 0
        """The time of the first token that `rest` read, in nanoseconds of time.monotonic_ns."""
        self._service, self._model = service, model
        self._patience = RequestTimeout(self, call, timeout_s, service.options)
        self._held = ExitStack()

    async def __aenter__(self) -> SequenceGroup:
        for stream in self.streams:
            self._held.enter_context(self._service.running.hold(self._model.name, "", stream))
        self._held.enter_context(self._patience)
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.cancel()
        self._held.close()

    @property
    def taken_ns(self) -> int:
        """The time of the last progress of any sequence."""
        return max(stream.taken_ns for stream in self.streams)

    def cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()

    async def rest(self, *, keep: bool) -> list[list[Token]]:
        """Read all sequences to their ends; return their tokens, empty lists unless `keep`."""
        found: list[list[Token]] = [[] for _ in self.streams]
        async for index, tokens in together(self.streams):
            self.first_ns = self.first_ns or monotonic_ns()
            if keep:
                found[index] += tokens
            self._check(self.streams[index])
        return found

    async def first(self) -> None:
        """Wait until any sequence has a token or an end. Raises the fault of one that failed without a
        token."""
        news = asyncio.Event()
        for stream in self.streams:
            stream.on_news = news.set
        if not any(stream.has_news for stream in self.streams):
            await news.wait()
        for stream in self.streams:
            stream.on_news = None
            if stream.ending is not None and not stream.ending.token_ids:
                self._check(stream)

    async def stream_to(
        self, out: EventStream, write: Write, frames: Callable[[int], EventTemplate | None]
    ) -> None:
        """Write the tokens of all sequences to their ends; the first failure ends the others. `frames` of an
        index are the encoding of plain tokens, where `write` does nothing else."""
        if len(self.streams) == 1:
            await self._stream_to(out, write, 0, frames(0))
            return
        pours = (self._stream_to(out, write, index, frames(index)) for index in range(len(self.streams)))
        tasks = [asyncio.ensure_future(each) for each in pours]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _stream_to(
        self, out: EventStream, write: Write, index: int, frames: EventTemplate | None
    ) -> None:
        await out.stream_to(self.streams[index], partial(write, index), frames)
        self._check(self.streams[index])

    def _check(self, stream: TextStream) -> None:
        """Raises what a sequence has failed of."""
        if stream.ending is not None and stream.ending.fault is not None:
            raise self._patience.cause_of(stream.ending.fault)


def mean_logprob(tokens: Sequence[Token]) -> float:
    """Return the mean log probability of tokens, -inf where none is known."""
    known = [each.logprob for each in tokens if each.logprob is not None]
    return sum(known) / len(known) if known else float("-inf")
