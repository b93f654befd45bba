"""Private memory of a server's front process, watched while a test puts it under load."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable

from tests import proc

LOOK_S = 0.01


def own_bytes(pid: int) -> int:
    """Return RssAnon, which no other process shares."""
    found = re.search(r"RssAnon:\s+(\d+) kB", proc.read(pid, "status"))
    assert found
    return int(found[1]) << 10


class MemoryWatch:
    """The peak of a process's private memory, and the statuses of small requests sent meanwhile.

    `ask` sends one of these, every `ask_every_s`, and returns its status.
    """

    def __init__(self, pid: int, ask: Callable[[], int], ask_every_s: float) -> None:
        self._pid, self._ask_once, self._ask_every_s = pid, ask, ask_every_s
        self._over = threading.Event()
        self.peak_bytes = own_bytes(pid)
        self.small: Counter[int] = Counter()
        self._threads = [threading.Thread(target=work) for work in (self._look, self._ask)]

    def __enter__(self) -> MemoryWatch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self.peak_bytes = max(self.peak_bytes, own_bytes(self._pid))

    def _ask(self) -> None:
        while not self._over.wait(self._ask_every_s):
            self.small[self._ask_once()] += 1
