"""Where generators and async functions of a script run: beside the batch loop of their worker.

    line = AsyncLine(limit_ms=1000, overdue=...)
    line.start(coroutine)                           from the batch loop: beside one another, on an event loop
    async with line.limited(): await ...            there: DEADLINE_EXCEEDED for what takes longer
    await line.take_turn(next, generator, END)      one step at a time, in a thread

A step that does not give way (a loop in a generator, a blocking call in an async function) cannot be ended
from here: `overdue` is called, and the worker is killed with all that it runs, as with a batch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import TracebackType
from typing import Any

from fastserve.errors import Kind, ServeError

LOOKS = 4  # at the steps, in the time of one
LOOK_LEAST_S, LOOK_MOST_S = 0.05, 1.0


class AsyncLine:
    """An event loop in a thread of its own, and a thread in which generators take turns, a step at a time."""

    def __init__(self, *, limit_ms: int, overdue: Callable[[], None]) -> None:
        """`limit_ms` bounds a step, 0: nothing does."""
        self.limit_ms = limit_ms
        self._overdue = overdue
        self._loop = asyncio.new_event_loop()
        self._senders = ThreadPoolExecutor(32, thread_name_prefix="script-send")  # they wait for slow readers
        self._loop.set_default_executor(self._senders)
        self._turns = ThreadPoolExecutor(1, thread_name_prefix="script-step")
        self._thread = threading.Thread(target=self._loop.run_forever, name="script", daemon=True)
        self._thread.start()
        self._step_s = self._beat_s = 0.0  # when the step, the loop's next turn, was begun; 0: none is
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="script-watch", daemon=True)
        if limit_ms:
            self._watcher.start()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine, which handles its own exceptions."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def limited(self) -> StepLimit:
        """Bound what is awaited inside, on the loop."""
        return StepLimit(self.limit_ms)

    async def take_turn(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a step, of which one runs at a time."""
        context = copy_context()  # of the request, for what it calls
        return await self._loop.run_in_executor(self._turns, context.run, self._run_step, step, arguments)

    def close(self) -> None:
        """Stop the loop and the threads."""
        self._closed.set()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)
        for threads in (self._turns, self._senders):
            threads.shutdown(wait=False, cancel_futures=True)

    def _run_step(self, step: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        self._step_s = time.monotonic()
        try:
            return step(*arguments)
        finally:
            self._step_s = 0.0

    def _watch(self) -> None:
        """Look whether a step, or a turn of the loop, takes too long; in a thread of its own."""
        limit_s = self.limit_ms / 1000
        pause_s = min(max(limit_s / LOOKS, LOOK_LEAST_S), LOOK_MOST_S)
        while not self._closed.wait(pause_s):
            now = time.monotonic()
            if any(began and now - began > limit_s for began in (self._step_s, self._beat_s)):
                self._overdue()
                return
            if not self._beat_s:
                self._beat_s = now
                self._loop.call_soon_threadsafe(self._beat)

    def _beat(self) -> None:
        self._beat_s = 0.0


class StepLimit:
    """`async with`: cancel the task in it after so many milliseconds, and raise ServeError DEADLINE_EXCEEDED;
    0: never."""

    def __init__(self, limit_ms: int) -> None:
        self._limit_ms, self._expired = limit_ms, False
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        if self._limit_ms:
            task = asyncio.current_task()
            assert task is not None
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._limit_ms / 1000, self._expire, task)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._expired and isinstance(error, asyncio.CancelledError):
            text = f"the model took longer than run_timeout_ms {self._limit_ms}"
            raise ServeError(Kind.DEADLINE_EXCEEDED, text) from None

    def _expire(self, task: asyncio.Task[Any]) -> None:
        self._expired = True
        task.cancel()
