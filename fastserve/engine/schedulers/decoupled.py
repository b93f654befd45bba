"""Answers in parts, of decoupled models: from a queue's eventfd to an iterator, with back-pressure.

    queue --part(slab)--> PartReader ... next() --> InferResponse --release()--> the slab is returned
                           |_ count_part: the worker may send one more

A part counts as read when it is taken here, so a stalled reader stops its model after WINDOW_PARTS. It may
do so only while no other request waits for the model (`Backlog`). The lease stays the worker's until its
batch is done: leaving early drops it, which the model can see; a worker's death fails it like any lease.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

from fastserve._ext.fast_path import Ticket
from fastserve.engine.arena_io import ArenaIO, read_answer, tensors_bytes
from fastserve.engine.batch_queue import BatchQueue
from fastserve.engine.counters import counters_of, first_responses
from fastserve.engine.input_checks import check_inputs
from fastserve.errors import Kind, ServeError, internal, invalid
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.workers.arena import SLAB_PAGE, WINDOW_PARTS

# Slab offset (0: none), bytes, whether it is the last, ns since the one before.
Part = tuple[int, int, bool, int]
STALL_LIMIT_S = 2.0
"""How long a request may keep its model from others, in all, by reading its answer too slowly."""
CREDIT_BYTES_PER_S = 256 << 10
"""It may for one second more for each of so many bytes of its answer that it takes."""
BACKLOG_LOOK_S = 0.25
"""How often a backlog is looked at. A reader that takes WINDOW_PARTS within it is not slow."""
SPARE_SHARE = 8
"""A queue's memory is short when less than a share of one in so many is free, or less than two parts of the
answer take."""
TOO_SLOW = (
    "the answer is read too slowly: {} of its parts wait to be read, and others wait for the model "
    "(allowed: {:g} s in all, and 1 s more for each {} bytes that are read)"
)


class Backlog:
    """Backlog of one reader: for how long its unread parts have kept other requests from the model.

    Time counts while the reader is behind, by WINDOW_PARTS or by the queue's memory, and other requests wait
    for what it holds: for the instance until `execute` has returned, for a slot or memory at any time."""

    def __init__(self, queue: BatchQueue, lease: int, unread: Callable[[], int]) -> None:
        self._queue, self._slot, self._unread = queue, lease >> 16, unread
        self._standing_ns = 0
        self._most = self._taken = self._taken_bytes = self._largest = 0  # the first two since the last look
        self._looked_ns = self._turned_away = 0
        self._timer: asyncio.TimerHandle | None = None

    def came(self, nbytes: int, slow: Callable[[], object]) -> None:
        """Count a part that came while others are unread. Call `slow` once the reader has been too slow."""
        self._most = max(self._most, self._unread())
        self._largest = max(self._largest, nbytes)
        if self._timer is None:
            self._taken = 0
            self._looked_ns, self._turned_away = time.monotonic_ns(), self._queue.turned_away
            self._look_later(slow)

    def taken(self, nbytes: int) -> None:
        """Count a part that the reader took."""
        self._taken += 1
        self._taken_bytes += nbytes

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self, slow: Callable[[], object]) -> None:
        self._timer = asyncio.get_running_loop().call_later(BACKLOG_LOOK_S, self._look, slow)

    def _look(self, slow: Callable[[], object]) -> None:
        now_ns, self._timer = time.monotonic_ns(), None
        if not self._unread():
            self._most = 0
            return
        if self._is_behind() and self._is_awaited():
            # At most two intervals between looks: a delay of this front process is not the reader's fault.
            self._standing_ns += min(now_ns - self._looked_ns, int(BACKLOG_LOOK_S * 2e9))
        if self._standing_ns > (STALL_LIMIT_S + self._taken_bytes / CREDIT_BYTES_PER_S) * 1e9:
            slow()
            return
        self._looked_ns, self._turned_away = now_ns, self._queue.turned_away
        self._most, self._taken = self._unread(), 0
        self._look_later(slow)

    def _is_behind(self) -> bool:
        if self._taken >= WINDOW_PARTS:
            return False
        return self._most >= WINDOW_PARTS or self._is_memory_short()

    def _is_memory_short(self) -> bool:
        """Whether the worker may find no room for a part more."""
        pages = self._queue.arena.geometry.slab_pages
        free = pages - self._queue.ring.slab_pages_used()
        return free < max(pages // SPARE_SHARE, 2 * (self._largest // SLAB_PAGE + 1))

    def _is_awaited(self) -> bool:
        queue = self._queue
        if queue.room.anyone or queue.turned_away != self._turned_away:
            return True
        ran_ns = queue.ring.times_ns(self._slot)[3]
        return not ran_ns and queue.ring.pending() > 0


class PartReader:
    """Reader of the parts of one answer. The context of its ticket."""

    def __init__(self, queue: BatchQueue, lease: int, version: Version) -> None:
        self._queue, self._lease = queue, lease
        self._counters, self._first, self._asked_ns = (
            counters_of(version),
            first_responses(version),
            time.monotonic_ns(),
        )
        self._read = 0  # parts taken
        self._last_ns = 0  # when the last one came
        self._came: deque[Part] = deque()
        self._backlog = Backlog(queue, lease, self._came.__len__)
        self._ticket: Ticket | None = None
        self._ended = False  # the last part has come
        self._over = False  # the lease is no longer ours
        self._error: ServeError | None = None
        self._news: asyncio.Future[None] | None = None

    def submitted(self, ticket: Ticket) -> None:
        """Note the ticket whose parts these are."""
        self._ticket = ticket

    def part(self, offset: int, nbytes: int, final: bool) -> None:
        """Take one part from the queue, and its slab with it."""
        now_ns = time.monotonic_ns()
        if not self._last_ns:
            self._first.observe(now_ns - self._asked_ns)
        before_ns = self._last_ns or self._queue.ring.times_ns(self._lease >> 16)[2] or now_ns
        self._last_ns = now_ns
        self._came.append((offset, nbytes, final, now_ns - before_ns))
        self._ended = self._ended or final
        if self._ended:  # it holds no model any more
            self._backlog.close()
        elif len(self._came) > 1:
            self._backlog.came(nbytes, self._end_slow)
        self._tell()

    def done(self, ticket: Ticket, error: ServeError | None) -> None:
        """Take the end of the answer from the queue: no more parts follow."""
        if error is None:
            self._queue.release(ticket)
        self._backlog.close()
        self._over = True
        self._error = None if self._ended else error
        self._tell()

    async def next(self) -> Part | None:
        """Return the next part, None after the last. Raises the ServeError that ended the answer."""
        while not self._came:
            if self._error is not None:
                raise self._error
            if self._ended or self._over:
                return None
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        part = self._came.popleft()
        if not self._over:
            self._queue.ring.count_part(self._lease)
        self._read += 1
        self._backlog.taken(part[1])
        if not part[0]:
            self._counters.response(self._read - 1).empty_response.add(part[3])
        return part

    def count(self, part: Part, *, failed: bool) -> None:
        """Record the part taken last in the statistics."""
        counts = self._counters.response(self._read - 1)
        for took in (counts.compute_infer, counts.fail if failed else counts.success):
            took.add(part[3])
        counts.compute_output.add(0)

    def close(self, ticket: Ticket) -> None:
        """Stop reading: return unread parts, and cancel the request if it still runs."""
        self._backlog.close()
        self._forget()
        if not self._over and not self._ended:
            now_ns = time.monotonic_ns()
            self._counters.response(self._read).cancel.add(now_ns - (self._last_ns or now_ns))
            self._queue.cancel(ticket)

    def _end_slow(self) -> None:
        """End a slow reader with an error and cancel its request, which the model can see."""
        assert self._ticket is not None
        text = TOO_SLOW.format(len(self._came), STALL_LIMIT_S, CREDIT_BYTES_PER_S)
        self.close(self._ticket)
        self._error, self._over = ServeError(Kind.RESOURCE_EXHAUSTED, text), True
        self._tell()

    def _forget(self) -> None:
        while self._came:
            offset = self._came.popleft()[0]
            if offset:
                self._queue.ring.free_slab(offset)

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


async def stream_on_queue(
    queue: BatchQueue, version: Version, request: InferRequest
) -> AsyncGenerator[InferResponse, None]:
    """Run one request directly on a decoupled queue; see `Engine.stream`."""
    rows = max(check_inputs(version, request.inputs), 1)
    lease = await queue.reserve(_fitting(queue, rows), request.deadline_ns, request.account)
    write = partial(ArenaIO(queue).write_inputs, lease, rows, request.inputs, request)
    await queue.fill(lease, rows, tensors_bytes(request.inputs), write)
    parts = PartReader(queue, lease, version)
    ended = None if request.trace is None else queue.trace_lease(request.trace, lease, rows)
    ticket = queue.submit(lease, rows, parts.done, request.deadline_ns, parts, request.account)
    parts.submitted(ticket)
    try:
        while (part := await parts.next()) is not None:
            if part[0]:
                response = _response(queue, *part[:3])
                parts.count(part, failed=response.error is not None)
                yield response
    finally:
        if ended is not None:
            ended()
        parts.close(ticket)


def _fitting(queue: BatchQueue, rows: int) -> int:
    if rows > queue.max_rows:
        raise invalid(f"a request of {rows} rows is larger than a batch of {queue.max_rows}")
    return rows


def _response(queue: BatchQueue, offset: int, nbytes: int, final: bool) -> InferResponse:
    try:
        (outputs, parameters, repeated), error = read_answer(queue, offset, nbytes)
    except BaseException:
        queue.ring.free_slab(offset)
        raise
    response = InferResponse(
        outputs,
        lambda: queue.ring.free_slab(offset),
        dict(parameters),
        final=final,
        error=error,
        repeated=repeated,
    )
    if error is not None:
        response.release()
    return response


async def only_response(responses: AsyncGenerator[InferResponse, None]) -> InferResponse:
    """Return the one response of a request to a decoupled model. Raises ServeError INTERNAL for none or
    several, and the error of a response that is one."""
    found: list[InferResponse] = []
    count = 0
    async with aclosing(responses):
        try:
            async for response in responses:
                count += 1
                if response.error is not None:
                    raise response.error
                if found:
                    response.release()
                else:
                    found.append(response)
            if count != 1:
                raise internal(f"expected a single response, got {count}")
        except BaseException:
            for response in found:
                response.release()
            raise
    found[0].final = True
    return found[0]
