"""The fast path: from a request that is known to the batch it runs in, and from the doorbell to its answer.

    start    reserve -> fill -> hold -> submit            or False, having left no trace
    answer   read -> write -> release -> count            or refuse, or fail: the client always hears

The only place where this is done, for every dialect and transport. No task, no future, no object per number,
and nothing is checked again that preparing the request has found out. What raises on the way in gives the
rows back; what raises on the way out is told to the client, and the rows go back too. An answer that is large
is written in a task, apart from the loop: its memory stays taken until then.

What runs for every request is compiled, in `_ext.fast_path`; here is what differs, or seldom runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from time import monotonic_ns
from typing import Any, Protocol

from fastserve._ext.fast_path import Lifecycle
from fastserve.engine import BatchQueue, Pending, read_response
from fastserve.errors import ServeError
from fastserve.metrics.traffic import Traffic
from fastserve.repository.version import Version
from fastserve.serving.exchange import Exchange, unforeseen
from fastserve.serving.prepared import PreparedRequest


class Outcome(Protocol):
    """What a dialect does when a request has ended, beside what is counted for all of them."""

    @property
    def answered(self) -> Callable[[Any, int, int], None] | None:
        """Called when a request was answered well: the prepared one, the nanoseconds it took, and how many of
        them from its rows being there to its answer; 0 where the answer was kept."""

    def refused(self, exchange: Any, prepared: Any, request_id: Any, fault: ServeError) -> None:
        """Tell the client what is wrong, in the dialect's words, and count it."""


class FastPath(Lifecycle):
    """That of one version. `patience_ns`: how long a batch may wait for more calls of a busy loop."""

    queue: BatchQueue

    def __init__(
        self,
        version: Version,
        queue: BatchQueue,
        traffic: Traffic,
        outcome: Outcome,
        patience_ns: int = 0,
        *,
        replies: bool = False,
    ) -> None:
        requests, duration = traffic.succeeded(version.model, version.number)
        decode, encode = traffic.stages(version.model, version.number)
        meters = requests.add, duration.observe_ns, decode.observe_ns, encode.observe_ns
        super().__init__(queue, ServeError, meters, outcome.answered, patience_ns, replies)
        self.version = version
        self.refuse = outcome.refused
        self._large: set[asyncio.Task[None]] = set()

    def takes_arrived(self, prepared: PreparedRequest) -> bool:
        """Whether nobody asks for the bytes of such requests once they are in their place: they may be read
        there out of the socket then."""
        return not prepared.outside

    def respond(
        self, exchange: Exchange, prepared: PreparedRequest, pending: Pending, request_id: Any, held: Any
    ) -> Coroutine[Any, Any, None] | None:
        """Answer as the general path does."""
        response = read_response(self.queue, pending, prepared.wanted)
        return prepared.write_response(exchange, response, request_id, held)

    def answer_later(self, pending: Pending, later: Coroutine[Any, Any, None]) -> None:
        """The answer is large: `later` writes it, and then everything goes the way of all answers."""
        exchange, prepared, request_id, held = pending.context

        def let_go() -> None:
            self.queue.release(pending)
            if held is not None:
                held.close()

        ran_ns = monotonic_ns() - pending.submitted_ns
        self.write_later(exchange, prepared, request_id, later, let_go, ran_ns)

    def write_later(
        self,
        exchange: Exchange,
        prepared: PreparedRequest,
        request_id: Any,
        later: Coroutine[Any, Any, None],
        let_go: Callable[[], object],
        ran_ns: int = 0,
    ) -> None:
        """In a task, which ends by itself: what `let_go` gives back is read until then."""
        work = self._write_later(exchange, prepared, request_id, later, let_go, ran_ns)
        task = asyncio.get_running_loop().create_task(work)
        self._large.add(task)
        task.add_done_callback(self._large.discard)

    async def _write_later(
        self,
        exchange: Exchange,
        prepared: PreparedRequest,
        request_id: Any,
        later: Coroutine[Any, Any, None],
        let_go: Callable[[], object],
        ran_ns: int,
    ) -> None:
        began_ns = monotonic_ns()
        try:
            try:
                await later
            finally:
                let_go()
            self.count(exchange, prepared, began_ns, ran_ns)
        except ServeError as fault:
            self.refuse(exchange, prepared, request_id, fault)
        except Exception as error:
            self.failed(exchange, prepared, request_id, error)

    def failed(
        self, exchange: Exchange, prepared: PreparedRequest, request_id: Any, error: Exception
    ) -> None:
        """What nobody foresaw ended the request: it is logged, and told in the dialect's words."""
        try:
            self.refuse(exchange, prepared, request_id, unforeseen(exchange, error))
        except Exception:  # it was answered before
            exchange.fail(error)
