"""Processes that start warm: forked from one that has imported what they need.

A worker takes 0.2 s of CPU to import numpy and the package, a server 0.5 s, and the suite starts both by the
hundred. Each process of the suite starts one *zygote*, and asks it for every server and worker:

    process of the suite -> zygote (imports once, has one thread) -> fork -> server or worker

The zygote forks twice. The process between ends at once, and the kernel gives its child to the nearest
ancestor that takes orphans (PR_SET_CHILD_SUBREAPER). That is the process that asked, while it asks. So the
new process is its child, as a spawned one is: its owner waits for it and reads its exit status.

A server that started warm forks a zygote for its own workers. What an interpreter reads when it starts has
to be the same (READ_AT_START); else a process starts by exec. `cold()` and `Running(cold=True)` ask for
that: tests of environments, command lines and imports do.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from fastserve.workers.process import ENTRY, WorkerProcess, _is_open
from tests.proc import ZYGOTE

SERVER_MODULES = (
    "fastserve.cli", "fastserve.cli.serve", "fastserve.server.server", "runpy", "uvloop",
)  # fmt: skip
WORKER_MODULES = (
    "numpy", "numpy.random", "fastserve.workers.main", "fastserve.workers.loop",
    "fastserve.backends.frameworks.python",
)  # fmt: skip
WORKER = "fastserve.workers.main"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STOP = b"stop"


class WarmProcess:
    """The part of subprocess.Popen that the package and the tests use."""

    def __init__(self, pid: int, args: Sequence[str], stdout: Any = None) -> None:
        self.pid, self.args, self.stdout = pid, args, stdout
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            with self._lock:
                if self.returncode is None:
                    self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                return self.returncode
        if self.poll() is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                if not select.select([pidfd], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(list(self.args), timeout)
            finally:
                os.close(pidfd)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The asking side. One for a process; calls are made one at a time."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid, self._line = pid, line
        self._lock = threading.Lock()

    def start(self, order: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Start a process and return its pid. The first three of `fds` become its standard streams."""
        with self._lock, _taking_orphans():
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]
            self._line.sendmsg([json.dumps(order).encode()], ancillary)
            answer = self._line.recv(64)
            if not answer:
                raise OSError("the zygote has died")
            return int(answer)


@contextlib.contextmanager
def _taking_orphans() -> Iterator[None]:
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


_zygote: Zygote | None = None
_cold = 0  # how many `cold()` are open


def install(zygote: Zygote) -> None:
    """Workers of this process start warm from now on."""
    global _zygote
    _zygote = zygote
    execute = WorkerProcess._execute

    def start_warm(self: Any, control_fd: int) -> Any:
        environment = dict(self._environment)
        if self._entry is not ENTRY or not is_warm(environment):
            return execute(self, control_fd)
        with open(os.devnull, "r+b") as null:
            output = 2 if _is_open(2) else null.fileno()
            fds = [null.fileno(), output, output, control_fd]
            order = {
                "module": WORKER,
                "arguments": [],
                "environment": environment,
                "session": True,
                "cwd": os.getcwd(),
            }
            return WarmProcess(zygote.start(order, fds), self._entry)

    WorkerProcess._execute = start_warm  # type: ignore[method-assign]


def is_warm(environment: Mapping[str, str]) -> bool:
    """Return whether a process with this environment may be forked."""
    if _zygote is None or _cold:
        return False
    names = {name for name in (*environment, *os.environ) if name.startswith(READ_AT_START)}
    return all(environment.get(name) == BEGAN_WITH.get(name) for name in names)


READ_AT_START = ("PYTHON", "LD_", "MALLOC", "GLIBC", "OMP_PROC")
BEGAN_WITH = dict(os.environ)


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Processes start by a real exec meanwhile."""
    global _cold
    _cold += 1
    try:
        yield
    finally:
        _cold -= 1


def prepare() -> None:
    """Start this process' zygote, once."""
    if _zygote is not None:
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with theirs:
        command = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
    atexit.register(process.wait)
    atexit.register(process.kill)
    install(Zygote(process.pid, ours))


def start_server(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], stderr: int
) -> WarmProcess:
    """Start `python -m module arguments`; its standard output is a pipe."""
    assert _zygote is not None
    read, write = os.pipe()
    try:
        with open(os.devnull, "rb") as null:
            order = {
                "module": module, "arguments": list(arguments), "environment": dict(environment),
                "session": False, "cwd": os.getcwd(),
            }  # fmt: skip
            pid = _zygote.start(order, [null.fileno(), write, stderr])
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    return WarmProcess(pid, [module, *arguments], os.fdopen(read, "rb"))


# ---------------------------------------------------------------- the zygote's side


def serve(line: socket.socket) -> None:
    """Fork for each order. Return never in the zygote; its children go their own way."""
    while True:
        data, ancillary, _, _ = line.recvmsg(1 << 20, socket.CMSG_SPACE(16 * 4))
        if not data:
            os._exit(0)
        fds = array.array("i")
        for _, _, raw in ancillary:
            fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
        if pid := os.fork():
            os.waitpid(pid, 0)
            for fd in fds:
                os.close(fd)
            continue
        middle = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == middle:  # until the kernel has given this process to the one that asked
            time.sleep(0)
        line.send(str(os.getpid()).encode())
        line.close()
        become(json.loads(data), list(fds))


def become(order: Mapping[str, Any], fds: list[int]) -> NoReturn:
    """Make this process what a spawned one is at its start, and run it to its end."""
    status: Any = 1
    try:
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
        taken = fds[3:]
        for fd in fds[:3]:
            os.close(fd)
        if order["session"]:
            os.setsid()
        with open("/proc/self/comm", "w") as comm:
            comm.write("python")
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["environment"])
        random.seed()
        sys.modules["numpy"].random.seed()
        sys.argv = [order["module"], *order["arguments"], *map(str, taken)]
        if order["module"] == WORKER:
            status = sys.modules[WORKER].main(sys.argv[1:])
        else:
            begin_server(keep_modules=order["module"] not in PLAIN_SERVERS)
            runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
            status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
        with contextlib.suppress(BaseException):
            threading._shutdown()
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(status or 0)


def begin_server(*, keep_modules: bool) -> None:
    """Fork the zygote of this server, and forget the modules that a server does not import."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        run_zygote(theirs)
    theirs.close()
    atexit.register(os.waitpid, pid, 0)
    atexit.register(os.kill, pid, signal.SIGKILL)
    if not keep_modules:
        for name in WORKERS_OWN:
            sys.modules.pop(name, None)
    install(Zygote(pid, ours))


PLAIN_SERVERS = ("fastserve.cli", "tests.faults.probed")
"""Entry points that import nothing of workers, as the front process of a real server."""
WORKERS_OWN: set[str] = set()
"""Modules that workers import and servers do not."""


def run_zygote(line: socket.socket) -> NoReturn:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(os.devnull, "r+b") as null:
        for number in range(3):
            os.dup2(null.fileno(), number)
    with open("/proc/self/comm", "w") as comm:
        comm.write(ZYGOTE)
    # A signal to the whole group is the others' affair.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    serve(line)
    raise AssertionError


def main() -> None:
    for name in SERVER_MODULES:
        importlib.import_module(name)
    before = set(sys.modules)
    for name in WORKER_MODULES:
        importlib.import_module(name)
    WORKERS_OWN.update(set(sys.modules) - before)
    import gc

    gc.collect()
    gc.freeze()
    run_zygote(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    sys.modules["tests.warm"] = sys.modules["__main__"]
    main()
