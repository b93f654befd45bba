"""Longest turn of this process's event loop, in CPU time of its thread.

CPU time excludes waiting for clients and for other processes on a busy machine.
"""

from __future__ import annotations

import asyncio
import time


class Turns:
    """The longest turn of the running loop since it was asked last."""

    def __init__(self) -> None:
        self._longest, self._began, self._over = 0.0, time.thread_time(), False
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        now = time.thread_time()
        self._longest, self._began = max(self._longest, now - self._began), now
        if not self._over:
            asyncio.get_running_loop().call_later(0.0005, self._turn)

    def longest_s(self) -> float:
        self._turn()
        found, self._longest = self._longest, 0.0
        return found

    def close(self) -> None:
        self._over = True
