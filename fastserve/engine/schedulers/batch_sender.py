"""A queue whose batches are formed in this process: members sent together run together, and alone.

The arena must be made with `NEVER_US` as its delay (`sealed_config`), so that no worker takes a batch before
it was sealed here. Schedulers that choose what runs next (sequences, priorities) send through this.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from fastserve._ext.fast_path import Ticket
from fastserve.engine.arena_io import ArenaIO, tensors_bytes
from fastserve.engine.batch_queue import BatchQueue
from fastserve.engine.schedulers.plain import submit_written
from fastserve.errors import ServeError, internal
from fastserve.request import InferRequest, InferResponse, Repeated
from fastserve.tensor import Tensor
from fastserve.util.offload import OFFLOAD_BYTES, run_through

log = logging.getLogger(__name__)

NOBODY = -1  # `queued_ns` of a row that fills a gap in its batch and is counted nowhere
NEVER_US = 1 << 50  # times 1000 it still fits the arena's nanoseconds


@dataclass(slots=True, eq=False)
class MemberAnswer:
    """Answer of one member of a batch. `outputs` are views until `release()`."""

    outputs: dict[str, Tensor]
    release: Callable[[], None]
    parameters: Mapping[str, object] = field(default_factory=dict)
    repeated: Repeated = ()  # see InferResponse

    def respond(self, request: InferRequest) -> InferResponse:
        """Return the response with those of the requested outputs that came."""
        outputs, repeated, wanted = self.outputs, self.repeated, request.outputs
        if wanted:
            outputs = {name: outputs[name] for name in wanted if name in outputs}
            repeated = [(name, tensor) for name, tensor in repeated if name in wanted]
            repeated = repeated if len(repeated) > len(outputs) else ()
        return InferResponse(outputs, self.release, dict(self.parameters), repeated=repeated)


OnMemberDone = Callable[["MemberAnswer | None", "ServeError | None"], None]


@dataclass(slots=True, eq=False)
class BatchMember:
    """One request of a batch. `done` is called once, never from inside `send`, unless `cancel` came first."""

    request: InferRequest
    inputs: Mapping[str, Tensor]
    rows: int
    done: OnMemberDone
    cancel: Callable[[], None] = lambda: None
    queued_ns: int = 0  # since when it waits, before this batch too; CLOCK_MONOTONIC; NOBODY: no request


class BatchSender(Protocol):
    """Where batches go: a Sealed queue, or what a test puts in its place."""

    max_rows: int

    def send(self, members: Sequence[BatchMember], finished: Callable[[], None]) -> None:
        """Run these as one batch; `finished` is called when every one is answered or given up."""

    def full(self) -> ServeError:
        """Return the error of a request that exceeds the queue before this one."""


def sealed_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The worker's config for an arena that is sealed by hand, and whose queue is before it."""
    return {**config, "max_queue_delay_us": NEVER_US, "queued_elsewhere": True}


class SealedQueue:
    """The sender over a queue. A batch that finds no free slot is sent once there is one."""

    def __init__(self, queue: BatchQueue) -> None:
        self.queue = queue
        self.max_rows = queue.max_rows
        self._io = ArenaIO(queue)
        self._filling: set[asyncio.Task[None]] = set()

    def send(self, members: Sequence[BatchMember], finished: Callable[[], None]) -> None:
        batch = SealedBatch(members, finished)
        lease = self.queue.ring.reserve(members[0].rows)
        if lease >= 0:
            self._fill(batch, lease)
        else:
            self.queue.room.stand(members[0].rows, partial(self._fill, batch))

    def full(self) -> ServeError:
        self.queue.metrics.rejected("queue_rows")  # in the statistics the queue's own scheduler counts it
        return self.queue.too_many()

    def _fill(self, batch: SealedBatch, lease: int | ServeError) -> None:
        """Write the batch, whose first member has its lease; an error: there will be none."""
        if isinstance(lease, ServeError):
            for member in batch.members:
                self._fail(batch, member, lease)
            return
        for member, at in zip(batch.members, self._reserve(batch.members, lease), strict=True):
            if at < 0:
                self._fail(batch, member, self.full())
            else:
                self._begin(batch, member, at)

    def _reserve(self, members: Sequence[BatchMember], lease: int) -> list[int]:
        """Their leases, sealed before the first is written: no other batch comes between, however long that
        takes. Negative from the first on that finds none: the rest would be in rows that are not theirs."""
        leases = [lease]
        for member in members[1:]:
            leases.append(self.queue.ring.reserve(member.rows, True) if leases[-1] >= 0 else leases[-1])
        self.queue.ring.seal(max(leases))
        return leases

    def _begin(self, batch: SealedBatch, member: BatchMember, at: int) -> None:
        """Fill the member's lease: now when its inputs are small, else in a task that offloads the copy."""
        queue, nbytes = self.queue, tensors_bytes(member.inputs)
        write = partial(self._io.write_inputs, at, member.rows, member.inputs, member.request)
        filling = self._fill_one(batch, member, at, queue.fill(at, member.rows, nbytes, write))
        if nbytes < OFFLOAD_BYTES:
            run_through(filling)
            return
        task = asyncio.ensure_future(filling)
        self._filling.add(task)
        task.add_done_callback(self._filling.discard)

    async def _fill_one(
        self, batch: SealedBatch, member: BatchMember, at: int, filled: Coroutine[Any, Any, None]
    ) -> None:
        try:
            await filled
            self._submit(batch, member, at)
        except ServeError as error:
            self._fail(batch, member, error)
        except Exception:  # an unanswered member would wait for ever, and the next batch with it
            log.exception("a request could not be written")
            self._fail(batch, member, _internal())

    def _fail(self, batch: SealedBatch, member: BatchMember, fault: ServeError) -> None:
        asyncio.get_running_loop().call_soon(batch.end, member, None, fault)

    def _submit(self, batch: SealedBatch, member: BatchMember, at: int) -> None:
        queue = self.queue
        answer, ticket = submit_written(queue, member.request, member.rows, at)

        def settle(_: object) -> None:
            if answer.cancelled():
                batch.end(member, None, None)
                return
            error = answer.exception()
            if error is None:
                batch.end(member, *self._read(member, answer.result()))
            else:
                batch.end(member, None, error if isinstance(error, ServeError) else _internal())

        def cancel() -> None:
            queue.cancel(ticket)
            if not answer.done():
                answer.cancel()

        answer.add_done_callback(settle)
        if member in batch.left:  # while it waited for a slot: its rows stay where the others expect them
            cancel()
        member.cancel = cancel
        if member.queued_ns:
            queue.ring.backdate(at, max(member.queued_ns, 0))

    def _read(self, member: BatchMember, ticket: Ticket) -> tuple[MemberAnswer | None, ServeError | None]:
        queue = self.queue
        try:
            if member.request.times is not None:
                member.request.times.extend(queue.ring.times_ns(ticket.lease >> 16))
            outputs, parameters, repeated = self._io.read(ticket.lease, ticket.rows)
        except Exception as error:
            queue.release(ticket)
            return None, error if isinstance(error, ServeError) else _internal()
        return MemberAnswer(outputs, partial(queue.release, ticket), parameters, repeated), None


class SealedBatch:
    """Members under way together: each ends once, and `finished` is called when all have."""

    def __init__(self, members: Sequence[BatchMember], finished: Callable[[], None]) -> None:
        self.members = members
        self.left: list[BatchMember] = []
        self._finished, self._open = finished, len(members)
        for member in members:
            member.cancel = partial(self.left.append, member)
            if member.request.borrowed is not None:
                member.request.borrowed.begin()

    def end(self, member: BatchMember, answer: MemberAnswer | None, error: ServeError | None) -> None:
        """The member was answered or failed; with neither it was given up."""
        try:
            if member not in self.left and (answer is not None or error is not None):
                member.done(answer, error)
            elif answer is not None:
                answer.release()
        except Exception:
            log.exception("an answer could not be delivered")
            self._fail(member, answer)
        finally:
            if member.request.borrowed is not None:
                member.request.borrowed.end()
            self._open -= 1
            if not self._open:
                self._finished()

    def _fail(self, member: BatchMember, answer: MemberAnswer | None) -> None:
        """Neither the caller nor the next batch may wait for what one answer has made impossible."""
        if answer is not None:
            answer.release()
        try:
            member.done(None, _internal())
        except Exception:
            log.exception("an error could not be delivered")


def _internal() -> ServeError:
    return internal("the request failed")
