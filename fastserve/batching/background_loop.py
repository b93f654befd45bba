"""An event loop in a thread of its own: services of callers who block run on it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

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
