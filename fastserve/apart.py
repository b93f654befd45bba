"""Work on what is large, beside the event loop: while it goes on, everybody else is served.

    body = await apart(len(data), read, data)

Reading a body of 90 MB takes a quarter of a second, unpacking one from gzip or printing a reply of that size
more. Such work runs in a thread. The compiled readers and writers and zlib let go of the GIL while they
work, and what makes Python objects gives it away often; what is small stays where it is, since the way to a
thread and back costs 0.1 ms. One at a time: large bodies have no more than one core of a process, and what
they take in memory while they are read is there once.

The memory a piece of work looks at may be borrowed, so nobody is told of its end before it has ended: not
even a caller that is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

APART_BYTES = 1 << 20
"""From here on: 2 ms of numbers, 8 ms of the strings that are slowest to read."""

P = ParamSpec("P")
T = TypeVar("T")


class Apart:
    """One at a time, for the event loop it is used on."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def __call__(self, nbytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises; `nbytes` is what it has to look at."""
        if nbytes < APART_BYTES:
            return work(*args, **kwargs)
        async with self._turn:
            return await outlast(
                asyncio.get_running_loop().run_in_executor(None, lambda: work(*args, **kwargs))
            )


async def outlast(work: Awaitable[T]) -> T:
    """What it comes to. It is gone through with if its caller is cancelled, who hears of that afterwards."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await _outlast(running)
        raise


def run_through(work: Coroutine[Any, Any, None]) -> None:
    """All of it now, without a task: for what waits for nothing, since it looks at less than APART_BYTES."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise RuntimeError("this has to wait for something")


async def _outlast(running: asyncio.Future[T]) -> None:
    """Return when it has ended, however often that is cancelled."""
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:
            continue
    if not running.cancelled():
        running.exception()  # looked at: nobody else will
