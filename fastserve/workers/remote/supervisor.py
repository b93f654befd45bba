"""The supervisor of `fastserve worker`: starts remote workers of this machine, and starts again what ends.

One worker serves one port, as one version listens on each; the waits between starts are those of local
workers.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from fastserve.workers.group import Backoff
from fastserve.workers.process import ENTRY, explain_exit, kill_group, worker_environment
from fastserve.workers.remote.main import WorkerOrder

log = logging.getLogger(__name__)

GRACE_S = 10.0
REMOTE_ENTRY = (*ENTRY[:-1], "fastserve.workers.remote.main")


class SupervisedWorker:
    """One place of the supervisor, and the process that fills it. `key` is the content of a worker.key that
    is in no file."""

    def __init__(self, order: WorkerOrder, entry: Sequence[str] = REMOTE_ENTRY, *, key: bytes = b"") -> None:
        self.order, self._entry, self._key = order, entry, key
        self.starts_s = 0.0
        self._backoff, self._began_s = Backoff(), 0.0
        self._popen: subprocess.Popen[bytes] | None = None
        self._tie: socket.socket | None = None

    @property
    def pid(self) -> int:
        """The process's id, 0 where none is."""
        return self._popen.pid if self._popen is not None else 0

    def start(self) -> int:
        """Start the process; returns a pidfd, which is the caller's."""
        ours, theirs = socket.socketpair()
        with theirs, self._order() as (order, fds):
            self._popen = subprocess.Popen(
                [*self._entry, str(theirs.fileno()), msgspec.json.encode(order).decode()],
                pass_fds=[theirs.fileno(), *fds],
                stdin=subprocess.DEVNULL,
                env=worker_environment(0, {}),
                start_new_session=True,
            )
        self._tie, self._began_s = ours, time.monotonic()
        return os.pidfd_open(self._popen.pid)

    @contextmanager
    def _order(self) -> Iterator[tuple[WorkerOrder, list[int]]]:
        """The order as the process gets it. A key is read from a descriptor: everybody sees the arguments of
        a process."""
        if not self._key:
            yield self.order, []
            return
        with open(os.memfd_create("key"), "w+b") as file:
            file.write(self._key)
            file.flush()
            yield replace(self.order, key=f"/proc/self/fd/{file.fileno()}"), [file.fileno()]

    def ended(self) -> str:
        """Reap the process, which has ended; returns how, and sets when the next may start."""
        assert self._popen is not None
        assert self._tie is not None
        kill_group(self._popen.pid)
        status = self._popen.wait()
        self._tie.close()
        self._popen = self._tie = None
        now = time.monotonic()
        lost = status < 0
        self.starts_s = now + (
            self._backoff.after_death(now - self._began_s) if lost else self._backoff.after_failure()
        )
        return explain_exit(status)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if there is one."""
        if self._popen is not None:
            with suppress(ProcessLookupError):
                self._popen.send_signal(number)


class WorkerActor:
    """One remote worker on a node of a Ray cluster. Ray makes the actor, which starts the process and returns
    when that has ended. The process ends with the actor: the kernel kills it, as it does with any worker."""

    def node(self) -> str:
        """Return Ray's id of the node that it runs on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def run(self, order: str, key: bytes) -> str:
        """Run the worker of this order, a WorkerOrder in JSON, to its end; returns how it ended."""
        found = msgspec.json.decode(order, type=WorkerOrder)
        worker = SupervisedWorker(replace(found, cache=found.cache or str(default_cache())), key=key)
        pidfd = worker.start()
        try:
            line = select.poll()
            line.register(pidfd, select.POLLIN)
            line.poll()
            return worker.ended()
        finally:
            os.close(pidfd)


def default_cache() -> Path:
    """Return the folder where models are kept that a server has sent."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastserve" / "models"


class Supervisor:
    """Keeps workers running until SIGTERM or SIGINT."""

    def __init__(self, orders: Sequence[WorkerOrder]) -> None:
        self._workers = [SupervisedWorker(order) for order in orders]
        self._running: dict[int, SupervisedWorker] = {}  # by pidfd
        self._line = select.poll()
        self._stopping = False

    def run(self) -> None:
        """Run until told to stop; then the workers end their batches, and have GRACE_S for that."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        try:
            while not self._stopping:
                self._start_due()
                self._wait(self._next_start_s())
            self._end_all()
        finally:
            for worker in self._running.values():
                worker.signal(signal.SIGKILL)
            while self._running:
                self._wait(GRACE_S)

    def _stop(self, *_: Any) -> None:
        self._stopping = True

    def _start_due(self) -> None:
        for worker in self._workers:
            if not worker.pid and time.monotonic() >= worker.starts_s:
                pidfd = worker.start()
                self._running[pidfd] = worker
                self._line.register(pidfd, select.POLLIN)

    def _next_start_s(self) -> float:
        waits = [worker.starts_s - time.monotonic() for worker in self._workers if not worker.pid]
        return max(min([*waits, 1.0]), 0.0)

    def _wait(self, timeout_s: float) -> None:
        for pidfd, _ in self._line.poll(timeout_s * 1000):
            self._line.unregister(pidfd)
            worker = self._running.pop(pidfd)
            os.close(pidfd)
            words = worker.ended()
            if not self._stopping:
                log.error("the worker of %s ended: %s", worker.order.connect, words)

    def _end_all(self) -> None:
        until = time.monotonic() + GRACE_S
        for worker in self._running.values():
            worker.signal(signal.SIGTERM)
        while self._running and time.monotonic() < until:
            self._wait(until - time.monotonic())
