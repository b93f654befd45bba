"""A service without worker processes: its transformers run in threads of this process.

It is for systems other than Linux, for breakpoints and for profilers. Batches, limits, hooks and errors are
those of a service with workers. Elements and results are the callers' own objects, neither encoded nor
copied, and a transformer that crashes or hangs takes the process along. Nothing here needs a compiled module.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fastserve.backends.model_errors import explain, kind_of
from fastserve.backends.transformer import RowSpec, TransformerBackend, VectorTransformer
from fastserve.errors import Kind, ServeError, internal

STOPPED = "the service was stopped"
BatchHook = Callable[[Any], Awaitable[Any]]


class ServiceSizes(Protocol):
    """Limits of a service's batches."""

    max_batch_size: int
    timeout_seconds: float
    max_queue_size: int
    instances: int


class TransformerThread:
    """One transformer, whose methods are all called in a thread of its own."""

    def __init__(self, config: Mapping[str, Any], number: int) -> None:
        self._pool = ThreadPoolExecutor(1, f"transformer {number}")
        self._backend = TransformerBackend(config, Path(), number)

    async def load(self, kind: type[VectorTransformer], init_kwargs: Mapping[str, Any]) -> None:
        """Construct the transformer. Raises ServeError with what its constructor raised."""
        try:
            await self._run(self._backend.construct, kind, init_kwargs)
        except Exception as error:
            raise failure_of(error) from error

    async def apply(self, batch: Any) -> Any:
        """Run a batch through the transformer's three steps. Raises what they raise."""
        return await self._run(self._backend.apply, batch)

    async def close(self) -> None:
        """Call the transformer's own `close`, and end the thread."""
        try:
            await self._run(self._backend.close)
        finally:
            self._pool.shutdown(wait=False)

    def abandon(self) -> None:
        """End the thread once it is idle; the loop of its callers is gone."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)


class ThreadBatch:
    """One batch: elements and the futures of their callers."""

    def __init__(self) -> None:
        self.elements: list[Any] = []
        self.answers: list[asyncio.Future[Any]] = []
        self.timer: asyncio.TimerHandle | None = None

    def drop_cancelled(self) -> None:
        """Leave out elements whose callers have gone."""
        kept = [pair for pair in zip(self.elements, self.answers, strict=True) if not pair[1].done()]
        self.elements = [element for element, _ in kept]
        self.answers = [answer for _, answer in kept]

    def fail(self, error: BaseException) -> None:
        for answer in self.answers:
            if not answer.done():
                answer.set_exception(error)

    def finish(self, results: Any) -> None:
        """Give each caller its result. Raises ServeError for another number of results."""
        if len(results) != len(self.answers):
            said = f"transform returned {len(results)} results for {len(self.answers)} elements"
            raise internal(said)
        for answer, result in zip(self.answers, results, strict=True):
            if answer.done():
                continue
            if isinstance(result, BaseException):
                answer.set_exception(failure_of(result, Kind.INTERNAL))
            else:
                answer.set_result(result)


class ThreadBatcher:
    """Batches of one service, on one event loop. A full queue makes callers wait, in the order they came."""

    def __init__(
        self,
        sizes: ServiceSizes,
        row: RowSpec | None,
        out_row: RowSpec | None,
        hooks: tuple[BatchHook, BatchHook] | None,
    ) -> None:
        self._sizes, self._hooks = sizes, hooks
        self._row, self._out_row = (None, None) if hooks else (row, out_row)
        self._turn, self._slots = asyncio.Lock(), asyncio.Semaphore(sizes.max_queue_size + 1)
        self._before, self._after = asyncio.Lock(), asyncio.Lock()  # batches keep their order
        self._idle: deque[TransformerThread] = deque()
        self._threads: list[TransformerThread] = []
        self._wanted: asyncio.Semaphore | None = None
        self._open: ThreadBatch | None = None
        self._under_way: dict[asyncio.Task[None], ThreadBatch] = {}
        self._closed = False

    async def start(
        self, kind: type[VectorTransformer], init_kwargs: Mapping[str, Any], device: Mapping[str, Any]
    ) -> None:
        """Construct the transformers. Raises ServeError where one cannot be."""
        self._threads = [TransformerThread(device, number) for number in range(self._sizes.instances)]
        try:
            await asyncio.gather(*(thread.load(kind, init_kwargs) for thread in self._threads))
        except BaseException:
            self.abandon()
            raise
        self._idle.extend(self._threads)
        self._wanted = asyncio.Semaphore(len(self._threads))

    async def do_one(self, x: Any) -> Any:
        """Return the result for one element. Raises ServeError, and ValueError for a row of another shape."""
        if self._row is not None:
            x = self._row.unpack(bytes(self._row.pack(x)))
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        async with self._turn:
            if self._open is None and not self._closed:
                await self._slots.acquire()
            if self._closed:
                raise ServeError(Kind.UNAVAILABLE, STOPPED)
            batch = self._open or self._begin()
            batch.elements.append(x)
            batch.answers.append(answer)
            if len(batch.elements) == self._sizes.max_batch_size:
                self._seal()
        return await answer

    def close(self) -> None:
        """Fail all callers that still wait."""
        self._closed = True
        gone = ServeError(Kind.UNAVAILABLE, STOPPED)
        for batch in filter(None, (self._open, *self._under_way.values())):
            if batch.timer is not None:
                batch.timer.cancel()
            batch.fail(gone)
        self._open = None
        for _ in range(self._sizes.max_queue_size + 1):
            self._slots.release()  # who waits for one finds that the service is closed

    async def stop(self, grace_s: float) -> None:
        """End the transformers; one that runs is waited for at most so long, and then left behind."""
        self.close()
        ending = [asyncio.ensure_future(thread.close()) for thread in self._threads]
        _, late = await asyncio.wait([*ending, *self._under_way], timeout=grace_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*ending, *self._under_way, return_exceptions=True)

    def abandon(self) -> None:
        """End the threads once they are idle, without their loop."""
        for thread in self._threads:
            thread.abandon()

    def _begin(self) -> ThreadBatch:
        batch = self._open = ThreadBatch()
        loop = asyncio.get_running_loop()
        batch.timer = loop.call_later(self._sizes.timeout_seconds, self._seal)
        return batch

    def _seal(self) -> None:
        batch, self._open = self._open, None
        if batch is None:
            return
        if batch.timer is not None:
            batch.timer.cancel()
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._under_way[task] = batch
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._under_way[task]
        self._slots.release()

    async def _run(self, batch: ThreadBatch) -> None:
        try:
            batch.drop_cancelled()
            if not batch.elements:
                return
            elements: Any = batch.elements
            if self._hooks is not None:
                async with self._before:
                    elements = await self._hooks[0](elements)
            results = await self._apply(elements)
            if self._hooks is not None:
                async with self._after:
                    results = await self._hooks[1](results)
            batch.finish(results)
        except Exception as error:
            batch.fail(error)

    async def _apply(self, elements: Any) -> Any:
        """Run a batch in a thread that is idle. Raises ServeError."""
        assert self._wanted is not None
        async with self._wanted:
            thread = self._idle.popleft()
            try:
                results = await thread.apply(self._stacked(elements))
            except Exception as error:
                raise failure_of(error) from error
            finally:
                self._idle.append(thread)
        return self._unstacked(results, len(elements))

    def _stacked(self, elements: Any) -> Any:
        if self._row is None:
            return elements
        rows = np.stack(elements)
        rows.flags.writeable = False
        return rows

    def _unstacked(self, results: Any, rows: int) -> Any:
        if self._out_row is None:
            return results
        wanted = (rows, *self._out_row.shape)
        found = np.asarray(results)
        if found.shape != wanted:
            shapes = f"{list(found.shape)}, out_row says {list(wanted)}"
            raise internal(f"transform returned an array of shape {shapes}")
        typed = np.empty(wanted, self._out_row.dtype)
        np.copyto(typed, found, casting="same_kind")
        return list(typed)


def failure_of(error: BaseException, kind: Kind | None = None) -> ServeError:
    """Return what callers are given for an exception of a transformer; that is its cause."""
    found = ServeError(kind or kind_of(error), explain(error))
    found.__cause__ = error
    return found
