"""Exclusive runs for tests that compare times: `@pytest.mark.alone`.

`make test` runs the suite in several processes at once. Most tests do not mind. One that measures how fast
something is would measure the other processes' tests, so it waits for theirs to end, and they wait for it.

Two file locks make a fair reader-writer lock: a test takes the door, then the room, then releases the door.
Ordinary tests share the room; one that is alone takes it exclusively, and holds the door while it waits, so
that it is not starved. Locks end with their process. Each checkout has its own, which other checkouts ignore.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest


class Room:
    """One process's way into it. Any two files will do as locks."""

    def __init__(self, door: Path, room: Path) -> None:
        self._paths = door, room
        self._door, self._room = (os.open(path, os.O_RDONLY) for path in self._paths)

    def reopen(self) -> None:
        """In a process that was forked: a lock is of all who share the open file."""
        self.close()
        self._door, self._room = (os.open(path, os.O_RDONLY) for path in self._paths)

    @contextlib.contextmanager
    def place(self, *, alone: bool) -> Iterator[None]:
        """Blocks until there is one."""
        fcntl.flock(self._door, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._door)
        os.close(self._room)


ROOM = Room(Path(__file__), Path(__file__).parent)  # opened before any test counts descriptors


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the test's timeout, which does not count the wait
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    with ROOM.place(alone=item.get_closest_marker("alone") is not None):
        return (yield)
