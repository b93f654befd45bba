"""Looks at the object store of the repository every `storage.poll_s` seconds, beside the event loop.

Each look is a daemon thread of its own, so a store that stalls delays neither a request nor the server's end.
A look that fails changes nothing that is served: the log says why, once, and the metrics show it until a look
succeeds. What has changed lies in the mirror's folder then, where the repository finds it as in any folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fastserve.metrics import Registry, names
from fastserve.repository.catalog import Catalog
from fastserve.repository.storage import Mirror
from fastserve.repository.storage_sources import StorageError
from fastserve.repository.version import VersionState

log = logging.getLogger(__name__)


class StorageWatch:
    """Keeps a mirror like its store while the server runs; without a mirror it does nothing."""

    def __init__(self, mirror: Mirror | None, poll_s: float, catalog: Catalog, registry: Registry) -> None:
        self._mirror, self._poll_s = mirror, poll_s
        self._catalog, self._registry = catalog, registry
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin, on the running loop, if there is a mirror."""
        if self._mirror is not None:
            self._show(self._mirror)
            self._task = asyncio.create_task(self._run(self._mirror))

    async def close(self) -> None:
        """Stop looking; a look that runs is left to itself. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self, mirror: Mirror) -> None:
        looks = self._registry.counters(names.STORAGE_LOOKS)
        counters = {result: looks.of(result) for result in names.STORAGE_RESULTS}
        while True:
            await asyncio.sleep(self._poll_s)
            mirror.release(self._used())
            before = mirror.trouble
            # While a look takes longer than the time between two, the metrics say how old things may be.
            result = await _in_thread(partial(_look, mirror), self._poll_s, partial(self._show, mirror))
            counters[result].add()
            if mirror.trouble and mirror.trouble != before:
                log.error("%s: what is there stays served: %s", mirror.uri, mirror.trouble)
            elif before and not mirror.trouble:
                log.info("%s is read again", mirror.uri)
            self._show(mirror)

    def _used(self) -> set[Path]:
        models = self._catalog.models.values()
        versions = [version for model in models for version in model.versions.values()]
        return {version.folder for version in versions if version.state is not VersionState.END}

    def _show(self, mirror: Mirror) -> None:
        gauges = self._registry.gauges
        late = time.time() - mirror.synced_at > 2 * self._poll_s + 1
        gauges(names.STORAGE_STALE).of().set(bool(mirror.trouble) or late)
        gauges(names.STORAGE_SYNCED).of().set(mirror.synced_at)
        gauges(names.STORAGE_BYTES).of().set(mirror.bytes)


def _look(mirror: Mirror) -> str:
    """Return how a look ended. Runs in a thread."""
    try:
        return "changed" if mirror.sync() else "unchanged"
    except (StorageError, OSError) as error:
        mirror.trouble = str(error)
    except Exception as error:  # what nobody foresaw must not end the watch
        log.exception("%s could not be looked at", mirror.uri)
        mirror.trouble = type(error).__name__
    return "failed"


async def _in_thread(work: Callable[[], str], look_s: float, still: Callable[[], None]) -> str:
    """Return the result of `work`, which runs in a daemon thread; call `still` while it does."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()

    def tell(result: str) -> None:
        if not ended.done():
            ended.set_result(result)

    def run() -> None:
        result = work()
        with contextlib.suppress(RuntimeError):  # the loop has closed: the server has ended
            loop.call_soon_threadsafe(tell, result)

    threading.Thread(target=run, name="storage", daemon=True).start()
    while True:
        done, _ = await asyncio.wait([ended], timeout=look_s)
        if done:
            return ended.result()
        still()
