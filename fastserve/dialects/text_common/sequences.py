"""The sequences of one request: read to their ends or streamed, within the request's timeouts (spec 2.4).

    async with SequenceGroup(service, call, model, streams, timeout_s) as sequences:
        tokens = await sequences.rest(keep=True)                          whole
        await sequences.first()
        await sequences.stream_to(out, write, frames)                     write(index, tokens) -> bytes

    with RequestTimeout(stream, call.received_ns, asked.timeout_s, options) as timeout:
        await stream.rest()
    if timeout.words: ...                      the time was up: the stream was cancelled

All raise ServeError. Leaving the group cancels what still runs. The client's timeout, the server's and that
between two tokens each end a request, and the message says which. The engine gets the deadline too
(`deadline_ns`), to drop requests that still wait; RequestTimeout holds whatever a worker does meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from time import monotonic, monotonic_ns
from types import TracebackType
from typing import Protocol

from fastserve.config import TextgenOptions
from fastserve.dialects.text_common.event_stream import EventStream
from fastserve.dialects.text_common.service import TextService
from fastserve.errors import DeadlineError
from fastserve.net.request import Call
from fastserve.serving.text import Frames, TextModel, TextStream, Token, together

CLIENT = "Engine callback timeout: client timeout"
BETWEEN_TOKENS = "Engine callback timeout: server tokenTimeout"
END_TO_END = "Engine callback timeout: server e2eTimeout"


class TimedWork(Protocol):
    """Work that a RequestTimeout cancels."""

    @property
    def heard_ns(self) -> int:
        """The time of the last progress, 0 before the first."""

    def cancel(self) -> None: ...


def time_of(received_ns: int, timeout_s: float, options: TextgenOptions) -> tuple[float, str]:
    """Return the end of a request's time, in seconds of time.monotonic, and the message of that timeout."""
    if timeout_s <= options.e2e_timeout_s:
        return received_ns / 1e9 + timeout_s, CLIENT
    return received_ns / 1e9 + options.e2e_timeout_s, END_TO_END


def deadline_ns(received_ns: int, timeout_s: float, options: TextgenOptions) -> int:
    """Return the end of a request's time in nanoseconds of time.monotonic_ns, for the engine."""
    return int(time_of(received_ns, timeout_s, options)[0] * 1e9)


class RequestTimeout:
    """The timeouts of one request."""

    def __init__(
        self, stream: TimedWork, received_ns: int, timeout_s: float, options: TextgenOptions
    ) -> None:
        self._stream = stream
        self._end, self.told = time_of(received_ns, timeout_s, options)
        self._between = options.token_timeout_s
        self._began = monotonic()
        self.words = ""
        """Why it was ended, "" if it was not."""

    def __enter__(self) -> RequestTimeout:
        self._look()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = monotonic()
        until = min(self._end, max(self._began, self._stream.heard_ns / 1e9) + self._between)
        if now < until:  # one timer a request
            self._timer = asyncio.get_running_loop().call_later(until - now + 0.001, self._look)
            return
        self.words = self.told if now >= self._end else BETWEEN_TOKENS
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
        self._patience = RequestTimeout(self, call.received_ns, timeout_s, service.options)
        self._held = ExitStack()

    async def __aenter__(self) -> SequenceGroup:
        for stream in self.streams:
            self._held.enter_context(self._service.running.hold(self._model.name, "", stream))
        self._held.enter_context(self._patience)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        self._held.close()

    @property
    def heard_ns(self) -> int:
        """The time of the last progress of any sequence."""
        return max(stream.heard_ns for stream in self.streams)

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

    async def stream_to(self, out: EventStream, write: Write, frames: Callable[[int], Frames | None]) -> None:
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

    async def _stream_to(self, out: EventStream, write: Write, index: int, frames: Frames | None) -> None:
        await out.stream_to(self.streams[index], partial(write, index), frames)
        self._check(self.streams[index])

    def _check(self, stream: TextStream) -> None:
        """Raises what a sequence has failed of."""
        if stream.ending is None or stream.ending.fault is None:
            return
        if self._patience.words:
            raise DeadlineError(self._patience.words, queued=False)
        raise stream.ending.fault


def mean_logprob(tokens: Sequence[Token]) -> float:
    """Return the mean log probability of tokens, -inf where none is known."""
    known = [each.logprob for each in tokens if each.logprob is not None]
    return sum(known) / len(known) if known else float("-inf")
