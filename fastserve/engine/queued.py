"""Scheduling with more than a queue: priorities, policies, preferred sizes, kept order.

Requests wait here, and go to the workers only as fast as these take batches: what runs next is decided
when a worker is free, by `priority`. Batches are formed as Triton's dynamic batcher forms them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fastserve.engine.counters import CANCELED, REJECTED, counters_of
from fastserve.engine.priority import EXPIRED, AdmissionQueue, Levels, Queued
from fastserve.engine.rows import check_inputs, empty_outputs
from fastserve.engine.scheduler import Runs, Scheduler
from fastserve.engine.sealed import Answer, Member, Sender
from fastserve.errors import DeadlineError, Kind, ServeError
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse

GONE = "the model version was unloaded"
TOO_LONG = "the request's time was up while it waited in the queue"


class Gate(Protocol):
    """What must let a batch through before it runs; the rate limiter's face."""

    def enter(self, again: Callable[[], None]) -> bool:
        """True when a batch may run now; otherwise `again` is called when it is worth asking again."""

    def leave(self) -> None:
        """The batch has run."""

    def decline(self) -> None:
        """There is nothing to run any more."""

    def close(self) -> None:
        """The version is gone."""


@dataclass(frozen=True, slots=True)
class Forming:
    """How batches are formed. `width` run at a time; `preferred` sizes in rows; `most_rows` may wait."""

    width: int
    delay_ns: int = 0
    preferred: frozenset[int] = frozenset()
    keep_order: bool = False
    most_rows: int = 1 << 62


@dataclass(slots=True, eq=False)
class _Waiting:
    request: InferRequest
    answer: asyncio.Future[Answer]
    queued: Queued | None = None
    member: Member | None = None  # once it is in a batch
    result: tuple[Answer | None, ServeError | None] | None = None


class QueuedScheduler(Scheduler):
    """Everything behind it runs on the event loop's thread."""

    def __init__(
        self,
        model: str,
        sender: Sender,
        levels: Levels,
        forming: Forming,
        gate: Gate | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.queue = AdmissionQueue(levels)
        self._model, self._sender, self._forming, self._gate = model, sender, forming, gate
        self._clock = clock
        self._running = 0
        self._order: deque[_Waiting] = deque()
        self._outstanding = 0
        self._pumping = self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._drained: list[asyncio.Future[None]] = []

    async def infer(self, engine: Runs, version: Version, request: InferRequest) -> InferResponse:
        if self._closed:
            raise ServeError(Kind.UNAVAILABLE, GONE)
        rows = check_inputs(version, request.inputs)
        if version.batching and rows == 0:
            return _respond(Answer(empty_outputs(version), lambda: None), request)
        if version.batching and rows > self._sender.max_rows:
            raise ServeError(
                Kind.INVALID_ARGUMENT,
                f"[request id: {request.request_id or '<id_unknown>'}] inference request batch-size must be "
                f"<= {self._sender.max_rows} for '{self._model}'",
            )
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        now_ns, counters = self._clock(), counters_of(version)
        try:
            if self.queue.rows + rows > self._forming.most_rows:
                raise self._sender.full()
            waiting.queued = self.queue.push(
                waiting,
                rows if version.batching else 1,
                now_ns,
                priority=request.priority,
                timeout_us=request.timeout_us,
                id=request.request_id,
            )
            return await self._wait(waiting)
        except (ServeError, asyncio.CancelledError) as error:
            if waiting.member is None:  # else its queue counts it
                reason = REJECTED if isinstance(error, ServeError) else CANCELED
                counters.end(reason, self._clock() - now_ns)
            raise

    async def _wait(self, waiting: _Waiting) -> InferResponse:
        request, timer = waiting.request, None
        self._outstanding += 1
        self._look()
        if request.deadline_ns:
            left_s = max(request.deadline_ns - time.monotonic_ns(), 0) / 1e9
            timer = asyncio.get_running_loop().call_later(left_s, self._pass_deadline, waiting)
        try:
            return _respond(await waiting.answer, request)
        except asyncio.CancelledError:
            self._give_up(waiting)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._outstanding -= 1
            self._look()

    def pending(self) -> int:
        return len(self.queue)

    async def drain(self) -> None:
        while self._outstanding:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._drained.append(waiter)
            await waiter

    def close(self) -> None:
        self._closed = True
        if self._gate is not None:
            self._gate.close()
        if self._timer is not None:
            self._timer.cancel()
        for queued in list(self.queue.in_order()):
            self._turn_away(queued, ServeError(Kind.UNAVAILABLE, GONE))

    # --- batches ------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Something changed: form batches at the end of this turn; what came together goes together."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)
        if self._drained and not self._outstanding:
            for waiter in self._drained:
                if not waiter.done():
                    waiter.set_result(None)
            self._drained.clear()

    def _pump(self) -> None:
        self._pumping = False
        now_ns = self._clock()
        for queued in self.queue.expire(now_ns):
            self._turn_away(queued, ServeError(Kind.UNAVAILABLE, EXPIRED))
        due_ns = 0
        while self._running < self._forming.width and not self._closed:
            chosen, due_ns = self._choose(now_ns)
            if not chosen or (self._gate is not None and not self._gate.enter(self._look)):
                if self._gate is not None and not chosen:
                    self._gate.decline()
                break
            self._send(chosen)
        times = [when for when in (due_ns, self.queue.next_expiry_ns()) if when]
        self._set_timer(min(times, default=0))

    def _choose(self, now_ns: int) -> tuple[list[Queued], int]:
        """The next batch; none and when to look again while company is worth waiting for."""
        chosen: list[Queued] = []
        best = rows = 0
        full = False
        for queued in self.queue.in_order():
            if rows + queued.rows > self._sender.max_rows:
                full = True
                break
            chosen.append(queued)
            rows += queued.rows
            if rows in self._forming.preferred:
                best = len(chosen)
        if not chosen:
            return [], 0
        if best:
            return chosen[:best], 0
        due_ns = min(queued.arrived_ns for queued in chosen) + self._forming.delay_ns
        if full or rows >= self._sender.max_rows or now_ns >= due_ns:
            return chosen, 0
        return [], due_ns

    def _send(self, chosen: list[Queued]) -> None:
        self._running += 1
        members = []
        for queued in chosen:
            self.queue.take(queued)
            members.append(self._member(queued))
        self._sender.send(members, self._finish)

    def _member(self, queued: Queued) -> Member:
        waiting: _Waiting = queued.what
        if self._forming.keep_order:
            self._order.append(waiting)
        waiting.member = Member(
            waiting.request,
            waiting.request.inputs,
            queued.rows,
            lambda answer, error: self._answer(waiting, answer, error),
            queued_ns=queued.arrived_ns,
        )
        return waiting.member

    def _finish(self) -> None:
        self._running -= 1
        if self._gate is not None:
            self._gate.leave()
            self._pump()  # in this turn, so that it takes its place among those who wait at the gate
        else:
            self._look()

    def _answer(self, waiting: _Waiting, answer: Answer | None, error: ServeError | None) -> None:
        if waiting.result is not None:  # given up in the very turn it was answered
            if answer is not None:
                answer.release()
            return
        waiting.result = answer, error
        if not self._forming.keep_order:
            _settle(waiting)
        while self._order and self._order[0].result is not None:
            _settle(self._order.popleft())

    # --- ends ---------------------------------------------------------------------------------------

    def _turn_away(self, queued: Queued, error: ServeError) -> None:
        self.queue.take(queued)
        if not queued.what.answer.done():
            queued.what.answer.set_exception(error)

    def _pass_deadline(self, waiting: _Waiting) -> None:
        """Its own time was up while it waited; one that runs is told by the queue."""
        if waiting.member is None and waiting.queued is not None:
            self._turn_away(waiting.queued, DeadlineError(TOO_LONG, queued=True))

    def _give_up(self, waiting: _Waiting) -> None:
        if waiting.queued is not None:
            self.queue.take(waiting.queued)
        if waiting.member is not None and waiting.result is None:
            waiting.member.cancel()
            if self._forming.keep_order:
                self._answer(waiting, None, ServeError(Kind.CANCELLED, "the client left"))
        answer = waiting.answer
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            answer.result().release()

    def _set_timer(self, when_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if when_ns and not self._closed:
            left_s = max(when_ns - self._clock(), 0) / 1e9
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look)


def _settle(waiting: _Waiting) -> None:
    """Hand the result over, or let go of what nobody waits for."""
    assert waiting.result is not None
    answer, error = waiting.result
    if waiting.answer.done():
        if answer is not None:
            answer.release()
    elif answer is not None:
        waiting.answer.set_result(answer)
    elif error is not None:
        waiting.answer.set_exception(error)


def _respond(answer: Answer, request: InferRequest) -> InferResponse:
    outputs = answer.outputs
    if request.outputs:
        outputs = {name: outputs[name] for name in request.outputs if name in outputs}
    return InferResponse(outputs, answer.release, dict(answer.parameters))
