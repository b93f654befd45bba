"""The plain scheduler: a request straight into the queue, where batches form in shared memory as rows arrive.

It checks tensors against the version's specs, takes places, writes the inputs where the worker will see them,
waits, and hands out the outputs. A request of more rows than a batch holds is split and its answers joined.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Sequence
from functools import partial

from fastserve._ext.fast_path import Pending
from fastserve.engine.batch_queue import BatchQueue
from fastserve.engine.forms import Form, choose, form_of, inputs_bytes, join_parts
from fastserve.engine.rows import RowSlices, check_inputs, empty_outputs
from fastserve.engine.scheduler import Runs, Scheduler
from fastserve.engine.stream import only_response, stream_on_queue
from fastserve.errors import Kind, ServeError
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.tensor import Tensor

Answer = asyncio.Future["Pending"]
# Of a request that is split: one piece runs and one is ready when it is done.
PIECES_A_WORKER = 2


class PlainScheduler(Scheduler):
    """Nothing stands between requests and the queue."""

    def __init__(self, queue: BatchQueue) -> None:
        self.queue = queue

    async def infer(self, engine: Runs, version: Version, request: InferRequest) -> InferResponse:
        return await run_on_queue(self.queue, version, request)

    async def stream(
        self, engine: Runs, version: Version, request: InferRequest
    ) -> AsyncGenerator[InferResponse, None]:
        if not self.queue.decoupled:
            yield await run_on_queue(self.queue, version, request)
            return
        async with contextlib.aclosing(stream_on_queue(self.queue, version, request)) as responses:
            async for response in responses:
                yield response

    def fast_queue(self) -> BatchQueue | None:
        return None if self.queue.decoupled else self.queue


async def run_on_queue(queue: BatchQueue, version: Version, request: InferRequest) -> InferResponse:
    """One request straight on a queue, as `Engine.infer` says."""
    rows = check_inputs(version, request.inputs)
    if rows == 0 and version.batching:
        return InferResponse(_wanted(empty_outputs(version), request))
    if queue.decoupled:
        return await only_response(stream_on_queue(queue, version, request))
    form = form_of(queue)
    if not version.batching or rows <= queue.max_rows:
        pending = await _run(queue, form, request, request.inputs, rows if version.batching else 1)
        return _respond(queue, form, pending, request)
    most = version.config.most_rows
    if 0 < most < rows:
        raise ServeError(
            Kind.INVALID_ARGUMENT, f"Task size {rows} is larger than maximum input batch size {most}"
        )
    return InferResponse(_wanted(await _run_split(queue, form, request, rows), request))


async def _run(
    queue: BatchQueue,
    form: Form,
    request: InferRequest,
    inputs: dict[str, Tensor],
    rows: int,
    *,
    patient: bool = False,
) -> Pending:
    """One place: written, submitted, answered."""
    place = await queue.reserve(rows, request.deadline_ns, patient=patient)
    write = partial(form.write_inputs, queue, place, rows, inputs, request)
    await queue.fill(place, rows, inputs_bytes(inputs, request.carried), write)
    answer, pending = submit_written(queue, request, rows, place)
    try:
        return await answer
    except asyncio.CancelledError:
        queue.cancel(pending)
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            queue.release(pending)
        raise
    finally:
        del answer  # else an error, this frame in its traceback, and the answer that holds it are a circle


def submit_written(queue: BatchQueue, request: InferRequest, rows: int, place: int) -> tuple[Answer, Pending]:
    """Let a place that was filled run. The answer is the pending, to be released."""
    answer: Answer = asyncio.get_running_loop().create_future()

    def done(pending: Pending, error: ServeError | None) -> None:
        if answer.cancelled():  # cancelled in the very turn the answer came
            if error is None:
                queue.release(pending)
        elif error is None:
            answer.set_result(pending)
        else:
            answer.set_exception(error)

    try:
        return answer, queue.submit(place, rows, done, request.deadline_ns)
    except BaseException:
        queue.abandon(place, rows)
        raise


def _respond(queue: BatchQueue, form: Form, pending: Pending, request: InferRequest) -> InferResponse:
    if request.times is not None:
        request.times.extend(queue.ring.times_ns(pending.place >> 16))
    try:
        outputs, parameters = form.read(queue, pending.place, pending.rows)
        mine = outputs if queue.requests else _wanted(outputs, request)  # whole requests say what they want
    except BaseException:
        queue.release(pending)
        raise
    return InferResponse(mine, partial(queue.release, pending), dict(parameters))


async def _run_split(queue: BatchQueue, form: Form, request: InferRequest, rows: int) -> dict[str, Tensor]:
    """The request in pieces of at most a batch, of which so many are under way at a time as keep the workers
    busy: the rest of the queue is for others, and no piece fills it. The first piece is refused like any
    request, the next ones are patient. An answered piece is copied out before another one is waited for."""
    most = queue.room.piece_rows
    starts, slices = iter(range(0, rows, most)), RowSlices(request.inputs)
    parts: dict[int, dict[str, Tensor]] = {}

    async def run_one(start: int, *, patient: bool) -> None:
        take = min(most, rows - start)
        inputs = slices.take(start, take)  # in order: pieces are begun in that of their rows
        pending = await _run(queue, form, request, inputs, take, patient=patient)
        parts[start] = _copy_out(queue, form, pending)

    async def run_on() -> None:
        for start in starts:
            await run_one(start, patient=True)

    first = asyncio.ensure_future(run_one(next(starts), patient=False))
    await _all([first, *(run_on() for _ in range(PIECES_A_WORKER * queue.workers - 1))])
    return join_parts([parts[start] for start in sorted(parts)])


async def _all(works: Sequence[Awaitable[None]]) -> None:
    """Runs all of it; on the first failure gives the rest up and raises that."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _copy_out(queue: BatchQueue, form: Form, pending: Pending) -> dict[str, Tensor]:
    try:
        outputs, _ = form.read(queue, pending.place, pending.rows)
        return {n: Tensor(t.dtype, t.shape, bytes(t.data)) for n, t in outputs.items()}
    finally:
        queue.release(pending)


def _wanted(outputs: dict[str, Tensor], request: InferRequest) -> dict[str, Tensor]:
    return choose(outputs, request.outputs) if request.outputs else outputs
