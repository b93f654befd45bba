"""A queue and its workers in one process: the test is the worker, and dies where it likes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvloop

from fastserve._ext.batch_ring import BatchRing
from fastserve.engine import batch_queue
from fastserve.engine.batch_queue import BatchQueue, QueueMetrics
from fastserve.engine.counters import counters_of
from fastserve.engine.engine import SCHEDULER, Engine
from fastserve.engine.schedulers.batch_sender import sealed_config
from fastserve.engine.schedulers.plain import PlainScheduler
from fastserve.errors import Kind
from fastserve.metrics.registry import Registry
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import config_json, parse_model_config
from fastserve.repository.version import Version
from fastserve.request import InferRequest
from fastserve.tensor import DTYPES, Tensor
from fastserve.workers.arena import Arena, plan_geometry

uvloop.run(asyncio.sleep(0))  # libuv opens a pipe with the process's first loop, for good
DIED = "the worker died"


def run(work: Any) -> None:
    uvloop.run(asyncio.wait_for(work, 120))


@contextlib.contextmanager
def deadlines_pass(queues: Iterable[BatchQueue], by_s: float = 3600) -> Iterator[None]:
    """To these every deadline until then is over: no test waits for one, and none is over too soon."""
    with pytest.MonkeyPatch.context() as patch:
        later = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + int(by_s * 1e9))
        patch.setattr(batch_queue, "time", later)
        for queue in queues:
            queue._expire()  # what its timer does when it rings, which is set by the real clock
        yield


def floats(*rows: float) -> Tensor:
    return Tensor(DTYPES["float32"], (len(rows), 1), np.array(rows, np.float32).tobytes())


class Desk:
    """An engine with one version, whose workers are `ring`s the test moves by hand.

    `sealed`: batches are formed before the queue.
    """

    def __init__(self, *, sealed: bool = False, **config: Any) -> None:
        tensor = {"dtype": "float32", "shape": [1]}
        whole = {"backend": "python", "inputs": {"x": tensor}, "outputs": {"y": tensor}, "max_batch_size": 2}
        parsed = parse_model_config({**whole, "max_queue_rows": 8, "instances": 2, **config})
        self.version = Version("m", 1, Path(), parsed)
        self.arena = Arena.create(
            plan_geometry(
                sealed_config(config_json(parsed)) if sealed else config_json(parsed),
                self.version.inputs,
                self.version.outputs,
            )
        )
        self.registry = Registry()
        meters = QueueMetrics(self.registry, "m", 1, 0, self.arena.geometry.max_rows)
        self.queue = BatchQueue(self.arena, 0, self.version.inputs, self.version.outputs, meters)
        SCHEDULER.put(self.version, PlainScheduler(self.queue))
        counters_of(self.version).queues.append(self.queue)
        self.workers: list[BatchRing] = [self.arena.ring(worker=i) for i in range(2)]
        self.engine = Engine(Catalog())

    def ask(self, *rows: float, deadline_ns: int = 0) -> asyncio.Task[list[float]]:
        return asyncio.ensure_future(
            self._ask(InferRequest({"x": floats(*rows)}, (), deadline_ns=deadline_ns))
        )

    async def _ask(self, request: InferRequest) -> list[float]:
        response = await self.engine.infer(self.version, request)
        try:
            return np.frombuffer(response.outputs["y"].data, np.float32).tolist()
        finally:
            response.release()

    async def take(self, worker: int) -> int:
        """A batch for that worker, as soon as there is one."""
        while (slot := self.workers[worker].take()) < 0:
            await asyncio.sleep(0)
        return slot

    def compute(self, worker: int, slot: int) -> list[float]:
        """Double every row of the slot; what was in it."""
        ring = self.workers[worker]
        rows = ring.batch_rows(slot)
        at, to = (ring.column_span(slot, 0, output)[0] for output in (False, True))
        x = np.frombuffer(self.arena.memory, np.float32, rows, at)
        np.frombuffer(self.arena.memory, np.float32, rows, to)[:] = 2 * x
        return x.tolist()

    async def answer(self, worker: int) -> list[float]:
        slot = await self.take(worker)
        rows = self.compute(worker, slot)
        self.workers[worker].publish(slot)
        return rows

    def die(self, worker: int, *, alone: bool = False) -> tuple[int, int]:
        """Do the owner's part once the worker is dead: (retried, failed) batches."""
        return self.queue.ring.worker_died(worker, 1 if alone else 2, Kind.UNAVAILABLE.value, DIED)


@contextlib.asynccontextmanager
async def desk(**config: Any) -> AsyncIterator[Desk]:
    """An open desk; afterwards nothing may be outstanding."""
    made = Desk(**config)
    made.queue.open()
    try:
        yield made
        assert made.queue.ring.outstanding() == 0
        assert made.queue.ring.slab_pages_used() == 0
        assert (made.queue.waiting, made.queue.unreleased) == (0, 0)
    finally:
        made.queue.close()
        made.arena.close()
        made.registry.close()
