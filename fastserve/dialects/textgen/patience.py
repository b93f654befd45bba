"""How long a request may take (spec 2.4): the smallest of the client's time, the server's, and that between
two tokens ends it, and its words say which.

    with Patience(stream, call.received_ns, asked.timeout_s, options) as patience:
        await stream.rest()
    if patience.words: ...                      its time was up: the stream was cancelled

The engine is told the deadline too (`deadline_ns`), so that what waits for its turn is dropped there; here it
holds whatever a worker does meanwhile.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from types import TracebackType
from typing import Protocol

from fastserve.config import TextgenOptions

CLIENT = "Engine callback timeout: client timeout"
BETWEEN_TOKENS = "Engine callback timeout: server tokenTimeout"
END_TO_END = "Engine callback timeout: server e2eTimeout"


class Waited(Protocol):
    """What one waits for."""

    @property
    def heard_ns(self) -> int:
        """When something last came of it, 0 for never."""

    def cancel(self) -> None: ...


def time_of(received_ns: int, timeout_s: float, options: TextgenOptions) -> tuple[float, str]:
    """When a request's time is up, as time.monotonic counts, and whose words are told then."""
    if timeout_s <= options.e2e_timeout_s:
        return received_ns / 1e9 + timeout_s, CLIENT
    return received_ns / 1e9 + options.e2e_timeout_s, END_TO_END


def deadline_ns(received_ns: int, timeout_s: float, options: TextgenOptions) -> int:
    """The same for the engine."""
    return int(time_of(received_ns, timeout_s, options)[0] * 1e9)


class Patience:
    """That of one request."""

    def __init__(self, stream: Waited, received_ns: int, timeout_s: float, options: TextgenOptions) -> None:
        self._stream = stream
        self._end, self.told = time_of(received_ns, timeout_s, options)
        self._between = options.token_timeout_s
        self._began = monotonic()
        self.words = ""
        """Why it was ended, "" if it was not."""

    def __enter__(self) -> Patience:
        self._look()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = monotonic()
        until = min(self._end, max(self._began, self._stream.heard_ns / 1e9) + self._between)
        if now < until:  # one timer a request, whatever is heard
            self._timer = asyncio.get_running_loop().call_later(until - now + 0.001, self._look)
            return
        self.words = self.told if now >= self._end else BETWEEN_TOKENS
        self._timer = asyncio.get_running_loop().call_later(0, lambda: None)
        self._stream.cancel()
