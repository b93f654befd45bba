"""One worker process: spawned, watched by a pidfd, stopped, explained. It does not know what a worker does.

Spawned, never forked: the front process has threads and an event loop, and a CUDA context must not
be inherited (hardening R11). The child gets one descriptor, its end of the control channel; it leads a
session of its own, so that Ctrl-C reaches the owner alone, and what it leaves behind when it dies
(a model's own subprocesses) can be ended with it.

The pidfd tells of a death within one turn of the loop, without a thread and without SIGCHLD, and
names the process beyond doubt: a pid may be reused, a pidfd is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastserve.settings.server_settings import PASSWORD_VARIABLE
from fastserve.workers.control import ControlChannel, ControlFault

log = logging.getLogger(__name__)

OnMessage = Callable[[dict[str, Any]], None]
OnExit = Callable[[str], None]

# -P: the folder the server was started in must not shadow numpy in the worker (3.11 on).
ENTRY: tuple[str, ...] = (
    sys.executable,
    *(("-P",) if sys.version_info >= (3, 11) else ()),
    "-m",
    "fastserve.workers.main",
)
_PR_SET_CHILD_SUBREAPER = 36
# A worker that hung up but lives on is not answering anybody: it gets this long to finish dying.
HANGUP_GRACE_S = 1.0
# After SIGKILL only the kernel can be in the way (a driver in uninterruptible sleep).
KILL_WAIT_S = 10.0
# Variables that numerical libraries read once, when they are imported.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def explain_exit(returncode: int) -> str:
    """Describe an exit status: "exit code 3", "killed by SIGSEGV"."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


OUT_OF_MEMORY = ", while the kernel killed processes because memory ran out"


def count_oom_kills() -> int:
    """How many processes the kernel has killed because memory ran out; 0 where it does not tell."""
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat", "rb") as file:
        for line in file:
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return 0


def worker_environment(threads: int, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: ours, `threads` for the numerical libraries (0: theirs to choose), then
    the model's `env`."""
    result = dict(os.environ)
    result.pop(PASSWORD_VARIABLE, None)  # of the server's key: no model's business
    root = Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):  # a checkout: -m must find the package
        result["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    # ONNX Runtime 1.29 and later report to their maker by default; a server talks to its clients only.
    result.setdefault("ORT_DISABLE_TELEMETRY", "1")
    if threads:
        result.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    result.update(env)
    return result


class Child(ABC):
    """A worker as its instance sees it: a WorkerProcess, one that is forked (forked_worker.py), or a thread
    of one that is shared (shared_worker.py). Everything happens on the loop that `spawn` ran on.

    `on_message(message)` for each message of the child; `on_exit(words)` once, after its last message, when
    nothing of it is left open.
    """

    def __init__(self, on_message: OnMessage, on_exit: OnExit) -> None:
        self.killed_outside = False
        """Whether it was killed, by nobody of this server and not for want of memory. Once it has ended."""
        self._on_message, self._on_exit = on_message, on_exit
        self._control: ControlChannel | None = None
        self._exited: asyncio.Future[None] | None = None
        self._hangup: asyncio.TimerHandle | None = None

    @property
    @abstractmethod
    def pid(self) -> int:
        """The child's process id, 0 when there is none."""

    @property
    @abstractmethod
    def running(self) -> bool:
        """True from spawn until the child has been reaped."""

    @property
    def waits_for(self) -> str:
        """The step that the worker waits for, as text; "" when it has started."""
        return ""

    @abstractmethod
    def spawn(self) -> None:
        """Start the child. Raises OSError when the machine cannot."""

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Sends one message. Raises ControlFault when it cannot arrive."""
        if self._control is None:
            raise ControlFault("the worker is not running")
        self._control.send(message, fds)

    def catch_up(self) -> bool:
        """Deliver messages that have arrived, before the loop does; returns False when there may be more."""
        return self._control is None or self._control.catch_up()

    def occupy(self, occupied: bool) -> bool:
        """See Instance.occupy; False for a worker that is alone in its process."""
        return False

    @abstractmethod
    def kill(self, reason: str) -> None:
        """End the child at once, with the reason that `on_exit` will give; no effect on a dead one."""

    @abstractmethod
    async def stop(self, grace_s: float) -> None:
        """Ask the child to stop, kill it after `grace_s` seconds; returns when it has ended."""

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the child has ended; False when that took longer."""
        if self._exited is None:
            return True
        await asyncio.wait({self._exited}, timeout=timeout_s)
        return self._exited.done()

    @abstractmethod
    def abandon(self) -> None:
        """End the child without its loop, which may be closed already; `on_exit` is not called."""

    def _hear(self, message: dict[str, Any]) -> None:
        try:
            self._on_message(message)
        except ControlFault as fault:
            self.kill(f"it sent {fault}")


class WorkerProcess(Child):
    """One child process. `on_exit` comes when it has been reaped. A `trusted` child runs no code but ours."""

    def __init__(
        self,
        environment: Mapping[str, str],
        on_message: OnMessage,
        on_exit: OnExit,
        *,
        entry: Sequence[str] = ENTRY,
        trusted: bool = False,
    ) -> None:
        super().__init__(on_message, on_exit)
        self._trusted = trusted
        self._oom_kills = 0  # of the machine, when it was started
        self._environment = environment
        self._entry = entry
        self._reason = ""
        self._pidfd = -1
        self._popen: subprocess.Popen[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pid(self) -> int:
        """The child's process id, 0 when there is none."""
        return self._popen.pid if self._popen is not None else 0

    @property
    def running(self) -> bool:
        """True from spawn until the child has been reaped."""
        return self._pidfd >= 0

    def spawn(self) -> None:
        """Starts the child. Call it on the loop's own thread: the child dies with the thread that
        made it (PR_SET_PDEATHSIG). Raises OSError when the machine cannot (descriptors, memory)."""
        self._loop = asyncio.get_running_loop()
        self._oom_kills = count_oom_kills()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ControlChannel(ours, owner=True, trusted=self._trusted)
        try:
            self._begin(theirs)
        except BaseException:
            self._undo()
            raise
        self._exited = self._loop.create_future()
        self._listen()

    def kill(self, reason: str) -> None:
        """SIGKILL, with the reason that `on_exit` will give; nothing if it is dead already."""
        if not self.running:
            return
        self._reason = self._reason or reason
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """Asks the child to stop, kills it after `grace_s` seconds; returns when it is reaped."""
        if not self.running:
            return
        try:
            self.send({"op": "stop"})
            if not await self.wait(grace_s):
                self.kill(f"it did not stop within {grace_s:g} s")
        except ControlFault:
            self.kill("it could not be asked to stop")
        except asyncio.CancelledError:
            self.kill("nobody waits for it any more")
            raise
        if not await self.wait(KILL_WAIT_S):
            log.error("worker process %d is stuck in the kernel after SIGKILL", self.pid)

    def abandon(self) -> None:
        """Ends the child without its loop, which may be closed already. Blocks for the milliseconds that
        SIGKILL takes; `on_exit` is not called."""
        if self.running:
            self.kill("abandoned")
            self._bury()

    def _listen(self) -> None:
        """Read what the child sends, from now on."""
        assert self._control is not None
        self._control.watch(self._hear, self._lose)

    def _begin(self, theirs: socket.socket) -> None:
        """Starts the child with its end of the control line, which is closed here."""
        with theirs:
            self._popen = self._execute(theirs.fileno())
        self._watch(os.pidfd_open(self._popen.pid))

    def _watch(self, pidfd: int) -> None:
        assert self._loop is not None
        self._pidfd = pidfd
        self._loop.add_reader(pidfd, self._reap)

    def _execute(self, control_fd: int) -> subprocess.Popen[bytes]:
        # A model's print() goes to our stderr, not between the lines a user pastes from stdout.
        output = 2 if _is_open(2) else subprocess.DEVNULL
        return subprocess.Popen(
            [*self._entry, str(control_fd)],
            pass_fds=[control_fd],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(self._environment),
            start_new_session=True,
        )

    def _undo(self) -> None:
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()
        if self._control is not None:
            self._control.close()

    def _lose(self, reason: str) -> None:
        assert self._loop is not None
        if reason:
            self.kill(f"it sent {reason}")
        else:
            self._hangup = self._loop.call_later(HANGUP_GRACE_S, self.kill, "it closed its control line")

    def _reap(self) -> None:
        assert self._control is not None
        self._control.drain(self._hear)
        self._finish(self._bury())

    def _finish(self, words: str) -> None:
        """Call `on_exit`, after everything else."""
        assert self._exited is not None
        self._exited.set_result(None)
        self._on_exit(f"killed: {self._reason}" if self._reason else words)

    def _bury(self) -> str:
        """Release everything of a dead child; returns how it ended."""
        self._unwatch()
        kill_group(self.pid)
        status = self._wait_status()
        ORPHANS.reap(self.pid)
        self._close()
        return self._judge(status)

    def _wait_status(self) -> int:
        """The exit status of the child, which has ended: negative for a signal."""
        assert self._popen is not None
        return self._popen.wait()

    def _unwatch(self) -> None:
        assert self._loop is not None
        if self._pidfd >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._pidfd)
        if self._hangup is not None:
            self._hangup.cancel()

    def _judge(self, status: int) -> str:
        killed = status == -signal.SIGKILL and not self._reason
        starved = killed and count_oom_kills() != self._oom_kills
        self.killed_outside = killed and not starved
        return explain_exit(status) + (OUT_OF_MEMORY if starved else "")

    def _close(self) -> None:
        assert self._control is not None
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._pidfd = -1
        self._control.close()


def kill_group(leader: int) -> None:
    """Ends what a dead child has left of its session. While its leader is not yet reaped, the group's number
    cannot be taken by anyone else."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


class Orphans:
    """Whether this process adopts orphans of its descendants: while it waits for forks, and no longer, since
    it has to reap what it adopts. A worker that dies meanwhile leaves its model's subprocesses too."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._count = 0
        self._groups: set[int] = set()

    def adopt(self) -> None:
        """Adopt orphans while one fork more is awaited."""
        self._count += 1
        self._set()

    def leave(self) -> None:
        """One fork has been answered."""
        self._count -= 1
        self._set()

    def reap(self, leader: int) -> None:
        """Reap the adopted ones of a dead worker's group, which has been killed. Those that the kernel has
        not ended yet are reaped at a later call: their group's number is taken until then."""
        self._groups.add(leader)
        for group in list(self._groups):
            try:
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                self._groups.discard(group)

    def _set(self) -> None:
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, int(self._count > 0), 0, 0, 0)


ORPHANS = Orphans()
"""Of this process."""


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
