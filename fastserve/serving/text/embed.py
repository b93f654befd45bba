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
AGAIN_S = 0.01
"""Until a line is asked again in which none of its texts is: places are free a moment after their last
record, or others have them. What was begun is not thrown away for that."""
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
        self._begun = 0  # texts
        self._runs: dict[int, Run] = {}
        self._vectors: dict[int, Vector] = {}
        self._fault: ServeError | None = None
        self._news = asyncio.Event()

    async def run(self) -> list[Vector]:
        """Raises ServeError: what could not wait, or what the first that failed has failed of."""
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
        """As many into the line as it takes. Raises ServeError where it has no place for the first, or no
        line is left: who should come again is told when."""
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
        """Its one record came; an engine that says tokens before it has said them in vain."""
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
            self._vectors[at] = _read(finish, data, len(self._prompts[at].ids))
        except ServeError as fault:
            self._fail(fault)
        except Exception as error:  # bytes of its engine that are none
            self._fail(unforeseen(self, error))
        self.heard_ns = monotonic_ns()
        self._news.set()

    def _fail(self, fault: ServeError) -> None:
        self._fault = self._fault or fault
        self._news.set()


def _read(finish: int, data: bytes, tokens: int) -> Vector:
    """A last record. Raises ServeError: what it says went wrong."""
    extra = read_extra(data) if data else Extra()
    if extra.vector and finish == Finish.STOP:
        return Vector(extra.vector, tokens or extra.prompt_tokens)
    raise fault_of(Finish(finish), extra) or ServeError(Kind.INTERNAL, NO_VECTOR)
