"""What every test gets: a check that it left nothing behind, and hypothesis profiles.

After each test the process must own as many children, file descriptors and threads as before it,
and no asyncio.run may have ended with tasks still pending. Fixtures of wider scope start before
the count, so a server shared by a module is not held against its tests. The check costs about
0.1 ms. A test that must leave something says `@pytest.mark.lingers`.
"""

from __future__ import annotations

import asyncio.runners
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from fastserve.logs import LogStream
from tests import effort
from tests.alone import pytest_runtest_protocol as pytest_runtest_protocol
from tests.processes import pytest_addoption as pytest_addoption
from tests.processes import pytest_collection_modifyitems as pytest_collection_modifyitems

effort.load_profile()

# Servers and workers start by the hundred: compiled once, not by each of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

pending_tasks: list[str] = []
# Opened once per process by whoever first needs them, and meant to stay.
CACHED_FILES = ("/dev/null", "/dev/urandom", "/proc/", "/sys/")


def note_pending(loop: asyncio.AbstractEventLoop) -> None:
    pending_tasks.extend(repr(task) for task in asyncio.all_tasks(loop))
    cancel_all_tasks(loop)


# asyncio.run cancels what is left over in silence; the runner's last step is where it can be seen.
cancel_all_tasks = asyncio.runners._cancel_all_tasks
asyncio.runners._cancel_all_tasks = note_pending


def pytest_collection_finish() -> None:
    """What collecting made lives as long as the process: no collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()


@dataclass
class Belongings:
    """What the process owns at one moment."""

    children: set[str]
    descriptors: dict[str, str]
    threads: set[threading.Thread]

    @classmethod
    def count(cls) -> Belongings:
        return cls(children(), descriptors(), set(threading.enumerate()))

    def gained(self, now: Belongings) -> list[str]:
        """Judged by number, not identity: a worker that was replaced is not a leak."""
        found = []
        if len(now.children) > len(self.children):
            found.append(f"child processes {sorted(now.children - self.children)}")
        if len(now.descriptors) > len(self.descriptors):
            new = {n: now.descriptors[n] for n in now.descriptors.keys() - self.descriptors.keys()}
            found.append(f"file descriptors {new}")
        if len(now.threads) > len(self.threads):
            found.append(f"threads {sorted(t.name for t in now.threads - self.threads)}")
        return found


def children() -> set[str]:
    found: set[str] = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children") as file:
                found.update(file.read().split())
        except FileNotFoundError:  # the thread ended meanwhile
            continue
    return found


def descriptors() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the listing's own descriptor
            continue
        if not target.startswith(CACHED_FILES):
            found[number] = target
    return found


@dataclass
class Logging:
    """How this process logs. What workers are told, and what later tests see of them, depends on it."""

    streams: list[LogStream]
    levels: dict[str, int]
    hook: Any

    @classmethod
    def look(cls) -> Logging:
        root = logging.getLogger()
        ours = [handler for handler in root.handlers if isinstance(handler, LogStream)]
        levels = {name: logging.getLogger(name).level for name in ("", "fastserve", "fastserve.access")}
        return cls(ours, levels, sys.excepthook)

    def restore(self) -> None:
        root = logging.getLogger()
        for handler in root.handlers[:]:
            if isinstance(handler, LogStream) and handler not in self.streams:
                root.removeHandler(handler)
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
        sys.excepthook = self.hook


GRPCIO_ENDS_S = 2.0


@pytest.fixture
def logs_as_before() -> Iterator[None]:
    """For tests that set up logging in this process, as commands do."""
    logs = Logging.look()
    yield
    logs.restore()


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves children, descriptors, threads or asyncio tasks behind, or logging set up."""
    pending_tasks.clear()
    before, logs = Belongings.count(), Logging.look()
    yield
    if (now := Logging.look()) != logs:
        logs.restore()
        pytest.fail(f"the test left logging changed: {now}, not {logs}", pytrace=False)
    if request.node.get_closest_marker("lingers"):
        return
    gained = before.gained(Belongings.count())
    if gained:  # perhaps only waiting for the collector, which is too dear to run after every test
        gc.collect()
        gained = before.gained(Belongings.count())
    end = time.monotonic() + GRPCIO_ENDS_S
    while gained and time.monotonic() < end:  # grpcio closes its poller in a thread of its own
        time.sleep(0.01)
        gained = before.gained(Belongings.count())
    gained += [f"pending task {task}" for task in pending_tasks]
    if gained:
        pytest.fail(f"the test left behind: {'; '.join(gained)}", pytrace=False)
