"""Embeddings: each text is a sequence without tokens, whose only record has its vector.

    async with Embedding(start, prompts, note) as embedding:
        vectors = await embedding.run()           in the order of the prompts

A request of many texts queues a few of them at a time, so that others come between. Leaving the block cancels
texts that still run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic_ns
from types import TracebackType
from typing import NamedTuple

from fastserve.codec.text import Extra, Finish, GenerationRun, Record, TextNote, read_extra
from fastserve.errors import Kind, ServeError
from fastserve.serving.exchange import internal_error
from fastserve.serving.text.stream import CANCELLED, fault_of

AT_A_TIME = 64
AGAIN_S = 0.01
"""Pause before the queue is tried again when none of the request's texts runs. Slots become free a moment
after their last record; finished vectors are kept meanwhile."""
Start = Callable[[Sequence[int], TextNote, Callable[[list[Record]], None]], GenerationRun]
NO_VECTOR = "the model made no vector of this text"


class EncodedPrompt(NamedTuple):
    """A text for the engine: its tokens, or itself where the engine takes text."""

    ids: list[int]
    text: str = ""


class Vector(NamedTuple):
    """The embedding of one text, float32 little-endian, and its number of tokens."""

    data: bytes
    tokens: int


class Embedding:
    """The texts of one request. `start` is the engine's, of one version."""

    def __init__(
        self,
        start: Start,
        prompts: Sequence[EncodedPrompt],
        note: Callable[[EncodedPrompt], TextNote],
    ) -> None:
        self._start, self._prompts, self._note = start, prompts, note
        self.heard_ns = 0
        """The time of the last record, in nanoseconds of time.monotonic_ns."""
        self._begun = 0  # texts
        self._runs: dict[int, GenerationRun] = {}
        self._vectors: dict[int, Vector] = {}
        self._fault: ServeError | None = None
        self._news = asyncio.Event()

    async def run(self) -> list[Vector]:
        """Return the vectors in order. Raises ServeError: the queue's refusal, or the fault of the first
        text that failed."""
        while True:
            if self._fault is not None:
                raise self._fault
            self._fill()
            if self._runs:
                self._news.clear()
                await self._news.wait()
            elif self._begun < len(self._prompts):
                await asyncio.sleep(AGAIN_S)
            else:
                return [self._vectors[at] for at in range(len(self._prompts))]

    def cancel(self) -> None:
        """End it; `run` raises."""
        self._fail(ServeError(Kind.CANCELLED, CANCELLED))
        runs, self._runs = self._runs, {}
        for run in runs.values():
            run.cancel()

    async def __aenter__(self) -> Embedding:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _fill(self) -> None:
        """Queue as many texts as fit. Raises ServeError when the queue has no place for the first, with
        retry_after_s where the queue knows it."""
        while self._begun < len(self._prompts) and len(self._runs) < AT_A_TIME:
            try:
                self._begin(self._begun)
            except ServeError as fault:
                if fault.retry_after_s is None or not self._begun:
                    raise
                return
            self._begun += 1

    def _begin(self, at: int) -> None:
        prompt = self._prompts[at]

        def heard(records: list[Record]) -> None:
            self._hear(at, records)

        self._runs[at] = self._start(prompt.ids, self._note(prompt), heard)

    def _hear(self, at: int, records: list[Record]) -> None:
        """Take the last record of a text; records of tokens before it are ignored."""
        _, finish, _, data = records[-1]
        run = self._runs.get(at)
        if run is None:
            return
        run.taken(len(records))
        if finish:
            del self._runs[at]
            self._end(at, finish, data)

    def _end(self, at: int, finish: int, data: bytes) -> None:
        try:
            self._vectors[at] = _read_vector(finish, data, len(self._prompts[at].ids))
        except ServeError as fault:
            self._fail(fault)
        except Exception as error:  # malformed records
            self._fail(internal_error(self, error))
        self.heard_ns = monotonic_ns()
        self._news.set()

    def _fail(self, fault: ServeError) -> None:
        self._fault = self._fault or fault
        self._news.set()


def _read_vector(finish: int, data: bytes, tokens: int) -> Vector:
    """Return the vector of a last record. Raises ServeError with the engine's fault."""
    extra = read_extra(data) if data else Extra()
    if extra.vector and finish == Finish.STOP:
        return Vector(extra.vector, tokens or extra.prompt_tokens)
    raise fault_of(Finish(finish), extra) or ServeError(Kind.INTERNAL, NO_VECTOR)
