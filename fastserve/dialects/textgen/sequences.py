"""The sequences of one request: read to their ends, or poured into a reply, and what one of them failed of.

    async with Sequences(service, call, model, streams, timeout_s) as sequences:
        tokens = await sequences.rest(keep=True)                          whole
        await sequences.first()
        await sequences.pour(out, write, frames)                          write(index, tokens) -> bytes

All raise ServeError. Whoever leaves, by whatever way, cancels what still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from time import monotonic_ns
from types import TracebackType

from fastserve.dialects.textgen.patience import Patience
from fastserve.dialects.textgen.service import Service
from fastserve.dialects.textgen.sse import EventStream
from fastserve.errors import DeadlineError
from fastserve.serving.text import Frames, TextModel, TextStream, Token, together
from fastserve.wire.call import Call

Write = Callable[[int, list[Token]], bytes]


class Sequences:
    """Those of one request."""

    def __init__(
        self, service: Service, call: Call, model: TextModel, streams: Sequence[TextStream], timeout_s: float
    ) -> None:
        self.streams = streams
        self.first_ns = 0
        """When the first token came of what `rest` reads, as time.monotonic_ns counts."""
        self._service, self._model = service, model
        self._patience = Patience(self, call.received_ns, timeout_s, service.options)
        self._held = ExitStack()

    async def __aenter__(self) -> Sequences:
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
        """When something last came of any."""
        return max(stream.heard_ns for stream in self.streams)

    def cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()

    async def rest(self, *, keep: bool) -> list[list[Token]]:
        """Read them to their ends; all their tokens, where these are kept."""
        found: list[list[Token]] = [[] for _ in self.streams]
        async for index, tokens in together(self.streams):
            self.first_ns = self.first_ns or monotonic_ns()
            if keep:
                found[index] += tokens
            self._check(self.streams[index])
        return found

    async def first(self) -> None:
        """Wait until any of them has something to say; raises what one failed of before it had."""
        news = asyncio.Event()
        for stream in self.streams:
            stream.told = news.set
        if not any(stream.has_news for stream in self.streams):
            await news.wait()
        for stream in self.streams:
            stream.told = None
            if stream.ending is not None and not stream.ending.token_ids:
                self._check(stream)

    async def pour(self, out: EventStream, write: Write, frames: Callable[[int], Frames | None]) -> None:
        """Write what comes of each, to the ends of all; the first that fails ends the others. `frames` of an
        index are what `write` makes of plain tokens, where it does nothing else."""
        if len(self.streams) == 1:
            await self._pour(out, write, 0, frames(0))
            return
        pours = (self._pour(out, write, index, frames(index)) for index in range(len(self.streams)))
        tasks = [asyncio.ensure_future(each) for each in pours]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _pour(self, out: EventStream, write: Write, index: int, frames: Frames | None) -> None:
        await out.pour(self.streams[index], partial(write, index), frames)
        self._check(self.streams[index])

    def _check(self, stream: TextStream) -> None:
        """Raises what a sequence has failed of."""
        if stream.ending is None or stream.ending.fault is None:
            return
        if self._patience.words:
            raise DeadlineError(self._patience.words, queued=False)
        raise stream.ending.fault


def likelihood(tokens: Sequence[Token]) -> float:
    """How likely they were, on average."""
    known = [each.logprob for each in tokens if each.logprob is not None]
    return sum(known) / len(known) if known else float("-inf")
