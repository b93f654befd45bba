"""Vectors of texts: each text a sequence without tokens, whose only record brings its vector.

    async with Embedding(model, prompts, deadline_ns=...) as embedding:
        vectors = await embedding.run()           in the order of the prompts

A request of many texts has a few of them in the line at a time: others come between. Whoever leaves cancels
what still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic_ns
from types import TracebackType
from typing import NamedTuple

from fastserve.codec.text import Extra, Finish, Record, Run, TextNote, read_extra
from fastserve.errors import Kind, ServeError
from fastserve.serving.exchange import unforeseen
from fastserve.serving.text.stream import CANCELLED, fault_of

AT_A_TIME = 64
Start = Callable[[Sequence[int], TextNote, Callable[[list[Record]], None]], Run]
NO_VECTOR = "the model made no vector of this text"


class Prompt(NamedTuple):
    """A text as it is asked: its tokens, or itself where the engine takes text."""

    ids: list[int]
    text: str = ""


class Vector(NamedTuple):
    """Of one text: float32, little-endian; and its tokens."""

    data: bytes
    tokens: int


class Embedding:
    """The texts of one request. `start` is the engine's, of one version."""

    def __init__(
        self,
        start: Start,
        prompts: Sequence[Prompt],
        note: Callable[[Prompt], TextNote],
    ) -> None:
        self._start, self._prompts, self._note = start, prompts, note
        self.heard_ns = 0
        """When something last came, as time.monotonic_ns counts."""
        self._runs: dict[int, Run] = {}
        self._vectors: dict[int, Vector] = {}
        self._fault: ServeError | None = None
        self._news = asyncio.Event()

    async def run(self) -> list[Vector]:
        """Raises ServeError: what could not wait, or what the first that failed has failed of."""
        todo = iter(range(len(self._prompts)))
        while True:
            while self._fault is None and len(self._runs) < AT_A_TIME and (at := next(todo, -1)) >= 0:
                self._begin(at)
            if self._fault is not None:
                raise self._fault
            if not self._runs:
                return [self._vectors[at] for at in range(len(self._prompts))]
            self._news.clear()
            await self._news.wait()

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

    def _begin(self, at: int) -> None:
        prompt = self._prompts[at]

        def heard(records: list[Record]) -> None:
            self._end(at, records[-1])

        self._runs[at] = self._start(prompt.ids, self._note(prompt), heard)

    def _end(self, at: int, record: Record) -> None:
        """Its one record came; an engine that says tokens before it has said them in vain."""
        _, finish, _, data = record
        run = self._runs.get(at)
        if run is None:
            return
        run.taken(1)
        if not finish:
            return
        del self._runs[at]
        try:
            extra = read_extra(data) if data else Extra()
        except ValueError as error:  # bytes of its engine that are none
            extra = Extra()
            self._fail(unforeseen(self, error))
        if extra.vector and finish == Finish.STOP:
            self._vectors[at] = Vector(extra.vector, len(self._prompts[at].ids) or extra.prompt_tokens)
        else:
            self._fail(fault_of(Finish(finish), extra) or ServeError(Kind.INTERNAL, NO_VECTOR))
        self.heard_ns = monotonic_ns()
        self._news.set()

    def _fail(self, fault: ServeError) -> None:
        self._fault = self._fault or fault
        self._news.set()
