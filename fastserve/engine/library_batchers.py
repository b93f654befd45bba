"""Batchers of the library: one element in, one result out, over the same queues as the server.

    ElementBatcher   plain Python objects, each in a slab of its own
    RowBatcher       numpy rows, written into the batch's column
    HookedBatcher    batches are made in this process, for preprocess and postprocess there

Everything runs on one event loop. A full queue makes callers wait, in the order they came.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from fastserve._ext.fast_path import Ticket
from fastserve.backends.model_errors import explain
from fastserve.backends.transformer import RowSpec
from fastserve.codec.object_codecs import CODECS, ObjectCodec
from fastserve.engine.batch_queue import BatchQueue, QueueMetrics
from fastserve.engine.supervision import DeathPolicy
from fastserve.errors import Kind, ServeError, internal, unpack_status
from fastserve.metrics.registry import Registry
from fastserve.tensor import TensorSpec
from fastserve.workers.arena import Arena, Geometry
from fastserve.workers.group import WorkerGroup

log = logging.getLogger(__name__)

SLAB_PAGE = 4096
SLAB_BYTES = 1 << 30  # a bound, not a cost: pages that are never touched take no memory
DIED = "the worker process died while it ran this batch"
NOBODY = "no worker of this service is alive: {}"
NEVER_NS = 1 << 62
STOPPED = "the service was stopped"
BatchHook = Callable[[Any], Awaitable[Any]]


class BatcherSizes(Protocol):
    """Limits of a service's batches."""

    max_batch_size: int
    timeout_seconds: float
    max_queue_size: int
    instances: int


class Batcher:
    """Base of the batchers: an arena, a queue, and callers who wait for a slot."""

    inputs: dict[str, TensorSpec] = {}
    outputs: dict[str, TensorSpec] = {}
    delay_ns = 0

    def __init__(self, sizes: BatcherSizes, codec: ObjectCodec = CODECS["msgpack"]) -> None:
        self._sizes, self._codec = sizes, codec
        self.delay_ns = int(sizes.timeout_seconds * 1e9)
        self._arena: Arena | None = None
        self._queue: BatchQueue | None = None
        self._deaths: DeathPolicy | None = None
        self._registry = Registry()

    @property
    def config(self) -> dict[str, Any]:
        """Config of the workers: tensors, batch size, warm-up."""
        return {"max_batch_size": self._sizes.max_batch_size, "warmup": "off"}

    def make_arena(self, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]) -> Arena:
        """Make the arena of this service, after its workers have loaded."""
        sizes = self._sizes
        geometry = Geometry(
            slots=sizes.max_queue_size + 1,
            max_rows=sizes.max_batch_size,
            inputs=tuple(spec.row_bytes or 0 for spec in self.inputs.values()),
            outputs=tuple(spec.row_bytes or 0 for spec in self.outputs.values()),
            slab_pages=SLAB_BYTES // SLAB_PAGE,
            max_delay_ns=self.delay_ns,
            workers=sizes.instances,
            fronts=1,
        )
        self._arena = Arena.create(geometry)
        return self._arena

    def open(self, workers: WorkerGroup) -> None:
        """Listen for answers on the running loop."""
        assert self._arena is not None
        sizes = self._sizes
        metrics = QueueMetrics(self._registry, "service", 1, self.delay_ns, sizes.max_batch_size)
        self._queue = BatchQueue(self._arena, 0, self.inputs, self.outputs, metrics)
        self._queue.open()
        self._deaths = DeathPolicy(
            "service", self._queue, lambda: workers.alive, DIED, lambda: NOBODY.format(workers.trouble)
        )
        self._deaths.open()

    def close(self) -> None:
        """Fail all callers that still wait."""
        if self._queue is not None:
            queue, self._queue = self._queue, None
            queue.close()
        if self._deaths is not None:
            deaths, self._deaths = self._deaths, None
            deaths.close()
        if self._arena is not None:
            self._arena.close()
        self._registry.close()

    def worker_died(self, worker: int) -> None:
        """Retry or fail the batches of a dead worker."""
        if self._deaths is not None:
            self._deaths.worker_died(worker)

    def worker_back(self) -> None:
        """Handle the return of a worker."""
        if self._deaths is not None:
            self._deaths.worker_back()

    async def do_one(self, x: Any) -> Any:
        """The result for one element."""
        raise NotImplementedError

    # --- for subclasses

    @property
    def queue(self) -> BatchQueue:
        if self._queue is None:
            raise ServeError(Kind.UNAVAILABLE, STOPPED)
        return self._queue

    async def _lease(self) -> int:
        """Reserve a lease for one row, first come, first served."""
        try:
            return await self.queue.reserve(1)
        except ServeError:
            if self._queue is None:
                raise ServeError(Kind.UNAVAILABLE, STOPPED) from None
            raise

    async def _result(self, lease: int) -> Any:
        """Submit a written lease and return its result."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        ticket = self.queue.submit(lease, 1, self._deliver, 0, answer)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._queue is not None:
                self._queue.cancel(ticket)
            raise

    def _deliver(self, ticket: Ticket, error: ServeError | None) -> None:
        answer: asyncio.Future[Any] = ticket.context
        result = None
        if error is None:
            result, error = self._take(ticket)
        if answer.done():
            return
        if error is not None:
            answer.set_exception(self._told(error))
        else:
            answer.set_result(result)

    def _told(self, error: ServeError) -> ServeError:
        """Return the error for a caller; that of a closed queue speaks of model versions and is replaced."""
        return error if self._queue is not None else ServeError(Kind.UNAVAILABLE, STOPPED)

    def _take(self, ticket: Ticket) -> tuple[Any, ServeError | None]:
        """Return the result of an answered lease, and release the lease."""
        try:
            return self._read(ticket.lease), None
        except ServeError as error:
            return None, error
        finally:
            self.queue.release(ticket)

    def _read(self, lease: int) -> Any:
        """Return the worker's answer. Raises ServeError when that is an error."""
        ring = self.queue.ring
        offset, nbytes = ring.answer_slab(lease)
        if offset == 0:
            raise ServeError(Kind.RESOURCE_EXHAUSTED, "no room for the result")
        status = ring.lease_status(lease)
        try:
            result = self._codec.decode(bytes(ring.slab(offset, nbytes)))
        except Exception as error:  # pickle runs the code of the result's class
            raise internal(f"the result cannot be read here: {explain(error)}") from error
        if status:
            raise ServeError(unpack_status(status)[0], str(result))
        return result

    def _write(self, lease: int, payload: bytes) -> None:
        """Write an element's bytes into its lease. Raises ServeError without room."""
        ring = self.queue.ring
        offset = ring.allocate_slab(len(payload))
        if offset == 0:
            raise ServeError(Kind.RESOURCE_EXHAUSTED, f"no room for an element of {len(payload)} bytes")
        ring.slab(offset, len(payload), True)[:] = payload
        ring.attach_slab(lease, offset, len(payload))


class ElementBatcher(Batcher):
    """Plain Python objects."""

    async def do_one(self, x: Any) -> Any:
        """Return the result for x. Raises TypeError, naming the type, when x cannot be encoded."""
        payload = self._codec.encode(x)
        lease = await self._lease()
        try:
            self._write(lease, payload)
        except BaseException:
            self.queue.abandon(lease, 1)
            raise
        return await self._result(lease)


class RowBatcher(Batcher):
    """numpy rows of one shape and dtype; with `out_row` results are rows too."""

    def __init__(
        self,
        sizes: BatcherSizes,
        row: RowSpec,
        out_row: RowSpec | None,
        codec: ObjectCodec = CODECS["msgpack"],
    ) -> None:
        super().__init__(sizes, codec)
        self._row = row
        self._out_row = out_row
        self.inputs = {"row": row.spec}
        self.outputs = {} if out_row is None else {"row": out_row.spec}

    @property
    def config(self) -> dict[str, Any]:
        described = {"inputs": self._describe(self._row)}
        if self._out_row is not None:
            described["outputs"] = self._describe(self._out_row)
        return {**super().config, **described}

    async def do_one(self, x: Any) -> Any:
        """Return the result for x. Raises ValueError when x is not a row of that shape and dtype."""
        packed = self._row.pack(x)
        lease = await self._lease()
        try:
            self.queue.ring.input_rows(lease, 1, 0)[:] = packed
        except BaseException:
            self.queue.abandon(lease, 1)
            raise
        return await self._result(lease)

    def _read(self, lease: int) -> Any:
        if self._out_row is None:
            return super()._read(lease)
        return self._out_row.unpack(bytes(self.queue.ring.output_rows(lease, 1, 0)))

    def _describe(self, row: RowSpec) -> dict[str, Any]:
        return {"row": {"dtype": row.dtype, "shape": list(row.shape)}}


class HookedBatch:
    """A batch that is made in this process: elements, their leases, and the futures of their callers."""

    __slots__ = ("answers", "elements", "leases", "timer")

    def __init__(self) -> None:
        self.elements: list[Any] = []
        self.leases: list[int] = []
        self.answers: list[asyncio.Future[Any]] = []
        self.timer: asyncio.TimerHandle | None = None

    def fail(self, error: BaseException) -> None:
        """Fail all callers of the batch."""
        for answer in self.answers:
            if not answer.done():
                answer.set_exception(error)

    def finish(self, results: Any) -> None:
        """Give each caller its result."""
        for answer, result in zip(self.answers, results, strict=True):
            if not answer.done():
                answer.set_result(result)


class HookedBatcher(Batcher):
    """Rows are reserved as elements come and committed once `preprocess` is done with the batch: until
    then no worker can take it, and after it is sealed no element can join."""

    def __init__(
        self,
        sizes: BatcherSizes,
        preprocess: BatchHook,
        postprocess: BatchHook,
        codec: ObjectCodec = CODECS["msgpack"],
    ) -> None:
        super().__init__(sizes, codec)
        self.delay_ns = NEVER_NS  # sealed here, by the timer of its first element
        self._preprocess = preprocess
        self._postprocess = postprocess
        self._open_slots: dict[int, HookedBatch] = {}
        self._before, self._after = asyncio.Lock(), asyncio.Lock()  # batches keep their order
        self._tasks: set[asyncio.Task[None]] = set()

    async def do_one(self, x: Any) -> Any:
        lease = await self._lease()
        slot = lease >> 16
        batch = self._open_slots.get(slot)
        loop = asyncio.get_running_loop()
        if batch is None:
            batch = self._open_slots[slot] = HookedBatch()
            batch.timer = loop.call_later(self._sizes.timeout_seconds, self._seal, slot)
        answer: asyncio.Future[Any] = loop.create_future()
        batch.elements.append(x)
        batch.leases.append(lease)
        batch.answers.append(answer)
        if len(batch.elements) == self._sizes.max_batch_size:
            self._seal(slot)
        return await answer

    def close(self) -> None:
        super().close()
        gone = ServeError(Kind.UNAVAILABLE, STOPPED)
        for batch in self._open_slots.values():
            if batch.timer is not None:
                batch.timer.cancel()
            batch.fail(gone)
        for task in self._tasks:
            task.cancel()

    def _seal(self, slot: int) -> None:
        batch = self._open_slots.pop(slot)
        if batch.timer is not None:
            batch.timer.cancel()
        self.queue.ring.seal(batch.leases[0])
        self._spawn(self._send(batch))

    async def _send(self, batch: HookedBatch) -> None:
        try:
            async with self._before:
                payload = self._codec.encode(await self._preprocess(batch.elements))
                self._write(batch.leases[0], payload)
        except Exception as error:
            for lease in batch.leases:
                self.queue.abandon(lease, 1)
            batch.fail(error)
            return
        for lease in batch.leases:
            self.queue.submit(lease, 1, self._deliver, 0, batch)

    def _deliver(self, ticket: Ticket, error: ServeError | None) -> None:
        batch: HookedBatch = ticket.context
        if ticket.lease != batch.leases[0]:  # the first lease answers for all
            if error is None:
                self.queue.release(ticket)
            return
        result = None
        if error is None:
            result, error = self._take(ticket)
        if error is not None:
            batch.fail(self._told(error))
        else:
            self._spawn(self._finish(batch, result))

    async def _finish(self, batch: HookedBatch, result: Any) -> None:
        try:
            async with self._after:
                batch.finish(await self._postprocess(result))
        except Exception as error:
            batch.fail(error)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
