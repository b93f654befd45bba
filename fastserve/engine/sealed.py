"""A queue whose batches are formed in this process: what is sent together runs together, and alone.

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

from fastserve._ext.fast_path import Pending
from fastserve.apart import APART_BYTES, run_through
from fastserve.engine.batch_queue import GONE, BatchQueue
from fastserve.engine.forms import form_of, inputs_bytes
from fastserve.engine.plain import submit_written
from fastserve.errors import Kind, ServeError
from fastserve.request import InferRequest
from fastserve.tensor import Tensor

log = logging.getLogger(__name__)

NOBODY = -1  # `queued_ns` of a row that fills a place in its batch and is counted nowhere
NEVER_US = 1 << 50  # times 1000 it still fits the arena's nanoseconds


@dataclass(slots=True, eq=False)
class Answer:
    """What a member of a batch came to. `outputs` are views until `release()`."""

    outputs: dict[str, Tensor]
    release: Callable[[], None]
    parameters: Mapping[str, object] = field(default_factory=dict)


Done = Callable[["Answer | None", "ServeError | None"], None]


@dataclass(slots=True, eq=False)
class Member:
    """One request of a batch. `done` is called once, never from inside `send`, unless `cancel` came first."""

    request: InferRequest
    inputs: Mapping[str, Tensor]
    rows: int
    done: Done
    cancel: Callable[[], None] = lambda: None
    queued_ns: int = 0  # since when it waits, before this batch too; CLOCK_MONOTONIC; NOBODY: no request


class Sender(Protocol):
    """Where batches go: a Sealed queue, or what a test puts in its place."""

    max_rows: int

    def send(self, members: Sequence[Member], finished: Callable[[], None]) -> None:
        """Run these as one batch; `finished` is called when every one is answered or given up."""

    def full(self) -> ServeError:
        """What a request gets that is one too many in the queue before this."""


def sealed_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The worker's config for an arena that is sealed by hand, and whose queue is before it."""
    return {**config, "max_queue_delay_us": NEVER_US, "queued_elsewhere": True}


class Sealed:
    """The sender over a queue. A batch that finds no free slot is sent once there is one."""

    def __init__(self, queue: BatchQueue) -> None:
        self.queue = queue
        self.max_rows = queue.max_rows
        self._form = form_of(queue)
        self._filling: set[asyncio.Task[None]] = set()

    def send(self, members: Sequence[Member], finished: Callable[[], None]) -> None:
        batch = Batch(members, finished)
        place = self.queue.ring.reserve(members[0].rows)
        if place >= 0:
            self._fill(batch, place)
        else:
            self.queue.room.stand(members[0].rows, partial(self._fill, batch))

    def full(self) -> ServeError:
        self.queue.meters.rejected("queue_rows")  # in the statistics the queue's own scheduler counts it
        return self.queue.too_many()

    def _fill(self, batch: Batch, place: int | None) -> None:
        """Write the batch, whose first member has its place; None: there will be none."""
        if place is None:
            for member in batch.members:
                self._fail(batch, member, ServeError(Kind.UNAVAILABLE, GONE))
            return
        for member, at in zip(batch.members, self._reserve(batch.members, place), strict=True):
            if at < 0:
                self._fail(batch, member, self.full())
            else:
                self._begin(batch, member, at)

    def _reserve(self, members: Sequence[Member], place: int) -> list[int]:
        """Their places, sealed before the first is written: no other batch comes between, however long that
        takes. Negative from the first on that finds none: the rest would be in rows that are not theirs."""
        places = [place]
        for member in members[1:]:
            places.append(self.queue.ring.reserve(member.rows, True) if places[-1] >= 0 else places[-1])
        self.queue.ring.seal(max(places))
        return places

    def _begin(self, batch: Batch, member: Member, at: int) -> None:
        """Have the member's place filled: here, or apart from the loop, as of any queue."""
        queue, nbytes = self.queue, inputs_bytes(member.inputs)
        write = partial(self._form.write_inputs, queue, at, member.rows, member.inputs, member.request)
        filling = self._fill_one(batch, member, at, queue.fill(at, member.rows, nbytes, write))
        if nbytes < APART_BYTES:
            run_through(filling)
            return
        task = asyncio.ensure_future(filling)
        self._filling.add(task)
        task.add_done_callback(self._filling.discard)

    async def _fill_one(
        self, batch: Batch, member: Member, at: int, filled: Coroutine[Any, Any, None]
    ) -> None:
        try:
            await filled
            self._submit(batch, member, at)
        except ServeError as error:
            self._fail(batch, member, error)
        except Exception:  # whoever is not answered waits for ever, and the next batch with them
            log.exception("a request could not be written")
            self._fail(batch, member, _internal())

    def _fail(self, batch: Batch, member: Member, fault: ServeError) -> None:
        asyncio.get_running_loop().call_soon(batch.end, member, None, fault)

    def _submit(self, batch: Batch, member: Member, at: int) -> None:
        queue = self.queue
        answer, pending = submit_written(queue, member.request, member.rows, at)

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
            queue.cancel(pending)
            if not answer.done():
                answer.cancel()

        answer.add_done_callback(settle)
        if member in batch.left:  # while it waited for a slot: its rows stay where the others expect them
            cancel()
        member.cancel = cancel
        if member.queued_ns:
            queue.ring.backdate(at, max(member.queued_ns, 0))

    def _read(self, member: Member, pending: Pending) -> tuple[Answer | None, ServeError | None]:
        queue = self.queue
        try:
            if member.request.times is not None:
                member.request.times.extend(queue.ring.times_ns(pending.place >> 16))
            outputs, parameters = self._form.read(queue, pending.place, pending.rows)
        except Exception as error:
            queue.release(pending)
            return None, error if isinstance(error, ServeError) else _internal()
        return Answer(outputs, partial(queue.release, pending), parameters), None


class Batch:
    """Members under way together: each ends once, and `finished` is called when all have."""

    def __init__(self, members: Sequence[Member], finished: Callable[[], None]) -> None:
        self.members = members
        self.left: list[Member] = []
        self._finished, self._open = finished, len(members)
        for member in members:
            member.cancel = partial(self.left.append, member)

    def end(self, member: Member, answer: Answer | None, error: ServeError | None) -> None:
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
            self._open -= 1
            if not self._open:
                self._finished()

    def _fail(self, member: Member, answer: Answer | None) -> None:
        """Neither the caller nor the next batch may wait for what one answer has made impossible."""
        if answer is not None:
            answer.release()
        try:
            member.done(None, _internal())
        except Exception:
            log.exception("an error could not be delivered")


def _internal() -> ServeError:
    return ServeError(Kind.INTERNAL, "the request failed")
