"""Reads /proc of processes that may end at any time; returns nothing for one that is gone.

A process that is listed may be gone when it is read, so read /proc/PID directly only of one known to live.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path


def read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or while it was read
        return ""


def name_of(pid: int) -> str:
    return read(pid, "comm").removesuffix("\n")


def resident() -> int:
    """Bytes of this process in memory."""
    return int(read(os.getpid(), "statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")


ZYGOTE = "fs:zygote"
"""The name of processes that tests.warm forks from; they are the suite's, not the server's."""


def children_of(pid: int) -> list[int]:
    """Return the child processes of all threads of `pid`, those that end meanwhile included."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return []
    found = (int(child) for task in tasks for child in read(pid, f"task/{task}/children").split())
    return sorted(child for child in found if name_of(child) != ZYGOTE)


CACHED_FILES = ("/dev/null", "/dev/urandom", "/proc/", "/sys/")
"""Opened once per process by whoever first needs them, and meant to stay: libuv opens /dev/null with a loop's
first connection."""


def targets(pid: int, numbers: Iterable[str]) -> dict[str, str]:
    """Where these descriptors of `pid` lead, but for those of CACHED_FILES."""
    found = {}
    for number in numbers:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{number}")
        except FileNotFoundError:  # closed meanwhile, by another thread
            continue
        if not target.startswith(CACHED_FILES):
            found[number] = target
    return found


def stop(pid: int) -> None:
    """Send SIGSTOP, and return once all threads of the process have stopped: until its main thread has run,
    the others go on."""
    os.kill(pid, signal.SIGSTOP)
    late = time.monotonic() + 60
    while any(_state_of(pid, task) not in "tT" for task in os.listdir(f"/proc/{pid}/task")):
        assert time.monotonic() < late, f"process {pid} does not stop"
        time.sleep(0.001)


def _state_of(pid: int, task: str) -> str:
    return (read(pid, f"task/{task}/stat").rpartition(")")[2].split() or ["T"])[0]  # gone: it runs no more
