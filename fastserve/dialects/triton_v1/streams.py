"""Work on a stream of requests: begun in order, answered in order, several under way at once.

    requests --read--> [ task 3 | task 2 | task 1 ] --answers, oldest first-->

A task runs until it first waits before the next one is begun, so what it does up to there (taking its place
in the queue, its step of a sequence) happens in the order of the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


async def run_ahead(
    requests: AsyncIterator[Asked], work: Callable[[Asked], Coroutine[Any, Any, Answered]], most: int
) -> AsyncGenerator[Answered, None]:
    """The answers of `work` in the order of `requests`, with at most `most` under way.

    What `requests` raises comes after the answers to what it gave before. Closing the generator ends whatever
    is under way.
    """
    tasks: asyncio.Queue[asyncio.Task[Answered] | None] = asyncio.Queue()
    room = asyncio.Semaphore(most)
    loop = asyncio.get_running_loop()

    async def read() -> None:
        try:
            async for request in requests:
                await room.acquire()
                tasks.put_nowait(loop.create_task(work(request)))
        finally:
            tasks.put_nowait(None)

    reader = loop.create_task(read())
    task: asyncio.Task[Answered] | None = None
    try:
        while (task := await tasks.get()) is not None:
            yield await task
            room.release()
        await reader
    finally:
        left = [tasks.get_nowait() for _ in range(tasks.qsize())]
        await _end([reader, *(one for one in (task, *left) if one is not None)])


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel what is not done, and return when all of it is."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
