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
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from fastserve.workers.group import Backoff
from fastserve.workers.process import ENTRY, explain_exit, kill_group, worker_environment
from fastserve.workers.remote.main import WorkerOrder

log = logging.getLogger(__name__)

GRACE_S = 10.0
REMOTE_ENTRY = (*ENTRY[:-1], "fastserve.workers.remote.main")


class SupervisedWorker:
    """One place of the supervisor, and the process that fills it."""

    def __init__(self, order: WorkerOrder, entry: Sequence[str] = REMOTE_ENTRY) -> None:
        self.order, self._entry = order, entry
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
        with theirs:
            self._popen = subprocess.Popen(
                [*self._entry, str(theirs.fileno()), msgspec.json.encode(self.order).decode()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=worker_environment(0, {}),
                start_new_session=True,
            )
        self._tie, self._began_s = ours, time.monotonic()
        return os.pidfd_open(self._popen.pid)

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
