"""The general door: a whole InferRequest in, an InferResponse out, for any version.

It checks tensors against the version's specs, takes places, writes the inputs where the worker will
see them, waits, and hands out the outputs. A request of more rows than a batch holds is split and
its answers joined. Dialects with a hot path of their own use the lane directly.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Sequence
from functools import partial

from fastserve.engine.door import Door
from fastserve.engine.forms import Form, form_of, join_parts
from fastserve.engine.lane import Lane, Ticket
from fastserve.engine.rows import RowSlices, check_inputs, empty_outputs
from fastserve.engine.stream import only_response, stream_on_lane
from fastserve.errors import Kind, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version
from fastserve.request import InferRequest, InferResponse
from fastserve.tensor import Tensor

Answer = asyncio.Future["Ticket"]
# Of a request that is split: one piece runs and one is ready when it is done.
PIECES_A_WORKER = 2


class Engine:
    """Runs requests on the versions of a catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    async def infer(self, version: Version, request: InferRequest) -> InferResponse:
        """Run one request. The caller releases the response.

        Raises ServeError: INVALID_ARGUMENT for inputs the version does not take, UNAVAILABLE when
        its queue is full or it is going away, DEADLINE_EXCEEDED, and what the model raised.
        """
        if isinstance(version.lane, Door):
            return await version.lane.infer(self, version, request)
        return await run_on_lane(open_lane(version), version, request)

    def stream(self, version: Version, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Run one request whose responses come one by one; none, one or many. The caller releases each, and
        closes the generator when it leaves early: that cancels the request. For a model that is not
        decoupled it is the one response of `infer`.

        An error that other responses may follow is a response with `error`. Raises ServeError, at the first
        look or later, for what ends the stream: as `infer`, or the worker died.
        """
        if isinstance(version.lane, Door):
            return version.lane.stream(self, version, request)
        return self._stream(version, request)

    async def _stream(self, version: Version, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        lane = open_lane(version)
        if not lane.decoupled:
            yield await run_on_lane(lane, version, request)
            return
        async with contextlib.aclosing(stream_on_lane(lane, version, request)) as responses:
            async for response in responses:
                yield response


async def run_on_lane(lane: Lane, version: Version, request: InferRequest) -> InferResponse:
    """One request straight on a lane, as `Engine.infer` says."""
    rows = check_inputs(version, request.inputs)
    if rows == 0 and version.batching:
        return InferResponse(_wanted(empty_outputs(version), request))
    if lane.decoupled:
        return await only_response(stream_on_lane(lane, version, request))
    form = form_of(lane)
    if not version.batching or rows <= lane.max_rows:
        ticket = await _run(lane, form, request, request.inputs, rows if version.batching else 1)
        return _respond(lane, form, ticket, request)
    if not version.config.split_large_requests:
        raise ServeError(
            Kind.INVALID_ARGUMENT,
            f"Task size {rows} is larger than maximum input batch size {lane.max_rows}",
        )
    return InferResponse(_wanted(await _run_split(lane, form, request, rows), request))


def open_lane(version: Version) -> Lane:
    """The version's lane in this process. Raises ServeError UNAVAILABLE when it has none (any more)."""
    lane = version.lane
    if not isinstance(lane, Lane):
        raise ServeError(
            Kind.UNAVAILABLE, f"version {version.number} of model {version.model} is not available"
        )
    return lane


async def _run(
    lane: Lane,
    form: Form,
    request: InferRequest,
    inputs: dict[str, Tensor],
    rows: int,
    *,
    patient: bool = False,
) -> Ticket:
    """One place: written, submitted, answered."""
    place = await lane.reserve(rows, request.deadline_ns, patient=patient)
    answer, ticket = submit_request(lane, form, request, inputs, rows, place)
    try:
        return await answer
    except asyncio.CancelledError:
        lane.cancel(ticket)
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            lane.release(ticket)
        raise
    finally:
        del answer  # else an error, this frame in its traceback, and the answer that holds it are a circle


def submit_request(
    lane: Lane, form: Form, request: InferRequest, inputs: dict[str, Tensor], rows: int, place: int
) -> tuple[Answer, Ticket]:
    """Write a reserved place and submit it. Raises ServeError; the answer is the ticket, to be released."""
    answer: Answer = asyncio.get_running_loop().create_future()

    def done(ticket: Ticket, error: ServeError | None) -> None:
        if answer.cancelled():  # cancelled in the very turn the answer came
            if error is None:
                lane.release(ticket)
        elif error is None:
            answer.set_result(ticket)
        else:
            answer.set_exception(error)

    try:
        form.write_inputs(lane, place, rows, inputs, request)
    except BaseException:
        lane.abandon(place, rows)
        raise
    return answer, lane.submit(place, rows, done, request.deadline_ns)


def _respond(lane: Lane, form: Form, ticket: Ticket, request: InferRequest) -> InferResponse:
    if request.times is not None:
        request.times.extend(lane.ring.times_ns(ticket.place >> 16))
    try:
        outputs, parameters = form.read(lane, ticket.place, ticket.rows)
    except BaseException:
        lane.release(ticket)
        raise
    mine = outputs if lane.requests else _wanted(outputs, request)  # whole requests say what they want
    return InferResponse(mine, partial(lane.release, ticket), dict(parameters))


async def _run_split(lane: Lane, form: Form, request: InferRequest, rows: int) -> dict[str, Tensor]:
    """The request in pieces of at most a batch, of which so many are under way at a time as keep the workers
    busy: the rest of the queue is for others, and no piece fills it. The first piece is refused like any
    request, the next ones are patient. An answered piece is copied out before another one is waited for."""
    most = lane.room.piece_rows
    starts, slices = iter(range(0, rows, most)), RowSlices(request.inputs)
    parts: dict[int, dict[str, Tensor]] = {}

    async def run_one(start: int, *, patient: bool) -> None:
        take = min(most, rows - start)
        inputs = slices.take(start, take)  # in order: pieces are begun in that of their rows
        ticket = await _run(lane, form, request, inputs, take, patient=patient)
        parts[start] = _copy_out(lane, form, ticket)

    async def run_on() -> None:
        for start in starts:
            await run_one(start, patient=True)

    first = asyncio.ensure_future(run_one(next(starts), patient=False))
    await _all([first, *(run_on() for _ in range(PIECES_A_WORKER * lane.workers - 1))])
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


def _copy_out(lane: Lane, form: Form, ticket: Ticket) -> dict[str, Tensor]:
    try:
        outputs, _ = form.read(lane, ticket.place, ticket.rows)
        return {n: Tensor(t.dtype, t.shape, bytes(t.data)) for n, t in outputs.items()}
    finally:
        lane.release(ticket)


def _wanted(outputs: dict[str, Tensor], request: InferRequest) -> dict[str, Tensor]:
    if not request.outputs:
        return outputs
    return {name: outputs[name] for name in request.outputs}
