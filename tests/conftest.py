"""Applied to every test: a check that it left nothing behind, and hypothesis profiles.

After each test the process must own as many children, file descriptors and threads as before it,
and no asyncio.run may have ended with tasks still pending. Fixtures of wider scope start before
the count, so a server shared by a module does not count. The check costs about
0.1 ms. A test that must leave something says `@pytest.mark.lingers`.
"""

from __future__ import annotations

import asyncio.runners
import faulthandler
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from fastserve.util.logs import LogStream
from tests import effort, proc, processes, warm
from tests.alone import pytest_runtest_protocol as pytest_runtest_protocol
from tests.processes import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.processes import starts_processes

effort.load_profile()

# Servers and workers start by the hundred: compiled once, not by each of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

pending_tasks: list[str] = []


def note_pending(loop: asyncio.AbstractEventLoop) -> None:
    pending_tasks.extend(repr(task) for task in asyncio.all_tasks(loop))
    cancel_all_tasks(loop)


# asyncio.run cancels what is left over in silence; the runner's last step is where it can be seen.
cancel_all_tasks = asyncio.runners._cancel_all_tasks
asyncio.runners._cancel_all_tasks = note_pending


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect with the garbage collector off, and freeze the result, which stays as long as the process."""
    gc.disable()  # a sixth of the time that collecting takes
    try:
        return (yield)
    finally:
        warm.freeze_for_good()
        gc.enable()


class HangWatch:
    """Ends a process whose test hangs outside of Python, where its timeout is not heard of, and says where.

    pytest's own `faulthandler_timeout` starts and joins a thread for every test: 0.3 ms of CPU, and 3 ms on a
    busy machine. This starts one for the tests of RENEWED_S, which are given so much more."""

    RENEWED_S = 60.0

    def __init__(self, hang_s: float, stderr_fd: int) -> None:
        self._hang_s, self._stderr_fd = hang_s, stderr_fd
        self._began: tuple[int, float] = 0, 0.0  # the process, and when

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        pid, now = os.getpid(), time.monotonic()
        if self._began[0] != pid or now - self._began[1] > self.RENEWED_S:
            self._began = pid, now
            limit_s = self._hang_s + self.RENEWED_S
            faulthandler.dump_traceback_later(limit_s, exit=True, file=self._stderr_fd)


def pytest_addoption(parser: pytest.Parser) -> None:
    processes.pytest_addoption(parser)
    # The longest take 20 s; a busy machine takes several times as long.
    parser.addini("hang_s", "when the process of a test ends that does not hear its timeout", default="480")


def pytest_configure(config: pytest.Config) -> None:
    watch = HangWatch(float(config.getini("hang_s")), config.stash.get(fault_handler_stderr_fd_key, 2))
    config.pluginmanager.register(watch)


class Descriptors:
    """The open descriptors. Where one leads is dear to read: that is done once for each number that was not
    open at the last look, and for all while more are open than before."""

    _last: ClassVar[tuple[frozenset[str], frozenset[str]]] = frozenset(), frozenset()
    """The numbers at the last look, and of these those of proc.CACHED_FILES, which stay."""

    def __init__(self) -> None:
        self.numbers = open_numbers()
        known, cached = Descriptors._last
        if new := self.numbers - known:
            cached |= new - proc.targets(os.getpid(), new).keys()
        Descriptors._last = self.numbers, cached & self.numbers
        self._cached = len(Descriptors._last[1])

    def gained(self) -> dict[str, str]:
        """Descriptors that are open now and were not, if there are more than before."""
        now = open_numbers()
        if len(now) <= len(self.numbers):  # those of proc.CACHED_FILES do not become less
            return {}
        uncached = proc.targets(os.getpid(), now)
        if len(uncached) <= len(self.numbers) - self._cached:
            return {}
        return {number: uncached[number] for number in uncached.keys() - self.numbers} or uncached


def open_numbers() -> frozenset[str]:
    """Of all open descriptors, but for the zygotes' and the listing's own, which is the next that is free."""
    os.close(own := os.open("/proc/self/fd", os.O_RDONLY))
    return frozenset(os.listdir("/proc/self/fd")) - {str(own)} - warm.ZYGOTES.descriptors()


@dataclass
class Belongings:
    """Children, descriptors and threads of the process at one moment."""

    children: set[str]
    descriptors: Descriptors
    threads: set[threading.Thread]

    @classmethod
    def count(cls) -> Belongings:
        return cls(children(), Descriptors(), set(threading.enumerate()))

    def gained(self) -> list[str]:
        """Name the kinds of which there are more now, by number, not identity: a worker that was replaced is
        not a leak."""
        found = []
        if len(now := children()) > len(self.children):
            found.append(f"child processes {sorted(now - self.children)}")
        if new := self.descriptors.gained():
            found.append(f"file descriptors {new}")
        if len(threads := set(threading.enumerate())) > len(self.threads):
            found.append(f"threads {sorted(t.name for t in threads - self.threads)}")
        return found


def children() -> set[str]:
    found: set[str] = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children") as file:
                found.update(file.read().split())
        except FileNotFoundError:  # the thread ended meanwhile
            continue
    return found - warm.ZYGOTES.children()


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


SOON_S = 0.5  # the thread of a server takes milliseconds to close what its client has left
GRPCIO_ENDS_S = 30.0  # grpcio closes its poller in a thread of its own


def settle(before: Belongings, limit_s: float) -> list[str]:
    """Name what is still there after so long: look again and again, the less often, the longer it takes."""
    began, pause_s = time.monotonic(), 0.001
    while gained := before.gained():
        if time.monotonic() - began > limit_s:
            break
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return gained


@pytest.fixture
def logs_as_before() -> Iterator[None]:
    """For tests that set up logging in this process, as commands do."""
    logs = Logging.look()
    yield
    logs.restore()


@pytest.fixture(autouse=True, scope="module")
def earlier_files_are_frozen() -> None:
    """Leave what earlier files have made out of the collections of garbage in this one."""
    warm.freeze_more()


@pytest.fixture(autouse=True, scope="module")
def warm_starts(request: pytest.FixtureRequest) -> None:
    """Start the zygote before what a test owns is counted, in processes that need one."""
    if starts_processes(request.module, {"tests.conftest"}):
        warm.ZYGOTES.prepare()


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
    gained = before.gained()
    # Perhaps only waiting for the collector. What a test has made is young; to look at all takes 0.2 s
    # of CPU where torch is imported. A server's thread is given a moment before that, to close its end.
    for generation in range(len(gc.get_count())):
        if not gained:
            break
        if generation == len(gc.get_count()) - 1 and not (gained := settle(before, SOON_S)):
            break
        gc.collect(generation)
        gained = before.gained()
    if gained:
        gained = settle(before, GRPCIO_ENDS_S)
    gained += [f"pending task {task}" for task in pending_tasks]
    if gained:
        pytest.fail(f"the test left behind: {'; '.join(gained)}", pytrace=False)
