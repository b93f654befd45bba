"""Worker processes that several models share, as the owner sees them: one process for each name, device and
instance, and in it a thread for each worker that would have a process of its own.

    shared = SharedWorkers()
    worker = shared.thread_worker(key, title, environment, on_message, on_exit)  the face of a WorkerProcess
    worker.spawn()                                                               the first starts the process

A thread worker has a control channel, an arena and a thread of its own (thread_host.py): it loads, warms up,
takes batches and leaves while the others work. The end of the process is common: a crash, a kill, and a batch
that is ended from outside end all of its workers, and each group starts its own again. A worker without
batches in its hands is never a reason to end the others: the owner lets go of it, and its thread ends when
its work does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

from fastserve._ext.shared_metrics import Gauge
from fastserve.errors import invalid
from fastserve.metrics.registry import Family
from fastserve.util.logs import current_logs
from fastserve.util.rate_limited_log import run_all
from fastserve.workers.control import ControlChannel, ControlFault
from fastserve.workers.process import (
    ENTRY,
    HANGUP_GRACE_S,
    KILL_WAIT_S,
    Child,
    OnExit,
    OnMessage,
    WorkerProcess,
)

log = logging.getLogger(__name__)

ENTRY_SHARED: tuple[str, ...] = (*ENTRY[:-1], "fastserve.workers.thread_host")
# For an empty process to end.
STOP_GRACE_S = 2.0
OTHER_ENVIRONMENT = (
    "shared_worker {!r} runs with another environment ({}): models that share a worker have the same "
    "env and threads"
)


class SharedWorkerKey(NamedTuple):
    """A shared process: the name that configs give it, its device, and its number among those of that
    device."""

    name: str
    device: str = "cpu"
    gpu: int = -1
    number: int = 0

    @property
    def title(self) -> str:
        """The process as logs and metrics name it."""
        where = f"@{self.gpu}" if self.gpu >= 0 else "" if self.device == "cpu" else f"@{self.device}"
        return f"{self.name}{where}#{self.number}"


class SharedWorkers:
    """The shared processes of one owner, on its loop. `counts` shows how many workers are in each."""

    def __init__(self, counts: Family[Gauge] | None = None, entry: Sequence[str] = ENTRY_SHARED) -> None:
        self._entry, self._counts = entry, counts
        self._processes: dict[SharedWorkerKey, _SharedProcess] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def thread_worker(
        self,
        key: SharedWorkerKey,
        title: str,
        environment: Mapping[str, str],
        on_message: OnMessage,
        on_exit: OnExit,
    ) -> ThreadWorker:
        """Make a worker of the process `key`, which its first worker starts."""
        return ThreadWorker(partial(self._find, key, environment), title, on_message, on_exit)

    async def close(self) -> None:
        """Return when every process that has no worker left has ended."""
        while self._ending:
            await asyncio.wait(set(self._ending))

    def _find(self, key: SharedWorkerKey, environment: Mapping[str, str]) -> _SharedProcess:
        """Find or make a process. Raises ServeError INVALID_ARGUMENT for one with another environment."""
        shared = self._processes.get(key)
        if shared is None or not shared.open:
            shared = self._processes[key] = _SharedProcess(key, environment, self._entry, self._changed)
        elif shared.environment != environment:
            names = {n for n, v in shared.environment.items() ^ environment.items()}
            text = OTHER_ENVIRONMENT.format(key.name, ", ".join(sorted(names)))
            raise invalid(text)
        return shared

    def _changed(self, shared: _SharedProcess, workers: int) -> None:
        """Count the workers of a process; stop it when it is empty."""
        current = self._processes.get(shared.key) is shared
        if self._counts is not None and current:
            self._counts.of(shared.key.title).set(workers)
        if workers or not shared.open:
            return
        shared.open = False
        if current:
            del self._processes[shared.key]
        task = asyncio.get_running_loop().create_task(shared.process.stop(STOP_GRACE_S))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class _SharedProcess:
    """One process and its workers."""

    def __init__(
        self,
        key: SharedWorkerKey,
        environment: Mapping[str, str],
        entry: Sequence[str],
        on_change: Callable[[_SharedProcess, int], None],
    ) -> None:
        self.key, self.environment = key, environment
        self.process = WorkerProcess(environment, self._hear, self._end, entry=entry)
        self.open = True
        self._workers: dict[int, ThreadWorker] = {}
        self._last = 0
        self._on_change = on_change

    def admit(self, worker: ThreadWorker, line: socket.socket) -> int:
        """Start the worker's thread; returns its number here. Raises OSError where no process can be started,
        and ControlFault when it is gone."""
        if not self.process.running:
            self.process.spawn()
        self._last += 1
        told = {"op": "join", "id": self._last, "title": self.key.title, "logs": current_logs()}
        self.process.send(told, [line.fileno()])
        self._workers[self._last] = worker
        self._on_change(self, len(self._workers))
        return self._last

    def leave(self, number: int) -> None:
        """Remove a worker; no effect when it has left."""
        if self._workers.pop(number, None) is not None:
            self._on_change(self, len(self._workers))

    def occupied_beside(self, worker: ThreadWorker) -> bool:
        """Whether another worker than this loads or runs a batch."""
        return any(one.occupied for one in self._workers.values() if one is not worker)

    def _hear(self, message: dict[str, Any]) -> None:
        worker = self._workers.get(message.get("id", 0))
        if message["op"] not in ("freed", "left"):
            raise ControlFault("a message that is neither freed nor left")
        if worker is not None:
            worker.freed() if message["op"] == "freed" else worker.over("it has left")

    def _end(self, words: str) -> None:
        self.open = False
        run_all(list(self._workers.values()), methodcaller("over", words))


class ThreadWorker(Child):
    """A worker that is a thread of a shared process."""

    def __init__(
        self, shared: Callable[[], _SharedProcess], title: str, on_message: OnMessage, on_exit: OnExit
    ) -> None:
        super().__init__(on_message, on_exit)
        self._find, self._title = shared, title
        self._shared: _SharedProcess | None = None
        self._number = 0
        self._serving = False
        self.occupied = False

    @property
    def pid(self) -> int:
        """Process id of the shared process, 0 when there is none."""
        return self._shared.process.pid if self._shared is not None else 0

    @property
    def running(self) -> bool:
        """True from spawn until the thread has ended or was let go of."""
        return self._control is not None

    def spawn(self) -> None:
        """Start the thread. Raises OSError, and ServeError for a process with another environment."""
        shared = self._find()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control = ControlChannel(ours, owner=True)
        try:
            with theirs:
                self._number = shared.admit(self, theirs)
        except ControlFault as fault:
            control.close()
            raise OSError(0, str(fault)) from fault
        except BaseException:
            control.close()
            raise
        self._shared, self._control = shared, control
        self._exited = asyncio.get_running_loop().create_future()
        control.watch(self._hear, self._lose)

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message to the thread. Raises ControlFault when it cannot arrive."""
        self._serving = self._serving or message["op"] == "serve"
        super().send(message, fds)

    def occupy(self, occupied: bool) -> bool:
        """Note whether it does what may take long, with the interpreter's lock perhaps; whether another in
        the process does."""
        self.occupied = occupied
        return self._shared is not None and self._shared.occupied_beside(self)

    def kill(self, reason: str) -> None:
        """Ends the process where batches are in this thread's hands, and else lets go of the thread."""
        if self._control is None or self._shared is None:
            return
        if self._serving:
            self._shared.process.kill(f"{self._title}: {reason}")
            return
        log.warning(
            "%s, in shared worker %s, is left to itself: %s", self._title, self._shared.key.title, reason
        )
        asyncio.get_running_loop().call_soon(self.over, f"killed: {reason}")

    async def stop(self, grace_s: float) -> None:
        """Asks it to leave, and ends it after `grace_s` seconds; returns when it has left. It has that time
        also when nobody waits for it any more: ending it may end the others in its process."""
        if self._control is None:
            return
        with contextlib.suppress(ControlFault):  # a line that is closed is of one that is leaving
            self.send({"op": "stop"})
        late = f"it did not stop within {grace_s:g} s"
        try:
            stopped = await self.wait(grace_s)
        except asyncio.CancelledError:
            self._kill_in(grace_s, late)
            raise
        if not stopped:
            self.kill(late)
            await self.wait(KILL_WAIT_S)

    def abandon(self) -> None:
        """Ends the whole process, without the loop."""
        if self._control is not None and self._shared is not None:
            self._shared.open = False
            self._shared.process.abandon()
            self._control.close()
            self._control = None

    # --- what the process says ----------------------------------------------------------------------

    def freed(self) -> None:
        """Note that the thread has let go of its arena."""
        self._serving = False

    def over(self, words: str) -> None:
        """End this worker: its thread has ended, or its process."""
        if self._control is None or self._shared is None or self._exited is None:
            return
        self._control.drain(self._hear)
        self._control.close()
        self._control = None
        if self._hangup is not None:
            self._hangup.cancel()
        self.killed_outside = self._shared.process.killed_outside
        self._exited.set_result(None)
        self._shared.leave(self._number)
        self._on_exit(words)

    def _lose(self, reason: str) -> None:
        if reason:
            self.kill(f"it sent {reason}")
            return
        # It leaves, or its process dies: the message of either arrives in a moment.
        self._kill_in(HANGUP_GRACE_S, "it closed its control line")

    def _kill_in(self, seconds: float, reason: str) -> None:
        """Kill it after so long, unless it has left by then."""
        if self._hangup is not None:
            self._hangup.cancel()
        if self.running:
            self._hangup = asyncio.get_running_loop().call_later(seconds, self.kill, reason)


def place_in(config: Mapping[str, Any], number: int) -> SharedWorkerKey | None:
    """The shared process of worker `number` of a version, None for one of its own; `config` is model.yaml as
    plain values. The first workers of all models on a device share one, their second workers another: a
    model's own workers are never in one process, and one may die without the other."""
    name = config.get("shared_worker")
    if not name:
        return None
    places = config.get("places") or ()
    number += int(config.get("first_instance") or 0)
    if not places:
        return SharedWorkerKey(name, number=number)
    mine = places[number]["device"], places[number]["gpu"]
    before = sum((one["device"], one["gpu"]) == mine for one in places[:number])
    return SharedWorkerKey(name, *mine, before)
