"""The scheduler of a model with sequence batching: batches are formed of sequences, a request of each.

    direct   a sequence keeps its row in the batch; rows of free or silent slots say READY false
    oldest   the oldest waiting requests of the candidate sequences, in any row

One batch at a time runs on each instance. A client that leaves while its request waits or runs ends its
sequence: what it had built up is dropped and its slot is free. `sequence` decides, `controls` writes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fastserve.config.options import SequenceOptions
from fastserve.engine.controls import Extras, Signals, empty_like
from fastserve.engine.counters import CANCELED, OTHER, REJECTED, counters_of
from fastserve.engine.rows import check_inputs
from fastserve.engine.scheduler import Runs, Scheduler
from fastserve.engine.sealed import NOBODY, Answer, Member, Sender
from fastserve.engine.sequence import Asked, Phase, Sequences
from fastserve.errors import DeadlineError, Kind, ServeError
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse

log = logging.getLogger(__name__)

GONE = "the model version was unloaded"
SEQUENCE_DIED = "the worker process that held this sequence died"
_LOSING = (Kind.UNAVAILABLE, Kind.CANCELLED)


@dataclass(frozen=True, slots=True)
class Strategy:
    """How batches are formed. `preferred` sizes and `fill` (a share of the slots) end the wait early."""

    direct: bool
    width: int
    delay_ns: int
    preferred: frozenset[int]
    fill: float
    idle_ns: int
    most: int = 1 << 62  # requests that may wait


def strategy_of(options: SequenceOptions, max_batch_size: int, most: int = 1 << 62) -> Strategy:
    """How a model's sequences form batches, of at most so many requests that wait."""
    rows = max(1, max_batch_size)
    return Strategy(
        direct=options.direct,
        width=rows if options.direct else options.max_candidates or rows,
        delay_ns=options.delay_us * 1000,
        preferred=frozenset(options.preferred_sizes),
        fill=options.fill,
        idle_ns=options.idle_us * 1000,
        most=most,
    )


@dataclass(slots=True, eq=False)
class _Waiting:
    """A client's request and who waits for it."""

    request: InferRequest
    answer: asyncio.Future[Answer]
    cancel: Callable[[], None] | None = None


class SequenceScheduler(Scheduler):
    """Everything behind it runs on the event loop's thread."""

    def __init__(
        self,
        model: str,
        senders: Sequence[Sender],
        extras: Extras,
        strategy: Strategy,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.sequences = Sequences(model, len(senders), strategy.width, strategy.idle_ns)
        self._model = model
        self._senders = list(senders)
        self._extras, self._strategy, self._clock = extras, strategy, clock
        self._busy = [False] * len(senders)
        self._asked = 0
        self._most = strategy.most + strategy.width * len(senders)  # a request of each slot may run
        self._pumping: set[int] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._drained: list[asyncio.Future[None]] = []
        self._closed = False

    async def infer(self, engine: Runs, version: Version, request: InferRequest) -> InferResponse:
        if self._closed:
            raise ServeError(Kind.UNAVAILABLE, GONE)
        rows = check_inputs(version, request.inputs)
        if version.batching and rows != 1:
            raise ServeError(
                Kind.INVALID_ARGUMENT,
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements "
                "of sequence batcher",
            )
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        counters, began_ns = counters_of(version), self._clock()
        try:
            if self._asked >= self._most:
                raise self._senders[0].full()
            asked = self.sequences.ask(
                request.sequence_id,
                start=request.sequence_start,
                end=request.sequence_end,
                what=waiting,
                now_ns=began_ns,
            )
        except ServeError:
            counters.end(REJECTED)
            raise
        self._look()
        self._asked += 1
        try:
            return _respond(await self._answered(asked), request)
        except (ServeError, asyncio.CancelledError) as error:
            if waiting.cancel is None:  # else its queue counts it
                counters.end(_end_of(error), self._clock() - began_ns)
            raise
        finally:
            self._asked -= 1

    async def _answered(self, asked: Asked) -> Answer:
        """Raises what ended the request; a client that leaves ends its sequence."""
        waiting: _Waiting = asked.what
        request, timer = waiting.request, None
        if request.deadline_ns:
            left_s = max(request.deadline_ns - time.monotonic_ns(), 0) / 1e9
            timer = asyncio.get_running_loop().call_later(left_s, self._expire, asked)
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            self._give_up(asked)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def drain(self) -> None:
        while self.sequences.outstanding:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._drained.append(waiter)
            await waiter

    def close(self) -> None:
        self._closed = True
        self._fail(self.sequences.everything(), ServeError(Kind.UNAVAILABLE, GONE))
        for timer in self._timers.values():
            timer.cancel()
        self._look()

    def pending(self) -> int:
        return self.sequences.waiting

    died_with_it = SEQUENCE_DIED

    def instance_lost(self, instance: int) -> None:
        """The instance's process died: its sequences are over. Requests under way are told by their batch."""
        lost = self.sequences.lose_instance(instance)
        died = ServeError(Kind.UNAVAILABLE, SEQUENCE_DIED)
        self._fail([a for a in lost if a.what.cancel is None], died)
        self._look()

    def instance_back(self, instance: int) -> None:
        """The instance has a process again: sequences may begin there."""
        self.sequences.regain_instance(instance)
        self._look()

    # --- batches ------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Something changed: form batches at the end of this turn; what came together goes together."""
        loop = asyncio.get_running_loop()
        for instance, busy in enumerate(self._busy):
            if not busy and instance not in self._pumping and self.sequences.ready(instance):
                self._pumping.add(instance)
                loop.call_soon(self._pump, instance)
        self._set_timer("reap", self.sequences.next_reap_ns(), self._reap)
        if self._drained and not self.sequences.outstanding:
            for waiter in self._drained:
                if not waiter.done():
                    waiter.set_result(None)
            self._drained.clear()

    def _pump(self, instance: int) -> None:
        self._pumping.discard(instance)
        ready = self.sequences.ready(instance)
        if self._closed or self._busy[instance] or not ready:
            return
        chosen = sorted(ready, key=lambda asked: asked.arrived_ns)[: self._senders[instance].max_rows]
        due_ns = chosen[0].arrived_ns + self._strategy.delay_ns
        if not self._is_enough(len(chosen)) and self._clock() < due_ns:
            self._set_timer(f"batch {instance}", due_ns, lambda: self._pump(instance))
            return
        self._busy[instance] = True
        for asked in chosen:
            self.sequences.take(asked)
        try:
            members = self._rows_of(chosen) if self._strategy.direct else [self._member(a) for a in chosen]
        except Exception:  # an instance that is not given back its turn would never run again
            log.exception("a batch of sequences could not be formed")
            for asked in chosen:
                self._answer(asked, None, ServeError(Kind.INTERNAL, "the request failed"))
            self._finish(instance)
            return
        self._senders[instance].send(members, lambda: self._finish(instance))

    def _is_enough(self, count: int) -> bool:
        strategy = self._strategy
        if not strategy.delay_ns:
            return True
        if strategy.direct:
            return count / strategy.width >= strategy.fill
        return count in strategy.preferred or count >= self._senders[0].max_rows

    def _rows_of(self, chosen: Sequence[Asked]) -> list[Member]:
        """A member for every slot up to the last that has a request."""
        width = self._strategy.width
        by_row = {asked.sequence.slot % width: asked for asked in chosen}
        return [
            self._member(by_row[row]) if row in by_row else self._absent(chosen[0])
            for row in range(max(by_row) + 1)
        ]

    def _member(self, asked: Asked) -> Member:
        waiting: _Waiting = asked.what
        signals = Signals(asked.start, True, asked.end, asked.sequence.id)
        extra = self._extras.write(signals, asked.sequence.state)
        request = waiting.request
        if request.outputs and self._extras.states:  # a state is wanted by us, whatever the client wants
            states = (state.output for state in self._extras.states)
            request = replace(request, outputs=tuple(dict.fromkeys((*request.outputs, *states))))
        member = Member(
            request,
            {**request.inputs, **extra},
            1,
            lambda answer, error: self._answer(asked, answer, error),
            queued_ns=asked.arrived_ns,
        )
        waiting.cancel = lambda: member.cancel()
        return member

    def _absent(self, like: Asked) -> Member:
        inputs = like.what.request.inputs
        inputs = {name: empty_like(tensor) for name, tensor in inputs.items()}
        extra = self._extras.write(Signals(), {})
        return Member(InferRequest({}), {**inputs, **extra}, 1, _drop, queued_ns=NOBODY)

    def _answer(self, asked: Asked, answer: Answer | None, error: ServeError | None) -> None:
        waiting: _Waiting = asked.what
        alive = asked.sequence.phase is not Phase.GONE
        if answer is not None:
            kept = self._extras.keep(answer.outputs)
            if alive:
                asked.sequence.state.update(kept)
        if error is not None and (error.kind in _LOSING or isinstance(error, DeadlineError)):
            self._end(asked)  # what the request would have added is missing from now on
        self.sequences.answer(asked, self._clock())
        if waiting.answer.done():
            if answer is not None:
                answer.release()
        elif answer is not None:
            waiting.answer.set_result(answer)
        elif error is not None:
            waiting.answer.set_exception(error)

    def _finish(self, instance: int) -> None:
        self._busy[instance] = False
        self._look()

    # --- ends ---------------------------------------------------------------------------------------

    def _give_up(self, asked: Asked) -> None:
        waiting: _Waiting = asked.what
        if waiting.cancel is not None:
            waiting.cancel()
        if waiting.answer.done() and not waiting.answer.cancelled() and not waiting.answer.exception():
            waiting.answer.result().release()
        self._end(asked)
        self._look()

    def _expire(self, asked: Asked) -> None:
        """Its time was up while it waited; one that runs is told by the queue."""
        waiting: _Waiting = asked.what
        if waiting.cancel is None and not waiting.answer.done():
            text = "the request's time was up while it waited in the queue"
            waiting.answer.set_exception(DeadlineError(text, queued=True))
            self._end(asked)
            self._look()

    def _end(self, asked: Asked) -> None:
        lost = self.sequences.lose(asked.sequence)
        self._fail([a for a in lost if a is not asked], self.sequences.unknown(asked.sequence.id))

    def _fail(self, lost: Sequence[Asked], error: ServeError) -> None:
        for asked in lost:
            if not asked.what.answer.done():
                asked.what.answer.set_exception(error)

    def _reap(self) -> None:
        self.sequences.reap(self._clock())
        self._look()

    def _set_timer(self, name: str, when_ns: int, work: Callable[[], None]) -> None:
        known = self._timers.pop(name, None)
        if known is not None:
            known.cancel()
        if when_ns and not self._closed:
            left_s = max(when_ns - self._clock(), 0) / 1e9
            self._timers[name] = asyncio.get_running_loop().call_later(left_s, work)


def _end_of(error: BaseException) -> int:
    if isinstance(error, asyncio.CancelledError):
        return CANCELED
    return REJECTED if isinstance(error, DeadlineError) else OTHER


def _drop(answer: Answer | None, error: ServeError | None) -> None:
    if answer is not None:
        answer.release()


def _respond(answer: Answer, request: InferRequest) -> InferResponse:
    outputs = answer.outputs
    if request.outputs:
        outputs = {name: outputs[name] for name in request.outputs if name in outputs}
    return InferResponse(outputs, answer.release, dict(answer.parameters))
