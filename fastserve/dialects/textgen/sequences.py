"""The sequences of one request, read together: what comes of any of them, and what one of them failed of.

    async with Sequences(streams, call, timeout_s, options) as sequences:
        async for index, tokens in sequences.turns(): ...            raises ServeError

Whoever leaves, by whatever way, cancels what still runs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from time import monotonic_ns
from types import TracebackType

from fastserve.config import TextgenOptions
from fastserve.dialects.textgen.patience import Patience
from fastserve.errors import DeadlineError
from fastserve.serving.text import TextStream, Token, together
from fastserve.wire.call import Call

Turns = AsyncGenerator[tuple[int, list[Token]], None]


class Sequences:
    """Those of one request."""

    def __init__(
        self, streams: list[TextStream], call: Call, timeout_s: float, options: TextgenOptions
    ) -> None:
        self.streams = streams
        self.first_ns = 0
        """When the first token came, as time.monotonic_ns counts."""
        self._patience = Patience(self, call.received_ns, timeout_s, options)

    async def __aenter__(self) -> Sequences:
        self._patience.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patience.__exit__(kind, error, trace)
        self.cancel()

    def cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()

    async def turns(self) -> Turns:
        """What came of one sequence, and whose it is; to the end of all. Raises ServeError."""
        patience = self._patience
        async for index, tokens in together(self.streams):
            patience.heard()
            self.first_ns = self.first_ns or monotonic_ns()
            ending = self.streams[index].ending
            if ending is None or ending.fault is None:
                yield index, tokens
                continue
            if tokens:
                yield index, tokens
            if patience.words:
                raise DeadlineError(patience.words, queued=False)
            raise ending.fault

    async def rest(self, *, keep: bool) -> list[list[Token]]:
        """Read them to their ends; all their tokens, where these are kept. Raises ServeError."""
        found: list[list[Token]] = [[] for _ in self.streams]
        async with aclosing(self.turns()) as turns:
            async for index, tokens in turns:
                if keep:
                    found[index] += tokens
        return found


def likelihood(tokens: Sequence[Token]) -> float:
    """How likely they were, on average."""
    known = [each.logprob for each in tokens if each.logprob is not None]
    return sum(known) / len(known) if known else float("-inf")
