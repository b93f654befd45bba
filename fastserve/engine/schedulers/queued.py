"""The queued scheduler: priority levels, queue policies, preferred batch sizes, kept order.

    level 1:  in time, oldest first | past their time with action DELAY, oldest first
    level 2:  ...                                               a level is served when those above are empty

Requests wait here, and go to the workers only as fast as these take batches: the AdmissionQueue decides when
a worker is free, without clock or loop; batches are formed as Triton's dynamic batcher forms them. Texts and
meanings are Triton's (spec/triton_v2 section 4).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fastserve.engine.batch_queue import queued_too_long, version_gone
from fastserve.engine.counters import CANCELED, REJECTED, counters_of
from fastserve.engine.engine import Engine, Scheduler
from fastserve.engine.input_checks import check_inputs, empty_outputs
from fastserve.engine.schedulers.batch_sender import BatchMember, BatchSender, MemberAnswer
from fastserve.engine.schedulers.rate_limiter import RateGate
from fastserve.errors import Kind, Reason, ServeError, invalid
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.settings.model_options import QueueOptions

EXPIRED = "Request timeout expired"

FULL = "Exceeds maximum queue size"


@dataclass(frozen=True, slots=True)
class LevelPolicy:
    """How one level queues. Times in nanoseconds, 0 for none; `most` requests, 0 for any number."""

    reject: bool = True
    timeout_ns: int = 0
    may_override: bool = False
    most: int = 0

    def timeout_of(self, asked_us: int) -> int:
        """Return the timeout of a request: it may only shorten the model's, where the policy allows."""
        asked_ns = asked_us * 1000
        if self.may_override and 0 < asked_ns < self.timeout_ns:
            return asked_ns
        return self.timeout_ns


@dataclass(frozen=True, slots=True)
class PriorityLevels:
    """The policies of levels 1, 2, ... and the level of a request that names none of them."""

    policies: tuple[LevelPolicy, ...] = (LevelPolicy(),)
    default: int = 1

    @property
    def plain(self) -> bool:
        """Whether these levels change nothing about a plain FIFO queue."""
        return self.policies == (LevelPolicy(),)


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One request in the queue. `what` belongs to the scheduler; `gone` ones are skipped."""

    what: Any
    rows: int
    level: int
    arrived_ns: int
    expires_ns: int  # 0 for never
    gone: bool = False
    late: bool = False
    turn: float = 0.0  # its place within the level, lower first: of API keys' shares


@dataclass(slots=True)
class _Level:
    policy: LevelPolicy
    waiting: deque[QueuedRequest] = field(default_factory=deque)
    late: deque[QueuedRequest] = field(default_factory=deque)
    size: int = 0


def levels_of(options: QueueOptions) -> PriorityLevels:
    """Return the levels of a model's options."""
    policies = (
        LevelPolicy(given.reject, given.timeout_us * 1000, given.may_override, given.max_requests)
        for given in options.policies
    )
    return PriorityLevels(tuple(policies), options.default_level)


class AdmissionQueue:
    """Requests that wait to be put into a batch."""

    def __init__(self, levels: PriorityLevels) -> None:
        self._levels = [_Level(policy) for policy in levels.policies]
        self._default = levels.default
        self.rows = 0  # of those who wait

    def __len__(self) -> int:
        return sum(level.size for level in self._levels)

    def push(
        self,
        what: Any,
        rows: int,
        now_ns: int,
        *,
        priority: int = 0,
        timeout_us: int = 0,
        id: str = "",
        turn: float = 0.0,
    ) -> QueuedRequest:
        """Queue it behind those of its turn; `priority` 0 or beyond the levels is the default. Raises
        ServeError UNAVAILABLE."""
        number = priority if 1 <= priority <= len(self._levels) else self._default
        level = self._levels[number - 1]
        if level.policy.most and level.size >= level.policy.most:
            text = f"[request id: {id or '<id_unknown>'}] {FULL}"
            raise ServeError(Kind.UNAVAILABLE, text, reason=Reason.QUEUE_FULL)
        timeout_ns = level.policy.timeout_of(timeout_us)
        queued = QueuedRequest(what, rows, number, now_ns, now_ns + timeout_ns if timeout_ns else 0)
        queued.turn = turn
        at = len(level.waiting)
        while at and level.waiting[at - 1].turn > turn:
            at -= 1
        level.waiting.insert(at, queued)
        level.size += 1
        self.rows += rows
        return queued

    def in_order(self) -> Iterator[QueuedRequest]:
        """Iterate over requests in the order in which they would run."""
        for level in self._levels:
            for queued in (*level.waiting, *level.late):
                if not queued.gone:
                    yield queued

    def take(self, queued: QueuedRequest) -> None:
        """Remove a request that runs or whose client left."""
        if not queued.gone:
            queued.gone = True
            level = self._levels[queued.level - 1]
            level.size -= 1
            self.rows -= queued.rows
            for line in (level.waiting, level.late):
                while line and line[0].gone:
                    line.popleft()

    def expire(self, now_ns: int) -> list[QueuedRequest]:
        """Handle requests past their timeout: return those to reject; delay the others behind the rest."""
        rejected = []
        for level in self._levels:
            for queued in [
                q for q in level.waiting if q.expires_ns and q.expires_ns <= now_ns and not q.gone
            ]:
                if level.policy.reject:
                    self.take(queued)
                    rejected.append(queued)
                else:
                    queued.late = True
                    level.late.append(queued)
            if not level.policy.reject:
                level.waiting = deque(q for q in level.waiting if not q.late and not q.gone)
        return rejected

    def next_expiry_ns(self) -> int:
        """When `expire` next has something to do; 0 for never."""
        times = (q.expires_ns for level in self._levels for q in level.waiting if q.expires_ns and not q.gone)
        return min(times, default=0)


@dataclass(frozen=True, slots=True)
class BatchForming:
    """How batches are formed. `width` run at a time; `preferred` sizes in rows; `most_rows` may wait."""

    width: int
    delay_ns: int = 0
    preferred: frozenset[int] = frozenset()
    keep_order: bool = False
    most_rows: int = 1 << 62


@dataclass(slots=True, eq=False)
class _Waiting:
    request: InferRequest
    answer: asyncio.Future[MemberAnswer]
    queued: QueuedRequest | None = None
    member: BatchMember | None = None  # once it is in a batch
    result: tuple[MemberAnswer | None, ServeError | None] | None = None


class QueuedScheduler(Scheduler):
    """Scheduler with levels, policies or preferred batch sizes. It runs on the event loop's thread only."""

    def __init__(
        self,
        model: str,
        sender: BatchSender,
        levels: PriorityLevels,
        forming: BatchForming,
        gate: RateGate | None = None,
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
        self._idle = asyncio.Event()

    async def infer(self, engine: Engine, version: Version, request: InferRequest) -> InferResponse:
        if self._closed:
            raise version_gone()
        rows = check_inputs(version, request.inputs)
        if version.batching and rows == 0:
            return MemberAnswer(empty_outputs(version), lambda: None).respond(request)
        if version.batching and rows > self._sender.max_rows:
            raise invalid(
                f"[request id: {request.request_id or '<id_unknown>'}] inference request batch-size must be "
                f"<= {self._sender.max_rows} for '{self._model}'"
            )
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        account, turn, cost = request.account, 0.0, 0.0
        if account is not None:
            cost = rows / account.weight
            turn = account.board.of(self._model).claim(account.name, cost)
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
                turn=turn,
            )
            return await self._wait(waiting)
        except (ServeError, asyncio.CancelledError) as error:
            if waiting.member is None:  # else its queue counts it
                reason = REJECTED if isinstance(error, ServeError) else CANCELED
                counters.end(reason, self._clock() - now_ns)
                if account is not None:
                    account.board.of(self._model).give_back(account.name, cost)
            raise

    async def _wait(self, waiting: _Waiting) -> InferResponse:
        request, timer = waiting.request, None
        self._outstanding += 1
        self._look()
        if request.deadline_ns:
            left_s = max(request.deadline_ns - time.monotonic_ns(), 0) / 1e9
            timer = asyncio.get_running_loop().call_later(left_s, self._pass_deadline, waiting)
        try:
            return (await waiting.answer).respond(request)
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
            self._idle.clear()
            await self._idle.wait()

    def close(self) -> None:
        self._closed = True
        if self._gate is not None:
            self._gate.close()
        if self._timer is not None:
            self._timer.cancel()
        for queued in list(self.queue.in_order()):
            self._turn_away(queued, version_gone())

    # --- batches ------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Form batches at the end of this turn of the loop, so that requests of one turn share a batch."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)
        if not self._outstanding:
            self._idle.set()

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

    def _choose(self, now_ns: int) -> tuple[list[QueuedRequest], int]:
        """Return the next batch; or none, and when to look again, while waiting for more requests pays."""
        chosen: list[QueuedRequest] = []
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

    def _send(self, chosen: list[QueuedRequest]) -> None:
        self._running += 1
        members = []
        for queued in chosen:
            self.queue.take(queued)
            members.append(self._member(queued))
        self._sender.send(members, self._finish)

    def _member(self, queued: QueuedRequest) -> BatchMember:
        waiting: _Waiting = queued.what
        account = waiting.request.account
        if account is not None:
            account.board.of(self._model).reach(queued.turn)
        if self._forming.keep_order:
            self._order.append(waiting)
        waiting.member = BatchMember(
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

    def _answer(self, waiting: _Waiting, answer: MemberAnswer | None, error: ServeError | None) -> None:
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

    def _turn_away(self, queued: QueuedRequest, error: ServeError) -> None:
        self.queue.take(queued)
        if not queued.what.answer.done():
            queued.what.answer.set_exception(error)

    def _pass_deadline(self, waiting: _Waiting) -> None:
        """Fail a request whose deadline passed while it waited; the queue fails one that already runs."""
        if waiting.member is None and waiting.queued is not None:
            self._turn_away(waiting.queued, queued_too_long())

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
    """Pass the result on, or release it when its caller left."""
    assert waiting.result is not None
    answer, error = waiting.result
    if waiting.answer.done():
        if answer is not None:
            answer.release()
    elif answer is not None:
        waiting.answer.set_result(answer)
    elif error is not None:
        waiting.answer.set_exception(error)
