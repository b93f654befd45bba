"""Work on large bodies in a thread, beside the event loop, which serves others meanwhile.

    offload = Offload()
    body = await offload(len(data), read, data)

Reading a body of 90 MB takes a quarter of a second, unpacking one from gzip or printing a reply of that size
takes longer. Such work runs in a thread. The compiled readers and writers and zlib release the GIL while they
work, and code that makes Python objects releases it often. Small work runs on the loop, since the way to a
thread and back costs 0.1 ms. An Offload runs one piece of work at a time: large bodies take at most one core,
and the memory needed to read one is needed once.

Work may read borrowed memory, so a call returns only after its work has ended, even when the caller is
cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar

OFFLOAD_BYTES = 1 << 20

"""From here on: 2 ms of numbers, 8 ms of the strings that are slowest to read."""

P = ParamSpec("P")

T = TypeVar("T")


class Offload:
    """Runs large pieces of work in a thread, one at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def __call__(self, nbytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work`, in a thread when it has OFFLOAD_BYTES or more to read."""
        if nbytes < OFFLOAD_BYTES:
            return work(*args, **kwargs)
        async with self._turn:
            return await outlast(
                asyncio.get_running_loop().run_in_executor(None, lambda: work(*args, **kwargs))
            )


async def outlast(work: Awaitable[T]) -> T:
    """Return the result of `work`. If the caller is cancelled, finish `work` first, then re-raise."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await _wait_out(running)
        raise
    finally:
        # A traceback keeps this frame: with the future in it, error and body would live until a collection.
        del work, running


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and return when all have ended, however they ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def gather_or_cancel(works: Iterable[Awaitable[T]]) -> list[T]:
    """Run all works and return their results; on the first failure cancel the rest and raise it."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(*tasks)


def run_through(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end now, without a task. It waits for nothing: it is under OFFLOAD_BYTES."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise RuntimeError("this has to wait for something")


async def _wait_out(running: asyncio.Future[T]) -> None:
    """Return when `running` has ended, however often the caller is cancelled."""
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:
            continue
    if not running.cancelled():
        running.exception()  # looked at: nobody else will
