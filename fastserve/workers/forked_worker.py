"""Forked workers, as the owner sees them: a fork server for each environment, which has imported torch and
transformers, and a ForkedWorker for each worker that would have imported them for itself.

    forks = ForkServers()
    imports = forks.imports(config, environment)               "": such workers are spawned
    release = forks.hold(imports, environment)                 while a model that forks is there
    worker = forks.worker(imports, environment, on_message, on_exit)    the face of a WorkerProcess
    worker.spawn()                                             the first one starts the fork server

A server that loads models on demand forks workers of all other models too, from a process that has imported
numpy: most of the CPU time of a small model's load is an interpreter's start. There fork servers stay when
their models are unloaded.

A forked worker is a child of the owner, as a spawned one: the fork server forks twice, and the owner adopts
the orphan (PR_SET_CHILD_SUBREAPER, only while it waits for one). So it is watched and reaped like any other,
ends with its owner and outlives its fork server; the next load then starts another. Where there can be none,
workers are spawned.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

from fastserve.backends.registry import BACKENDS
from fastserve.util.logs import current_logs
from fastserve.workers.control import ControlFault
from fastserve.workers.pinning import AFFINITY
from fastserve.workers.process import (
    ENTRY,
    ORPHANS,
    THREAD_VARIABLES,
    OnExit,
    OnMessage,
    WorkerProcess,
    kill_group,
)

log = logging.getLogger(__name__)

ENTRY_FORKS: tuple[str, ...] = (*ENTRY[:-1], "fastserve.workers.fork_server")
IMPORTING = "importing {}"
# For a fork server without workers to end.
STOP_GRACE_S = 2.0
# Seconds that a fork server may take to import, and then to answer: a fork takes milliseconds of CPU time.
START_S, ANSWER_S = 600.0, 60.0

TORCH, NUMPY = "torch and transformers", "numpy"
Environment = tuple[str, frozenset[tuple[str, str]]]


def needed_imports(config: Mapping[str, Any], environment: Mapping[str, str], *, on_demand: bool) -> str:
    """Return the libraries of the fork server of workers with this config, model.yaml as plain values; "" for
    workers that are to be spawned."""
    if may_fork(config, environment):
        return TORCH
    # An `env` may be for the interpreter, and each would need a fork server; numpy reads its threads once.
    own = bool(config.get("env")) or int(config.get("threads", 1)) != 1 or bool(config.get("placement"))
    return NUMPY if on_demand and not own else ""


def may_fork(config: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Whether a worker with this config, model.yaml as plain values, may be forked by a fork server with
    torch and transformers: one of a model that needs them and computes on a CPU, whose numerical libraries
    have as many threads as `threads` says. A model whose `env` says other numbers, or that leaves them to the
    libraries (`threads: 0`), needs them read at the import."""
    entry = BACKENDS.get(str(config.get("backend")))
    if entry is None or not entry.forks or str(config.get("device") or "cpu") != "cpu":
        return False
    runtime = (config.get("text") or {}).get("runtime", "auto")
    if runtime == "numpy" or (runtime == "auto" and not entry.installed):
        return False
    threads = int(config.get("threads", 1))
    return threads > 0 and all(environment.get(name) == str(threads) for name in THREAD_VARIABLES)


def _shared_part(imports: str, environment: Mapping[str, str]) -> Environment:
    """The environment of the fork server of workers with this one: one thread for each library."""
    shared = {name: value for name, value in environment.items() if name != AFFINITY}
    return imports, frozenset({**shared, **dict.fromkeys(THREAD_VARIABLES, "1")}.items())


class ForkServers:
    """The fork servers of one owner, on its loop. `on_wait` is called when workers begin to wait for imports,
    and when they wait no more. `on_demand`: models come and go, so small ones fork too, and of each kind the
    fork server that was released last stays until `close`."""

    def __init__(
        self,
        entry: Sequence[str] = ENTRY_FORKS,
        *,
        on_wait: Callable[[], None] = lambda: None,
        on_demand: bool = False,
    ) -> None:
        self._entry, self._on_wait, self.on_demand = entry, on_wait, on_demand
        self._servers: dict[Environment, ForkServer] = {}
        self._holds: Counter[Environment] = Counter()
        self._unfit: set[Environment] = set()
        self._ending: set[asyncio.Task[None]] = set()

    def imports(self, config: Mapping[str, Any], environment: Mapping[str, str]) -> str:
        """Return the libraries of the fork server of workers with this config; "" where they are spawned."""
        return needed_imports(config, environment, on_demand=self.on_demand)

    def hold(self, imports: str, environment: Mapping[str, str]) -> Callable[..., None]:
        """Keep the fork server of `environment`, once there is one, until the returned function is called."""
        key = _shared_part(imports, environment)
        self._holds[key] += 1
        return partial(self._release, key)

    def worker(
        self, imports: str, environment: Mapping[str, str], on_message: OnMessage, on_exit: OnExit
    ) -> ForkedWorker:
        """Make a worker that has not been started."""
        return ForkedWorker(partial(self._server, imports, environment), environment, on_message, on_exit)

    async def close(self) -> None:
        """Return when every fork server that is not held has ended."""
        for key in [key for key in self._servers if not self._holds[key]]:
            self._end(key)
        while self._ending:
            await asyncio.wait(set(self._ending))

    def _server(self, imports: str, environment: Mapping[str, str]) -> ForkServer | None:
        """Find or start the fork server of an environment; None where workers are to be spawned."""
        key = _shared_part(imports, environment)
        if key in self._unfit:
            return None
        server = self._servers.get(key)
        if server is None or server.state is ForkServerState.OVER:
            unfit = partial(self._unfit.add, key)
            server = ForkServer(imports, dict(key[1]), unfit, self._on_wait, entry=self._entry)
            try:
                server.start()
            except (OSError, ControlFault) as error:
                log.warning("the fork server cannot be started, workers are spawned instead: %s", error)
                return None
            self._servers[key] = server
        return server

    def _release(self, key: Environment, *, abandon: bool = False) -> None:
        """`abandon`: without the loop, which may be closed."""
        self._holds[key] -= 1
        if self._holds[key] > 0:
            return
        del self._holds[key]
        if abandon or not self.on_demand:
            self._end(key, abandon=abandon)
            return
        for other in [one for one in self._servers if one[0] == key[0] and one != key]:
            if not self._holds[other]:
                self._end(other)

    def _end(self, key: Environment, *, abandon: bool = False) -> None:
        server = self._servers.pop(key, None)
        if server is not None:
            server.state = ForkServerState.OVER
        if server is not None and abandon:
            server.process.abandon()
        elif server is not None:
            task = asyncio.get_running_loop().create_task(server.process.stop(STOP_GRACE_S))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)


class ForkServerState(Enum):
    """Stages of a fork server's life."""

    IMPORTING = 1
    READY = 2
    OVER = 3


class ForkServer:
    """One fork server process, and the workers that wait for it."""

    def __init__(
        self,
        imports: str,
        environment: Mapping[str, str],
        on_unfit: Callable[[], None],
        on_wait: Callable[[], None],
        *,
        entry: Sequence[str],
    ) -> None:
        self.imports = imports
        self.state = ForkServerState.IMPORTING
        self.words = ""
        """How it ended, once it is over."""
        self.process = WorkerProcess(environment, self._hear, self._end, entry=entry)
        self._on_unfit, self._on_wait = on_unfit, on_wait
        self._numbers = itertools.count(1)
        self._waiting: list[ForkedWorker] = []
        self._children: dict[int, ForkedWorker] = {}  # by the number of what was asked for
        self._due: dict[int, asyncio.TimerHandle] = {}  # of what it has not answered; 0: that it is ready

    def start(self) -> None:
        """Start the process. Raises OSError, and ControlFault when it is gone."""
        self.process.spawn()
        self._expect(0, START_S)
        try:
            self.process.send({"op": "begin", "logs": current_logs(), "imports": self.imports})
        except ControlFault:
            self.process.kill("it could not be told to begin")
            raise

    def fork(self, worker: ForkedWorker) -> None:
        """Ask for a child that becomes `worker`, now or when the imports are done."""
        if self.state is ForkServerState.IMPORTING:
            self._waiting.append(worker)
            asyncio.get_running_loop().call_soon(self._on_wait)
            return
        number = next(self._numbers)
        self._children[number] = worker
        self._expect(number, ANSWER_S)
        ORPHANS.adopt()
        with contextlib.suppress(ControlFault):  # it is dying: `_end` comes
            worker.ask(number, self.process.send)

    def forget(self, worker: ForkedWorker, number: int) -> None:
        """Stop waiting for a child; it is killed when it arrives."""
        self._children.pop(number, None)
        if worker in self._waiting:
            self._waiting.remove(worker)

    def _expect(self, number: int, seconds: float) -> None:
        reason = "it did not answer"
        loop = asyncio.get_running_loop()
        self._due[number] = loop.call_later(seconds, self.process.kill, reason)

    def _met(self, number: int) -> None:
        due = self._due.pop(number, None)
        if due is not None:
            due.cancel()
            if number:
                ORPHANS.leave()

    def _hear(self, message: dict[str, Any]) -> None:
        op, number = message["op"], int(message.get("id", 0))
        worker = self._children.pop(number, None)
        self._met(number)
        if op == "ready":
            self.state = ForkServerState.READY
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                self.fork(one)
            self._on_wait()
        elif op == "unfit":
            self.state, self.words = ForkServerState.OVER, str(message.get("reason"))
            self._on_unfit()
            self._let_spawn()
        elif op == "forked" and worker is not None:
            worker.born(int(message["pid"]))
        elif op == "forked":  # nobody waits for it any more
            end_child(int(message["pid"]))
        elif op == "unforked":
            if worker is not None:
                worker.unborn(f"it could not be forked: {message.get('reason')}")
        else:
            raise ControlFault("a message that no fork server sends")

    def _let_spawn(self) -> None:
        """Have all workers that still wait spawned."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            text = "the fork server did not start, workers are spawned instead: %s"
            log.warning(text, self.words)
        for worker in waiting:
            worker.spawn_instead()
        if waiting:
            self._on_wait()

    def _end(self, words: str) -> None:
        for number in list(self._due):
            self._met(number)
        if self.state is not ForkServerState.OVER:
            self.state, self.words = ForkServerState.OVER, words
            log.error("the fork server died, its workers go on and the next one starts another: %s", words)
        children, self._children = self._children, {}
        for worker in children.values():
            worker.killed_outside = self.process.killed_outside
            worker.unborn(f"its fork server died: {self.words}")
        self._let_spawn()


class ForkedWorker(WorkerProcess):
    """A worker that a fork server has forked, or is to fork; one that is spawned where there is none."""

    def __init__(
        self,
        find: Callable[[], ForkServer | None],
        environment: Mapping[str, str],
        on_message: OnMessage,
        on_exit: OnExit,
    ) -> None:
        super().__init__(environment, on_message, on_exit)
        self._find = find
        self._server: ForkServer | None = None
        self._theirs: socket.socket | None = None  # the child's end of its line, until it is asked for
        self._number = 0
        self._pid = 0
        self._unborn = False  # it waits for its child

    @property
    def pid(self) -> int:
        """The worker's process id, 0 while there is none."""
        return self._pid or super().pid

    @property
    def running(self) -> bool:
        """From spawn until it has been reaped."""
        return self._unborn or super().running

    @property
    def waits_for(self) -> str:
        """The step that this worker waits for, as text; "" when it has started."""
        server = self._server
        if not self._unborn or server is None or server.state is not ForkServerState.IMPORTING:
            return ""
        return IMPORTING.format(server.imports)

    def kill(self, reason: str) -> None:
        """See WorkerProcess; one that has not begun never will."""
        if not self._unborn:
            super().kill(reason)
            return
        self._reason = self._reason or reason
        assert self._loop is not None
        assert self._server is not None
        self._server.forget(self, self._number)
        self._loop.call_soon(self.unborn, reason)

    def abandon(self) -> None:
        """See WorkerProcess."""
        if not self._unborn:
            super().abandon()
            return
        assert self._server is not None
        self._server.forget(self, self._number)
        self._part()

    def _begin(self, theirs: socket.socket) -> None:
        self._server = self._find()
        if self._server is None:
            super()._begin(theirs)
            return
        self._theirs, self._unborn = theirs, True
        self._server.fork(self)

    def _listen(self) -> None:
        """See WorkerProcess. Not before the fork server has told of the child, whose own line might be read
        first: a worker that is ready has a process id."""
        if not self._unborn:
            super()._listen()

    # --- messages of the fork server ------------------------------------------------------------------

    def ask(self, number: int, send: Callable[[Mapping[str, Any], Sequence[int]], None]) -> None:
        """The imports are done: asks for the child by `send`. Raises ControlFault."""
        assert self._theirs is not None
        self._number = number
        theirs, self._theirs = self._theirs, None
        with theirs:
            send({"op": "fork", "id": number, "environment": dict(self._environment)}, [theirs.fileno()])

    def born(self, pid: int) -> None:
        """Watch the child, which is this process's to reap."""
        self._unborn, self._pid = False, pid
        try:
            self._watch(os.pidfd_open(pid))
        except OSError as error:  # no descriptor is left
            end_child(pid)
            self.unborn(f"it cannot be watched: {error.strerror}")
            return
        self._listen()

    def spawn_instead(self) -> None:
        """Spawn the child instead, with the control channel that it would have had."""
        assert self._theirs is not None
        theirs, self._theirs, self._server, self._unborn = self._theirs, None, None, False
        try:
            super()._begin(theirs)
        except OSError as error:
            self.unborn(f"it could not be spawned: {error.strerror}")
            return
        self._listen()

    def unborn(self, words: str) -> None:
        """End this worker: there is no child, and will be none."""
        if self._exited is not None and not self._exited.done():
            self._part()
            self._finish(words)

    def _wait_status(self) -> int:
        return super()._wait_status() if self._popen is not None else _wait(self._pid)

    def _part(self) -> None:
        """Close everything."""
        self._unwatch()
        if self._theirs is not None:
            self._theirs.close()
            self._theirs = None
        self._unborn = False
        self._close()


def end_child(pid: int) -> None:
    """Ends a child that was forked, with its session, and reaps it. Blocks for the milliseconds of
    SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    kill_group(pid)
    _wait(pid)


def _wait(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # somebody else in this process has waited for it
        return 0
