"""The batching library: callers hand in one element each, a vectorized model sees whole batches.

    class Squares(VectorTransformer):
        def transform(self, x):                 # a list of elements, in a worker process
            return [v * v for v in x]

    async with BatchedService(max_batch_size=200) as service: ...   or start() and stop()
        y = await service.do_one(3)

    with BatchedService(max_batch_size=200) as service: ...         the same for callers who block
        y = service.submit(3).result()

It is the server's engine without a network: the same arena, ring, queues and workers. Elements are
plain Python objects (codec/safe_msgpack says which), or numpy rows of one shape, which are written once,
into the batch itself. `in_process` runs the transformer in threads of this process, on any system.

Services of callers who block run on a BackgroundLoop, an event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Awaitable, Coroutine, Generator, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastserve.backends.class_source import collect_source, typed_at_prompt
from fastserve.backends.transformer import (
    BACKEND,
    DEVICE,
    RowSpec,
    ScriptImport,
    StartedWhileImported,
    VectorTransformer,
)
from fastserve.batching.in_process import STOPPED, ThreadBatcher
from fastserve.codec.object_codecs import CODECS
from fastserve.errors import Kind, ServeError

if TYPE_CHECKING:
    from typing_extensions import Self

    from fastserve.engine.library_batchers import Batcher
    from fastserve.workers.group import WorkerGroup


log = logging.getLogger(__name__)
STOP_GRACE_S = 2.0
WORKERS_NEED_LINUX = (
    "a worker process shares its batches by memfd, eventfd and pidfd, which Linux has and {} has not; "
    "BatchedService(..., in_process=True) runs the transformer in a thread of this process"
)


class BatchedService:
    """Collects elements into batches for a VectorTransformer in a worker process.

    max_batch_size: most elements of a batch, 1 to 10000. timeout_seconds: how long the first element
    of a batch waits for company, more than 0 and at most 1. max_queue_size: batches under way, 1 to
    128; beyond them `do_one` waits. `row` and `out_row`, (shape, dtype): elements are numpy rows and
    `transform` gets one array. instances: worker processes. transport: how objects travel to them, "msgpack"
    or "pickle". in_process: no workers, but a thread for each instance; the only way on systems other than
    Linux.

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
        transport: str = "msgpack",
        in_process: bool = False,
    ) -> None:
        _check("max_batch_size", max_batch_size, 1 <= max_batch_size <= 10000, "from 1 to 10000")
        _check("timeout_seconds", timeout_seconds, 0 < timeout_seconds <= 1, "more than 0 and at most 1")
        _check("max_queue_size", max_queue_size, 1 <= max_queue_size <= 128, "from 1 to 128")
        _check("instances", instances, 1 <= instances <= 64, "from 1 to 64")
        _check("device", device, bool(DEVICE.fullmatch(device)), "cpu, cuda or cuda:N")
        _check("device_tensors", device_tensors, row is not None or not device_tensors, "false without row")
        _check("transport", transport, transport in CODECS, " or ".join(CODECS))
        if not in_process and sys.platform != "linux":
            raise RuntimeError(WORKERS_NEED_LINUX.format(sys.platform))
        self.transport, self.in_process = transport, in_process
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
        self._batcher: Batcher | ThreadBatcher | None = None
        self._group: WorkerGroup | ThreadBatcher | None = None
        self._background: BackgroundLoop | None = None

    # --- life -------------------------------------------------------------------------------------

    def start(
        self,
        worker_class: type[VectorTransformer] | None = None,
        worker_init_kwargs: Mapping[str, Any] | None = None,
    ) -> Awaitable[None]:
        """Start the workers. Outside a running loop it returns when they are ready; inside one it returns
        an awaitable at once (`do_one` waits for it too).

        Raises TypeError for a class a worker could not import or arguments that cannot be encoded, and
        ServeError, in the worker's own words, when it does not come up.
        """
        if ScriptImport.running:
            raise StartedWhileImported
        if self._order is not None:
            raise RuntimeError("this service has been started; stop() it first")
        wanted = worker_class or type(self).worker_class
        if wanted is None:
            raise TypeError("start() needs a worker_class: a subclass of VectorTransformer")
        self._order = self._make_order(wanted, worker_init_kwargs or {})
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = _current_loop()
            return _Done(self._loop.run_until_complete(self._open()))
        self._opening = asyncio.ensure_future(self._open())
        return self._opening

    def stop(self) -> Awaitable[None]:
        """Stop the workers; callers who still wait get an error. Idempotent. Inside a running loop the
        work goes on after it returned; await the result to wait for it."""
        if self._order is None:
            return _Done(None)
        self._order = None
        loop = self._loop
        here: asyncio.AbstractEventLoop | None = None
        with contextlib.suppress(RuntimeError):
            here = asyncio.get_running_loop()
        if loop is None or loop.is_closed():
            self._abandon()
        elif here is loop:
            return loop.create_task(self._close())
        elif loop.is_running():  # in another thread
            closing = asyncio.run_coroutine_threadsafe(self._stop_from_elsewhere(), loop)
            if here is not None:
                return asyncio.wrap_future(closing)
            closing.result()
            self._end_background()
        elif here is not None:
            return here.run_in_executor(None, loop.run_until_complete, self._close())
        else:
            loop.run_until_complete(self._close())
        return _Done(None)

    def __enter__(self) -> Self:
        """Start the workers for callers who block, on an event loop in a thread of its own."""
        self._background = BackgroundLoop()
        try:
            self._background.run(self.__aenter__())
        except BaseException:
            self._end_background()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._order = None
        if self._background is not None:
            self._background.run(self._stop_from_elsewhere())
        self._end_background()

    async def __aenter__(self) -> Self:
        if self._order is None:
            self.start()
        await self._ready()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    # --- elements ---------------------------------------------------------------------------------

    async def do_one(self, x: Any) -> Any:
        """Return the result for one element. Waits while max_queue_size batches are under way.

        Raises TypeError when x cannot be encoded, and ServeError for an exception of transform or an error
        that it returned for this element, for a dead worker, and UNAVAILABLE with the worker's last
        failure when no worker has come back within 10 s (`engine.supervision.NO_WORKER_LIMIT_S`).
        """
        batcher = self._batcher
        if batcher is None or self._loop is not asyncio.get_running_loop():
            batcher = await self._ready()
        return await batcher.do_one(x)

    async def do_many(self, xs: Iterable[Any], *, return_exceptions: bool = False) -> list[Any]:
        """Return the results for many elements, in order. The first failure cancels the rest and is raised,
        unless `return_exceptions`."""
        tasks = [asyncio.ensure_future(self.do_one(x)) for x in xs]
        try:
            return await asyncio.gather(*tasks, return_exceptions=return_exceptions)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def submit(self, x: Any) -> Future[Any]:
        """Return a future of the result for one element, from any thread but that of the service's event
        loop. Raises RuntimeError there, where `do_one` is awaited, and for a service that was not started."""
        return self._submit(self.do_one(x))

    def map(self, xs: Iterable[Any], *, return_exceptions: bool = False) -> list[Any]:
        """Return the results for many elements, in order, and block until then. Raises as `submit` does."""
        found: list[Any] = self._submit(self.do_many(xs, return_exceptions=return_exceptions)).result()
        return found

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

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        loop = self._loop
        try:
            if self._order is None:
                raise RuntimeError("start() the service first, or enter it: with service: ...")
            if loop is not None and loop is _running_loop():
                raise RuntimeError("this thread runs the service's event loop: await do_one() or do_many()")
            if loop is None or not loop.is_running():  # start() was called outside of one: it moves
                self._background = self._background or BackgroundLoop()
                loop = self._background.loop
            return asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError:
            work.close()
            raise

    def _end_background(self) -> None:
        background, self._background = self._background, None
        if background is not None:
            background.close()

    def _make_order(self, kind: Any, init_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if self.in_process:
            return {"class": check_class(kind), "init_kwargs": dict(init_kwargs)}
        return order_worker(kind, init_kwargs, whole=self._hooked, transport=self.transport)

    async def _ready(self) -> Batcher | ThreadBatcher:
        if self._order is None:
            raise RuntimeError("start() the service first")
        if self._loop is not asyncio.get_running_loop():
            self._move()
        if self._opening is not None:
            await asyncio.shield(self._opening)
        if self._batcher is None:
            raise ServeError(Kind.UNAVAILABLE, STOPPED)
        return self._batcher

    def _move(self) -> None:
        """Start again on the running loop, which is not the one that start() ran on: asyncio.run() makes
        one of its own. Every caller awaits the same future from here on; none sees the old batcher."""
        old, here = self._loop, asyncio.get_running_loop()
        if old is not None and old.is_running():
            raise RuntimeError(
                "this service serves another event loop that is running; make one for each loop"
            )
        order = self._order
        closing: asyncio.Future[None] | None = None
        if old is None or old.is_closed():
            self._abandon()
        else:
            closing = here.run_in_executor(None, old.run_until_complete, self._close())
        self._loop = here
        self._opening = here.create_task(self._reopen(order, closing))

    async def _reopen(self, order: dict[str, Any] | None, closing: asyncio.Future[None] | None) -> None:
        try:
            if closing is not None:
                await asyncio.shield(closing)
            await self._open()
        except asyncio.CancelledError:
            if self._opening is asyncio.current_task():  # this loop ends: the next one starts again
                self._order, self._loop = order, None
            raise

    def _abandon(self) -> None:
        """End a service whose loop was closed while it was open: nothing on that loop will run again."""
        self._opening = None
        group, self._group = self._group, None
        batcher, self._batcher = self._batcher, None
        if group is not None:
            group.abandon()
        if batcher is not None:
            batcher.close()

    async def _open(self) -> None:
        assert self._order is not None
        if self.in_process:
            return await self._open_threads(self._order)
        from fastserve.workers.group import WorkerGroup

        batcher = self._make_batcher()
        group = WorkerGroup(
            Path(self._order["transformer"]["qualname"]) / "1",
            {**self._order, **batcher.config, **self._device, "instances": self.instances},
            batcher.make_arena,
            batcher.worker_died,
            lambda worker: batcher.worker_back(),
            sys_path=[str(Path(p).resolve()) for p in sys.path],
        )
        self._group = group
        try:
            await group.start()
        except BaseException as error:
            batcher.close()
            if self._group is not group and isinstance(error, ServeError):
                raise ServeError(Kind.UNAVAILABLE, STOPPED) from error
            if self._group is group:
                self._order = self._group = None
            raise
        batcher.open(group)
        self._batcher = batcher
        log.info("%s is ready to serve", type(self).__name__)

    async def _open_threads(self, order: dict[str, Any]) -> None:
        hooks = (self.preprocess, self.postprocess) if self._hooked else None
        batcher = self._group = ThreadBatcher(self, self._row, self._out_row, hooks)
        try:
            await batcher.start(order["class"], order["init_kwargs"], self._device)
        except BaseException:
            if self._group is batcher:
                self._order = self._group = None
            raise
        self._batcher = batcher

    def _make_batcher(self) -> Batcher:
        from fastserve.engine.library_batchers import ElementBatcher, HookedBatcher, RowBatcher

        codec = CODECS[self.transport]
        if self._hooked:
            return HookedBatcher(self, self.preprocess, self.postprocess, codec)
        if self._row is not None:
            return RowBatcher(self, self._row, self._out_row, codec)
        return ElementBatcher(self, codec)

    def _close(self) -> Coroutine[Any, Any, None]:
        """Detach group and batcher at once, so that no caller finds them; return a coroutine to end them."""
        opening, self._opening = self._opening, None
        group, self._group = self._group, None
        batcher, self._batcher = self._batcher, None
        if opening is not None and group is None:
            opening.cancel()  # it has not begun
        return _end(opening, group, batcher)

    async def _stop_from_elsewhere(self) -> None:
        await self._close()


async def _end(
    opening: asyncio.Future[None] | None,
    group: WorkerGroup | ThreadBatcher | None,
    batcher: Batcher | ThreadBatcher | None,
) -> None:
    if group is not None:
        await group.stop(STOP_GRACE_S)
    if opening is not None:
        await asyncio.gather(opening, return_exceptions=True)
    if batcher is not None:
        batcher.close()


class _Done:
    """Awaitable that is already done."""

    def __init__(self, result: None) -> None:
        self._result = result

    def __await__(self) -> Generator[Any, None, None]:
        return self._result
        yield


def _check(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise ValueError(f"{name} must be {allowed}, not {value!r}")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _current_loop() -> asyncio.AbstractEventLoop:
    """Return the thread's loop, as asyncio.get_event_loop() does; make and set one if there is none."""
    policy = asyncio.get_event_loop_policy()
    try:
        return policy.get_event_loop()
    except RuntimeError:
        loop = policy.new_event_loop()
        policy.set_event_loop(loop)
        return loop


Found = TypeVar("Found")
NAME = "fastserve service"


class BackgroundLoop:
    """One loop and its thread. The kernel ends workers with the thread that started them, so it lives until
    `close`; the interpreter does not wait for it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Found]) -> Found:
        """Run a coroutine on the loop, and return its result. A caller who is interrupted cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, Found]) -> Future[Found]:
        """Start a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """Cancel what still runs, stop the loop, and end the thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed before
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()


def check_class(kind: Any) -> type[VectorTransformer]:
    """Return a transformer's class. Raises TypeError for anything else."""
    if not (isinstance(kind, type) and issubclass(kind, VectorTransformer)):
        raise TypeError(f"worker_class must be a subclass of VectorTransformer, not {kind!r}")
    return kind


def order_worker(kind: Any, kwargs: Mapping[str, Any], *, whole: bool, transport: str) -> dict[str, Any]:
    """Describe how a worker finds and constructs the class. Raises TypeError when it could not."""
    kind = check_class(kind)
    if "<locals>" in kind.__qualname__:
        raise TypeError(
            f"{kind.__qualname__} is defined inside a function; a worker can only import it from a module"
        )
    script = _script_of(kind) if kind.__module__ == "__main__" else ""
    typed = kind.__module__ == "__main__" and not script
    transformer = {
        "module": kind.__module__,
        "qualname": kind.__qualname__,
        "script": script,
        "source": collect_source(kind) if typed else "",
        "init_kwargs": CODECS[transport].encode(dict(kwargs)).hex(),
        "transport": transport,
        "whole": whole,
    }
    return {"backend": BACKEND, "transformer": transformer}


def _script_of(kind: type[VectorTransformer]) -> str:
    """Return the path of the script that defines a class of `__main__`; "" for one typed at a prompt."""
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    return "" if typed_at_prompt(kind) or not script.is_file() else str(script.resolve())
