"""The batching library: callers hand in one element each, a vectorized model sees whole batches.

    class Squares(VectorTransformer):
        def transform(self, x):                 # a list of elements, in a worker process
            return [v * v for v in x]

    async with BatchedService(max_batch_size=200) as service: ...   or start() and stop()
        y = await service.do_one(3)

It is the server's engine without a network: the same arena, ring, queues and workers. Elements are
plain Python objects (codec/wireable says which), or numpy rows of one shape, which are written once,
into the batch itself.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

from fastserve.backends.transformer import (
    BACKEND,
    DEVICE,
    ScriptImport,
    StartedWhileImported,
    VectorTransformer,
)
from fastserve.codec.wireable import encode
from fastserve.engine.elements import Batcher, ElementBatcher, HookedBatcher, RowBatcher
from fastserve.errors import ServeError
from fastserve.workers.group import WorkerGroup
from fastserve.workers.rowspec import RowSpec

__all__ = ["BatchedService", "ServeError", "VectorTransformer"]

log = logging.getLogger(__name__)
STOP_GRACE_S = 2.0


class BatchedService:
    """Collects elements into batches for a VectorTransformer in a worker process.

    max_batch_size: most elements of a batch, 1 to 10000. timeout_seconds: how long the first element
    of a batch waits for company, more than 0 and at most 1. max_queue_size: batches under way, 1 to
    128; beyond them `do_one` waits. `row` and `out_row`, (shape, dtype): elements are numpy rows and
    `transform` gets one array. instances: worker processes.

    Override `preprocess` and `postprocess` for work on whole batches in this process.
    """

    worker_class: type[VectorTransformer] | None = None

    def __init__(
        self,
        max_batch_size: int,
        timeout_seconds: float = 0.1,
        max_queue_size: int = 32,
        *,
        row: tuple[tuple[int, ...], Any] | None = None,
        out_row: tuple[tuple[int, ...], Any] | None = None,
        instances: int = 1,
        device: str = "cpu",
        device_tensors: bool = False,
    ) -> None:
        _check("max_batch_size", max_batch_size, 1 <= max_batch_size <= 10000, "from 1 to 10000")
        _check("timeout_seconds", timeout_seconds, 0 < timeout_seconds <= 1, "more than 0 and at most 1")
        _check("max_queue_size", max_queue_size, 1 <= max_queue_size <= 128, "from 1 to 128")
        _check("instances", instances, 1 <= instances <= 64, "from 1 to 64")
        _check("device", device, bool(DEVICE.fullmatch(device)), "cpu, cuda, cuda:N or simulated")
        _check("device_tensors", device_tensors, row is not None or not device_tensors, "false without row")
        self.max_batch_size = max_batch_size
        self.timeout_seconds = timeout_seconds
        self.max_queue_size = max_queue_size
        self.instances = instances
        self._device = {"device": device, "device_tensors": device_tensors}
        self._row = None if row is None else RowSpec.of(*row)
        self._out_row = None if out_row is None else RowSpec.of(*out_row)
        self._order: dict[str, Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Future[None] | None = None
        self._batcher: Batcher | None = None
        self._group: WorkerGroup | None = None

    # --- life -------------------------------------------------------------------------------------

    def start(
        self,
        worker_class: type[VectorTransformer] | None = None,
        worker_init_kwargs: Mapping[str, Any] | None = None,
    ) -> Awaitable[None]:
        """Start the workers. Outside a running loop it returns when they are ready; inside one it
        returns at once, and what it returns can be awaited (`do_one` waits for it too).

        Raises TypeError for a class a worker could not import or arguments that cannot travel, and
        ServeError, in the worker's own words, when it does not come up.
        """
        if ScriptImport.running:
            raise StartedWhileImported
        if self._order is not None:
            raise RuntimeError("this service has been started; stop() it first")
        wanted = worker_class or type(self).worker_class
        if wanted is None:
            raise TypeError("start() needs a worker_class: a subclass of VectorTransformer")
        self._order = _worker_order(wanted, worker_init_kwargs or {}, whole=self._hooked)
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = _current_loop()
            return _Done(self._loop.run_until_complete(self._open()))
        self._opening = asyncio.ensure_future(self._open())
        return self._opening

    def stop(self) -> Awaitable[None]:
        """Stop the workers; callers who still wait get an error. Idempotent. Inside a running loop the
        work goes on after it returned, and what it returns can be awaited."""
        if self._order is None:
            return _Done(None)
        self._order = None
        loop = self._loop
        assert loop is not None
        if loop.is_closed():
            self._abandon()
            return _Done(None)
        if loop.is_running():
            return loop.create_task(self._close())
        return _Done(loop.run_until_complete(self._close()))

    async def __aenter__(self) -> BatchedService:
        if self._order is None:
            self.start()
        await self._ready()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    # --- elements ---------------------------------------------------------------------------------

    async def do_one(self, x: Any) -> Any:
        """The result for one element. Waits while max_queue_size batches are under way.

        Raises TypeError when x cannot travel, and ServeError: what transform raised for the batch,
        what it returned for this element, or that the worker died.
        """
        batcher = self._batcher
        if batcher is None or self._loop is not asyncio.get_running_loop():
            batcher = await self._ready()
        return await batcher.do_one(x)

    async def do_many(self, xs: Iterable[Any], *, return_exceptions: bool = False) -> list[Any]:
        """The results for many elements, in order; the first failure cancels the rest and is raised,
        unless exceptions are wanted as results."""
        tasks = [asyncio.ensure_future(self.do_one(x)) for x in xs]
        try:
            return await asyncio.gather(*tasks, return_exceptions=return_exceptions)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def preprocess(self, x: Any) -> Any:
        """Override to work on a batch, a list of elements, before the worker gets it. In this process."""
        return x

    async def postprocess(self, x: Any) -> Any:
        """Override to work on a batch's results; returns one item for each element. In this process."""
        return x

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _hooked(self) -> bool:
        mine, plain = type(self), BatchedService
        return mine.preprocess is not plain.preprocess or mine.postprocess is not plain.postprocess

    async def _ready(self) -> Batcher:
        if self._order is None:
            raise RuntimeError("start() the service first")
        if self._loop is not asyncio.get_running_loop():
            await self._move()
        if self._opening is not None:
            await asyncio.shield(self._opening)
        assert self._batcher is not None
        return self._batcher

    async def _move(self) -> None:
        """Another loop than the one start() ran on, as asyncio.run() makes one: start again there."""
        old, self._loop = self._loop, asyncio.get_running_loop()
        order = self._order
        if old is not None and not old.is_closed():
            await asyncio.to_thread(old.run_until_complete, self._close())
        else:
            self._abandon()
        self._order = order
        self._opening = asyncio.ensure_future(self._open())

    def _abandon(self) -> None:
        """The loop was closed with the service open: nothing on it will ever run again."""
        group, self._group = self._group, None
        batcher, self._batcher = self._batcher, None
        if group is not None:
            group.abandon()
        if batcher is not None:
            batcher.close()

    async def _open(self) -> None:
        assert self._order is not None
        batcher = self._make_batcher()
        group = WorkerGroup(
            Path(self._order["transformer"]["qualname"]) / "1",
            {**self._order, **batcher.config, **self._device, "instances": self.instances},
            batcher.make_arena,
            lambda worker: batcher.worker_died(worker, group.alive),
            lambda worker: None,
            sys_path=[str(Path(p).resolve()) for p in sys.path],
        )
        self._group = group
        try:
            await group.start()
        except BaseException:
            self._order = self._group = None
            batcher.close()
            raise
        batcher.open()
        self._batcher = batcher
        log.info("%s is ready to serve", type(self).__name__)

    def _make_batcher(self) -> Batcher:
        if self._hooked:
            return HookedBatcher(self, self.preprocess, self.postprocess)
        if self._row is not None:
            return RowBatcher(self, self._row, self._out_row)
        return ElementBatcher(self)

    async def _close(self) -> None:
        opening, self._opening = self._opening, None
        group, self._group = self._group, None
        if group is not None:
            await group.stop(STOP_GRACE_S)
        if opening is not None:
            await asyncio.gather(opening, return_exceptions=True)
        batcher, self._batcher = self._batcher, None
        if batcher is not None:
            batcher.close()


class _Done:
    """Awaitable, and done."""

    def __init__(self, result: None) -> None:
        self._result = result

    def __await__(self) -> Generator[Any, None, None]:
        return self._result
        yield


def _check(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise ValueError(f"{name} must be {allowed}, not {value!r}")


def _worker_order(kind: type[VectorTransformer], kwargs: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """How a worker finds and constructs the class. Raises TypeError when it could not."""
    if not (isinstance(kind, type) and issubclass(kind, VectorTransformer)):
        raise TypeError(f"worker_class must be a subclass of VectorTransformer, not {kind!r}")
    if "<locals>" in kind.__qualname__:
        raise TypeError(
            f"{kind.__qualname__} is defined inside a function; a worker can only import it from a module"
        )
    script = ""
    if kind.__module__ == "__main__":
        script = getattr(sys.modules["__main__"], "__file__", None) or ""
        if not script:
            raise TypeError(
                f"{kind.__qualname__} was typed into a prompt; a worker can only import it from a file"
            )
        script = str(Path(script).resolve())
    transformer = {
        "module": kind.__module__,
        "qualname": kind.__qualname__,
        "script": script,
        "init_kwargs": encode(dict(kwargs)).hex(),
        "whole": whole,
    }
    return {"backend": BACKEND, "transformer": transformer}


def _current_loop() -> asyncio.AbstractEventLoop:
    """The thread's loop, made and set when there is none: the same one asyncio.get_event_loop() gives."""
    policy = asyncio.get_event_loop_policy()
    try:
        return policy.get_event_loop()
    except RuntimeError:
        loop = policy.new_event_loop()
        policy.set_event_loop(loop)
        return loop
