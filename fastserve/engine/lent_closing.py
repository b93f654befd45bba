"""Clients' device memory that workers are letting go of: a client frees it once it is told that it is
unregistered, and memory that is freed under an open handle is undefined by CUDA.

    number = closing.begin()                     what a worker is told with the handle, and says when it has
    await closing.all_closed(asked, number)      each has said so, or is dead; or it has taken too long

Numbered, since a handle may be registered again, opened again and taken back again before a worker has said
that it has closed it the first time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

log = logging.getLogger(__name__)

# A worker lets go of it when what it has on its device has landed. One that takes longer hangs.
LIMIT_S = 5.0
Who = tuple[int, int, int]  # version, part, worker


class LentClosing:
    """What is being waited for."""

    def __init__(self) -> None:
        self._waited: dict[tuple[Who, int], asyncio.Future[None]] = {}
        self._last = 0

    def begin(self) -> int:
        """The number of one more that is taken back."""
        self._last += 1
        return self._last

    async def all_closed(self, asked: Iterable[Who], number: int) -> None:
        """Returns when all of those that were asked have closed it, and after LIMIT_S in any case."""
        loop = asyncio.get_running_loop()
        waited = {(who, number) for who in asked}
        futures = [self._waited.setdefault(key, loop.create_future()) for key in waited]
        if not futures:
            return
        _, late = await asyncio.wait(futures, timeout=LIMIT_S)
        if late:
            log.warning("%d workers still have a client's GPU memory open that is unregistered", len(late))
        for key in waited:  # nobody waits for the late ones any more: who hangs for ever keeps nothing here
            if self._waited.get(key) in late:
                del self._waited[key]

    def closed(self, who: Who, number: int) -> None:
        """One has closed it."""
        self._settle([(who, number)])

    def gone(self, who: Who) -> None:
        """A worker is dead, and what it had open is closed."""
        self._settle([key for key in self._waited if key[0] == who])

    def version_gone(self, version: int) -> None:
        """All of its workers have ended, and need not have said anything."""
        self._settle([key for key in self._waited if key[0][0] == version])

    def _settle(self, keys: list[tuple[Who, int]]) -> None:
        for key in keys:
            future = self._waited.pop(key, None)
            if future is not None and not future.done():
                future.set_result(None)
