"""The plain scheduler: requests go straight into the queue; batches form in shared memory as rows arrive.

It checks tensors against the version's specs, reserves rows, writes the inputs where the worker will read
them, waits, and returns the outputs. A request larger than a batch is split, and its answers joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from functools import partial

from fastserve._ext.fast_path import Ticket
from fastserve.engine.arena_io import ArenaIO, choose, join_parts, tensors_bytes
from fastserve.engine.batch_queue import BatchQueue
from fastserve.engine.engine import Engine, Scheduler
from fastserve.engine.input_checks import RowSlices, check_inputs, empty_outputs
from fastserve.engine.schedulers.decoupled import only_response, stream_on_queue
from fastserve.errors import ServeError, invalid
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.tensor import Tensor
from fastserve.util.offload import gather_or_cancel

Answer = asyncio.Future["Ticket"]
# Of a request that is split: one piece runs and one is ready when it is done. Of short pieces more are ready,
# so that neither side sleeps after each: 10,000 of 0.05 ms then take 0.6 s of the front's CPU and not 1.7.
PIECES_A_WORKER, SHORT_PIECES_A_WORKER = 2, 4
SHORT_PIECE_S = 0.002
MOST_BATCHES = 10_000
"""Batches that one request may fill without `max_request_rows`: each takes 0.05 to 0.1 ms of CPU."""


class PlainScheduler(Scheduler):
    """Sends requests directly to the queue."""

    def __init__(self, queue: BatchQueue) -> None:
        self.queue = queue
        queue.in_turns = True

    async def infer(self, engine: Engine, version: Version, request: InferRequest) -> InferResponse:
        return await run_on_queue(self.queue, version, request)

    async def stream(
        self, engine: Engine, version: Version, request: InferRequest
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
    """Run one request directly on a queue; see `Engine.infer`."""
    rows = check_inputs(version, request.inputs)
    if rows == 0 and version.batching:
        return InferResponse(_wanted(empty_outputs(version), request))
    if queue.decoupled:
        return await only_response(stream_on_queue(queue, version, request))
    if not version.batching or rows <= queue.max_rows:
        ticket = await _run(queue, request, request.inputs, rows if version.batching else 1)
        return _respond(queue, ticket, request)
    _check_pieces(rows, version.config.most_rows, queue.room.piece_rows)
    return InferResponse(_wanted(await _run_split(queue, request, rows), request))


def _check_pieces(rows: int, most: int, piece_rows: int) -> None:
    """Raise ServeError INVALID_ARGUMENT for a request of more than `most` rows, where that is 0 of more than
    fill MOST_BATCHES."""
    if 0 < most < rows:
        raise invalid(f"Task size {rows} is larger than maximum input batch size {most}")
    if not most and rows > MOST_BATCHES * piece_rows:
        raise invalid(
            f"{rows} rows are more than {MOST_BATCHES} batches of {piece_rows}, the most of one request "
            "unless max_request_rows allows more"
        )


async def _run(
    queue: BatchQueue,
    request: InferRequest,
    inputs: dict[str, Tensor],
    rows: int,
    *,
    patient: bool = False,
) -> Ticket:
    """Reserve and write one lease, submit it, and return its answer."""
    lease = await queue.reserve(rows, request.deadline_ns, request.account, patient=patient)
    write = partial(ArenaIO(queue).write_inputs, lease, rows, inputs, request)
    await queue.fill(lease, rows, tensors_bytes(inputs), write)
    answer, ticket = submit_written(queue, request, rows, lease)
    try:
        return await answer
    except asyncio.CancelledError:
        queue.cancel(ticket)
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            queue.release(ticket)
        raise
    finally:
        del answer  # else an error, this frame in its traceback, and the answer that holds it are a circle


def submit_written(queue: BatchQueue, request: InferRequest, rows: int, lease: int) -> tuple[Answer, Ticket]:
    """Submit a written lease. The future's result is the ticket, which the caller releases."""
    answer: Answer = asyncio.get_running_loop().create_future()
    ended = None if request.trace is None else queue.trace_lease(request.trace, lease, rows)

    def done(ticket: Ticket, error: ServeError | None) -> None:
        if ended is not None:
            ended()
        if answer.cancelled():  # cancelled in the very turn the answer came
            if error is None:
                queue.release(ticket)
        elif error is None:
            answer.set_result(ticket)
        else:
            answer.set_exception(error)

    try:
        return answer, queue.submit(lease, rows, done, request.deadline_ns, None, request.account)
    except BaseException:
        queue.abandon(lease, rows)
        raise


def _respond(queue: BatchQueue, ticket: Ticket, request: InferRequest) -> InferResponse:
    if request.times is not None:
        request.times.extend(queue.ring.times_ns(ticket.lease >> 16))
    try:
        outputs, parameters, repeated = ArenaIO(queue).read(ticket.lease, ticket.rows)
        mine = outputs if queue.requests else _wanted(outputs, request)  # whole requests say what they want
    except BaseException:
        queue.release(ticket)
        raise
    told = repeated if queue.requests else ()
    return InferResponse(mine, partial(queue.release, ticket), dict(parameters), repeated=told)


async def _run_split(queue: BatchQueue, request: InferRequest, rows: int) -> dict[str, Tensor]:
    """Run a request in pieces of at most a batch. As many are under way as keep the workers busy: more where
    the first is done within SHORT_PIECE_S. The rest of the queue is left to others. The first piece may
    be refused like any request, the next ones are patient. An answered piece is copied out before the next
    one is waited for."""
    most = queue.room.piece_rows
    starts, slices = iter(range(0, rows, most)), RowSlices(request.inputs)
    parts: dict[int, dict[str, Tensor]] = {}

    async def run_one(start: int, *, patient: bool) -> None:
        take = min(most, rows - start)
        inputs = slices.take(start, take)  # in order: pieces are begun in that of their rows
        ticket = await _run(queue, request, inputs, take, patient=patient)
        parts[start] = _copy_out(queue, ticket)

    async def run_on() -> None:
        for start in starts:
            await run_one(start, patient=True)

    async def run_first() -> None:
        began = time.monotonic()
        await run_one(next(starts), patient=False)
        short = time.monotonic() - began < SHORT_PIECE_S
        more = (SHORT_PIECES_A_WORKER - PIECES_A_WORKER) * queue.workers if short else 0
        await gather_or_cancel([run_on() for _ in range(1 + more)])

    first = asyncio.ensure_future(run_first())
    await gather_or_cancel([first, *(run_on() for _ in range(PIECES_A_WORKER * queue.workers - 1))])
    answers = [parts[start] for start in sorted(parts)]
    return await queue.offload(sum(map(tensors_bytes, answers)), join_parts, answers)


def _copy_out(queue: BatchQueue, ticket: Ticket) -> dict[str, Tensor]:
    try:
        outputs, _, _ = ArenaIO(queue).read(ticket.lease, ticket.rows)
        return {n: Tensor(t.dtype, t.shape, bytes(t.data)) for n, t in outputs.items()}
    finally:
        queue.release(ticket)


def _wanted(outputs: dict[str, Tensor], request: InferRequest) -> dict[str, Tensor]:
    return choose(outputs, request.outputs) if request.outputs else outputs
