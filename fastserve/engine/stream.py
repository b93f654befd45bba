"""Answers that come in parts: from a queue's doorbell to whoever iterates, and back-pressure the other way.

    queue --part(slab)--> Parts ... next() --> InferResponse --release()--> the slab goes back
                           |_ count_part: the worker may send one more

A part counts as read when it is taken here, so a reader that stands still stops its model after a fixed
number of them. The place stays the worker's until its batch is done: leaving early drops it, which the
model can see; a worker's death fails it like any place.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from fastserve._ext.fast_path import Pending
from fastserve.engine.batch_queue import BatchQueue
from fastserve.engine.counters import counters_of, first_responses
from fastserve.engine.forms import form_of, inputs_bytes, read_answer
from fastserve.engine.rows import check_inputs
from fastserve.errors import Kind, ServeError
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse

# Slab offset (0: none), bytes, whether it is the last, ns since the one before.
Part = tuple[int, int, bool, int]


class Parts:
    """What has come of one answer and was not taken yet. The context of its pending."""

    def __init__(self, queue: BatchQueue, place: int, version: Version) -> None:
        self._queue, self._place = queue, place
        self._counters, self._first, self._asked_ns = (
            counters_of(version),
            first_responses(version),
            time.monotonic_ns(),
        )
        self._read = 0  # parts taken
        self._last_ns = 0  # when the last one came
        self._came: deque[Part] = deque()
        self._ended = False  # the last part has come
        self._over = False  # the place is no longer ours
        self._error: ServeError | None = None
        self._news: asyncio.Future[None] | None = None

    def part(self, offset: int, nbytes: int, final: bool) -> None:
        """For the queue: one part, whose slab is ours."""
        now_ns = time.monotonic_ns()
        if not self._last_ns:
            self._first.observe((now_ns - self._asked_ns) / 1e6)
        before_ns = self._last_ns or self._queue.ring.times_ns(self._place >> 16)[2] or now_ns
        self._last_ns = now_ns
        self._came.append((offset, nbytes, final, now_ns - before_ns))
        self._ended = self._ended or final
        self._tell()

    def done(self, pending: Pending, error: ServeError | None) -> None:
        """For the queue: no more parts."""
        if error is None:
            self._queue.release(pending)
        self._over = True
        self._error = None if self._ended else error
        self._tell()

    async def next(self) -> Part | None:
        """The next part, None after the last. Raises the ServeError that ended it."""
        while not self._came:
            if self._error is not None:
                raise self._error
            if self._ended or self._over:
                return None
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        part = self._came.popleft()
        if not self._over:
            self._queue.ring.count_part(self._place)
        self._read += 1
        if not part[0]:
            self._counters.response(self._read - 1).empty_response.add(part[3])
        return part

    def count(self, part: Part, *, failed: bool) -> None:
        """The part taken last has been read."""
        counts = self._counters.response(self._read - 1)
        for took in (counts.compute_infer, counts.fail if failed else counts.success):
            took.add(part[3])
        counts.compute_output.add(0)

    def close(self, pending: Pending) -> None:
        """Nobody takes any more: what came goes back, and the request is cancelled if it still runs."""
        while self._came:
            offset = self._came.popleft()[0]
            if offset:
                self._queue.ring.return_lease(offset)
        if not self._over and not self._ended:
            now_ns = time.monotonic_ns()
            self._counters.response(self._read).cancel.add(now_ns - (self._last_ns or now_ns))
            self._queue.cancel(pending)

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


async def stream_on_queue(
    queue: BatchQueue, version: Version, request: InferRequest
) -> AsyncGenerator[InferResponse, None]:
    """One request straight on a decoupled queue, as `Engine.stream` says."""
    rows = max(check_inputs(version, request.inputs), 1)
    place = await queue.reserve(_fitting(queue, rows), request.deadline_ns)
    write = partial(form_of(queue).write_inputs, queue, place, rows, request.inputs, request)
    await queue.fill(place, rows, inputs_bytes(request.inputs), write)
    parts = Parts(queue, place, version)
    pending = queue.submit(place, rows, parts.done, request.deadline_ns, parts)
    try:
        while (part := await parts.next()) is not None:
            if part[0]:
                response = _response(queue, *part[:3])
                parts.count(part, failed=response.error is not None)
                yield response
    finally:
        parts.close(pending)


def _fitting(queue: BatchQueue, rows: int) -> int:
    if rows > queue.max_rows:
        raise ServeError(
            Kind.INVALID_ARGUMENT, f"a request of {rows} rows is larger than a batch of {queue.max_rows}"
        )
    return rows


def _response(queue: BatchQueue, offset: int, nbytes: int, final: bool) -> InferResponse:
    try:
        outputs, parameters, error = read_answer(queue, offset, nbytes)
    except BaseException:
        queue.ring.return_lease(offset)
        raise
    response = InferResponse(
        outputs, lambda: queue.ring.return_lease(offset), dict(parameters), final=final, error=error
    )
    if error is not None:
        response.release()
    return response


async def only_response(responses: AsyncGenerator[InferResponse, None]) -> InferResponse:
    """The one response of a request to a decoupled model. Raises ServeError INTERNAL for none or several,
    and the error it is."""
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
                raise ServeError(Kind.INTERNAL, f"expected a single response, got {count}")
        except BaseException:
            for response in found:
                response.release()
            raise
    found[0].final = True
    return found[0]
