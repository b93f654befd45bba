"""Processes that start warm: forked from one that has imported what they need.

A worker takes 0.2 s of CPU to import numpy and the package, a server 0.5 s, and the suite starts both by the
hundred. Each process of the suite starts one *zygote*, and asks it for every server and worker:

    process of the suite -> zygote (imports once, has one thread) -> fork -> server or worker

The zygote forks twice. The process between ends at once, and the kernel gives its child to the nearest
ancestor that takes orphans (PR_SET_CHILD_SUBREAPER). That is the process that asked, while it asks. So the
new process is its child, as a spawned one is: its owner waits for it and reads its exit status.

A server that started warm forks a zygote for its own workers and fronts. What an interpreter reads when it
starts has to be the same (READ_AT_START); else a process starts by exec. So does what tests start by a
command of their own: those of environments, command lines and imports. `under(environment)` lets processes of
another environment have a zygote.

torch and transformers take 3 to 7 s of CPU to import. A second zygote has imported them: for fork servers,
for workers with a simulated device, and for what starts while `with_torch()` is entered. In a process of
tests/forks.py it is forked, with what collecting the tests has imported; elsewhere it imports for itself.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import logging
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fastserve.app.describe import Description
from fastserve.workers.fork_server import IMPORTED
from fastserve.workers.forked_worker import TORCH, ForkServer
from fastserve.workers.process import ENTRY, THREAD_VARIABLES, WorkerProcess, _is_open
from tests.proc import ZYGOTE

SERVER_MODULES = (
    "fastserve.cli", "fastserve.cli.serve", "fastserve.server.server", "fastserve.server.front_process",
    "runpy", "uvloop", "encodings.idna", "fastserve.app.reload", "fastserve.app.serving",
    "fastserve.dialects.kserve.grpc_calls", "fastserve.dialects.tfserving.rpcs",
    "fastserve.dialects.tfserving.warmup", "fastserve.dialects.triton_v1.rpcs",
    "fastserve.repository.single_model",
)  # fmt: skip
WORKER_MODULES = (
    "numpy", "numpy.random", "fastserve.workers.main", "fastserve.workers.loop",
    "fastserve.workers.thread_host", "fastserve.workers.runners", "fastserve.workers.warmup",
    "fastserve.workers.requests", "fastserve.backends.frameworks.python",
    "fastserve.backends.triton_api.backend",
)  # fmt: skip
TORCH_MODULES = (
    "torch", *IMPORTED[TORCH], "fastserve.backends.frameworks.torch", "tests.devices.simulated_worker",
)  # fmt: skip
WORKER, FRONT = "fastserve.workers.main", "fastserve.server.front_process"
SIMULATED = "tests.devices.simulated_worker"
DESCRIBE = "fastserve.app.describe"
_PR_SET_CHILD_SUBREAPER = 36
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
    """The asking side of a process that forks; calls are made one at a time."""

    def __init__(self, pid: int, line: socket.socket, began_with: Mapping[str, str]) -> None:
        self.pid, self.line = pid, line
        self._began_with = read_at_start(began_with)
        self._lock = threading.Lock()

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Return whether a process with this environment may be forked."""
        return read_at_start(environment) == self._began_with

    def lives(self) -> bool:
        """Return whether the zygote is there: its end of the line is open."""
        gone = select.POLLHUP | select.POLLERR
        poll = select.poll()
        poll.register(self.line, gone)
        return not any(events & gone for _, events in poll.poll(0))

    def start(self, order: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Start a process and return its pid. The first three of `fds` become its standard streams."""
        with self._lock, _taking_orphans():
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]
            self.line.sendmsg([json.dumps({"cwd": os.getcwd(), **order}).encode()], ancillary)
            answer = self.line.recv(64)
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


ROOT = str(Path(__file__).parents[1])
READ_AT_START = ("PYTHON", "LD_", "MALLOC", "GLIBC", "OMP_PROC")


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that an interpreter and its libraries read when they start, and never again."""
    found = {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}
    # Where this package lies: the zygote has it from its folder, workers of a checkout are told.
    folders = [one for one in found.pop("PYTHONPATH", "").split(os.pathsep) if one not in ("", ROOT)]
    return {**found, "PYTHONPATH": os.pathsep.join(folders)}


class Zygotes:
    """The zygotes of this process, each started when it is first needed."""

    def __init__(self) -> None:
        self.found: list[tuple[Zygote, bool]] = []
        self.torch = False
        """Whether everything that starts is to have torch."""
        self._environments: list[dict[str, str]] = []
        self._may_start = False
        self._lock = threading.Lock()

    def find(self, environment: Mapping[str, str], *, torch: bool = False) -> Zygote | None:
        """The zygote of a process with this environment; None for one that has to start by exec."""
        torch = (torch or self.torch) and all(environment.get(name, "1") == "1" for name in THREAD_VARIABLES)
        with self._lock:
            self.found = [one for one in self.found if one[0].lives()]
            fit = {has: zygote for zygote, has in self.found if zygote.fits(environment)}
            if not self._may_start:
                return fit.get(torch, fit.get(False))
            if torch not in fit:
                began = read_at_start(environment)
                if began not in [read_at_start(one) for one in self._environments]:
                    return None
                fit[torch] = spawn_zygote(environment, torch=torch)
                self.found.append((fit[torch], torch))
            return fit[torch]

    def prepare(self) -> None:
        """Let this process have zygotes, and start the plain one."""
        if not self._may_start:
            self._may_start = True
            self._environments.append(dict(os.environ))
            start_workers_warm()
        self.find(os.environ)

    def fork_with_torch(self, servers_own: frozenset[str]) -> None:
        """Fork the zygote with torch, in a process that has run no test and has one thread. `servers_own`:
        the names of the modules that a server imports."""
        environment = dict(os.environ)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            become_zygote(theirs.fileno(), servers_own)
        theirs.close()
        atexit.register(os.waitpid, pid, 0)
        atexit.register(os.kill, pid, signal.SIGKILL)
        self.found.append((Zygote(pid, ours, environment), True))

    @contextlib.contextmanager
    def under(self, environment: Mapping[str, str]) -> Iterator[None]:
        """Processes with this environment start warm meanwhile."""
        self._environments.append(dict(environment))
        try:
            yield
        finally:
            self._environments.pop()

    def children(self) -> set[str]:
        """Their pids, for the leak check."""
        return {str(zygote.pid) for zygote, _ in self.found}

    def descriptors(self) -> set[str]:
        return {str(zygote.line.fileno()) for zygote, _ in self.found}


ZYGOTES = Zygotes()


@contextlib.contextmanager
def with_torch() -> Iterator[None]:
    """Servers and workers that start meanwhile have imported torch and transformers."""
    before, ZYGOTES.torch = ZYGOTES.torch, True
    try:
        yield
    finally:
        ZYGOTES.torch = before


def spawn_zygote(environment: Mapping[str, str], *, torch: bool) -> Zygote:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    single = {**environment, **dict.fromkeys(THREAD_VARIABLES, "1"), "HF_HUB_OFFLINE": "1"}
    with theirs:
        modules = ["torch"] if torch else []
        command = [sys.executable, "-m", "tests.warm", str(theirs.fileno()), *modules]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=single)
    atexit.register(process.wait)
    atexit.register(process.kill)
    return Zygote(process.pid, ours, environment)


_FREEZING = gc.freeze, gc.unfreeze


def freeze_for_good() -> None:
    """Leave what this process holds now out of all later collections. A model of a thread that ends unfreezes
    all there is, to find its own garbage (workers/thread_host.py): with torch and the tests that took 0.3 s
    of CPU each time, and in a forked process a copy of every page. So nothing here is frozen or unfrozen from
    now on, and such a model is found among what is younger."""
    freeze_more()
    gc.freeze = gc.unfreeze = lambda: None


def freeze_more() -> None:
    """Collect garbage, and leave what this process holds out of later collections. Called between two files:
    each server and model that loads in this process collects all garbage, which took 86 of 930 CPU seconds of
    a run while what earlier files had made was walked through."""
    gc.collect()
    _FREEZING[0]()


def read_types() -> None:
    """Have msgspec read the annotations of the classes that every server and worker converts to, and protobuf
    make the classes of its messages: once in a process, for the options of a model in 8 ms, for a server's
    settings and messages in 50."""
    tensors = {"x": {"dtype": "float32", "shape": [1]}}
    model = {"backend": "python", "inputs": tensors, "outputs": tensors}
    importlib.import_module("fastserve.settings.model_options").read_options({})
    importlib.import_module("fastserve.repository.model_config").parse_model_config(model)
    importlib.import_module("fastserve.settings").load_settings(overrides={"http": "127.0.0.1:0"})
    protos = importlib.import_module("fastserve.protos")
    for name in ("kserve_v2", "tfserving", "triton_v1"):
        messages = protos.load(name)
        for message in messages._messages:
            getattr(messages, message)


def import_torch() -> frozenset[str]:
    """Import what workers with torch need, where tests have imported torch. Return the names of the modules
    that a server imports; none where there is no torch."""
    if not {"torch", "transformers"} <= sys.modules.keys():
        return frozenset()
    for name in (*SERVER_MODULES, *WORKER_MODULES, *TORCH_MODULES):
        importlib.import_module(name)
    read_types()
    program = f"import {', '.join(SERVER_MODULES)}, sys; print(*sys.modules)"
    return frozenset(subprocess.check_output([sys.executable, "-c", program], text=True).split())


def become_zygote(line_fd: int, servers_own: frozenset[str]) -> NoReturn:
    """Make a process that was forked from the suite's a zygote: nothing of pytest is heard or held."""
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    sys.meta_path[:] = [one for one in sys.meta_path if "pytest" not in type(one).__module__]
    logging.getLogger().handlers.clear()
    faulthandler.disable()
    ZYGOTES.found.clear()
    # What had these descriptors is never collected: the frames that fork do not end.
    os.closerange(3, line_fd)
    os.closerange(line_fd + 1, os.sysconf("SC_OPEN_MAX"))
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"), HF_HUB_OFFLINE="1")
    # Not what pytest began with: conftest.py has changed it since, and the zygotes of servers that start from
    # here would fit none of their workers, which would all import by themselves.
    BEGAN_WITH.clear()
    BEGAN_WITH.update(os.environ)
    ours = {name for name in sys.modules if name.partition(".")[0] in ("__main__", "tests")}
    WORKERS_OWN.update(sys.modules.keys() - servers_own - ours)
    gc.freeze, gc.unfreeze = _FREEZING
    gc.freeze()
    run_zygote(socket.socket(fileno=line_fd))


def start_workers_warm() -> None:
    """Workers, fronts and fork servers of this process start warm from now on."""
    execute = WorkerProcess._execute

    def start_warm(self: Any, control_fd: int) -> Any:
        environment = dict(self._environment)
        *interpreter, module = self._entry[: len(ENTRY)]
        arguments = self._entry[len(ENTRY) :]
        zygote = None
        if tuple(interpreter) == ENTRY[:-1]:
            of = getattr(self._on_message, "__self__", None)
            torch = module == SIMULATED or (isinstance(of, ForkServer) and of.imports == TORCH)
            zygote = ZYGOTES.find(environment, torch=torch)
        if zygote is None:
            return execute(self, control_fd)
        with open(os.devnull, "r+b") as null:
            output = 2 if _is_open(2) else null.fileno()
            fds = [null.fileno(), output, output, control_fd]
            order = {
                "module": module, "arguments": arguments, "environment": environment, "session": True,
            }  # fmt: skip
            return WarmProcess(zygote.start(order, fds), self._entry)

    WorkerProcess._execute = start_warm  # type: ignore[method-assign]
    describe_cold = Description._execute

    def describe_warm(self: Any) -> Any:
        zygote = ZYGOTES.find(os.environ)
        if zygote is None:
            return describe_cold(self)
        with open(os.devnull, "rb") as null:
            order = {
                "module": DESCRIBE, "arguments": [str(self._file)], "environment": dict(os.environ),
                "session": False,
            }  # fmt: skip
            fds = [null.fileno(), self._said.fileno(), 2]
            return WarmProcess(zygote.start(order, fds), [DESCRIBE, str(self._file)])

    Description._execute = describe_warm  # type: ignore[method-assign]


def start_server(
    zygote: Zygote, module: str, arguments: Sequence[str], environment: Mapping[str, str], stderr: int
) -> WarmProcess:
    """Start `python -m module arguments`; its standard output is a pipe."""
    read, write = os.pipe()
    try:
        with open(os.devnull, "rb") as null:
            order = {
                "module": module, "arguments": arguments, "environment": dict(environment), "session": False,
            }  # fmt: skip
            pid = zygote.start(order, [null.fileno(), write, stderr])
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    return WarmProcess(pid, [module, *arguments], os.fdopen(read, "rb"))


def run_to_end(
    zygote: Zygote, module: str, arguments: Sequence[str], timeout_s: float, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` to its end, or `python FILE.py arguments` in `folder`, and return what
    it wrote. After `timeout_s` it is killed, and subprocess.TimeoutExpired raised."""
    with (
        open(os.devnull, "rb") as null,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
    ):
        order = {
            "module": module, "arguments": arguments, "environment": dict(os.environ), "session": False,
            "command": True, "cwd": str(folder or Path.cwd()),
        }  # fmt: skip
        started = [null.fileno(), output.fileno(), errors.fileno()]
        process = WarmProcess(zygote.start(order, started), [module, *arguments])
        try:
            status = process.wait(timeout_s)
        finally:
            process.kill()
            process.wait()
        for written in (output, errors):
            written.seek(0)
        return subprocess.CompletedProcess(process.args, status, output.read(), errors.read())


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
        sys.argv = [order["module"], *order["arguments"], *map(str, taken), *order.get("more", ())]
        if order["module"] == WORKER:
            status = sys.modules[WORKER].main(sys.argv[1:])
        else:
            if not order["session"] and order["module"] != DESCRIBE:
                begin_server()
            if order["module"] in PLAIN and not order.get("command"):
                for name in WORKERS_OWN:
                    sys.modules.pop(name, None)
            if order["module"].endswith(".py"):
                sys.path.insert(0, order["cwd"])
                runpy.run_path(order["module"], run_name="__main__")
            else:
                sys.modules.pop(order["module"], None)
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


def begin_server() -> None:
    """Fork the zygote of this server."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        run_zygote(theirs)
    theirs.close()
    atexit.register(os.waitpid, pid, 0)
    atexit.register(os.kill, pid, signal.SIGKILL)
    ZYGOTES.found.append((Zygote(pid, ours, BEGAN_WITH), False))
    start_workers_warm()


PLAIN = ("fastserve.cli", "tests.faults.probed", FRONT)
"""Entry points that import nothing of workers, as the front process of a real server."""
WORKERS_OWN: set[str] = set()
"""Modules that workers import and servers do not."""


def run_zygote(line: socket.socket) -> NoReturn:
    """Serve until the owner's end of the line is closed. No PR_SET_PDEATHSIG: the kernel sends that when the
    thread ends that started this process, and a thread of a pool may have."""
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


BEGAN_WITH = dict(os.environ)


def main() -> None:
    fd, *more = sys.argv[1:]
    for name in SERVER_MODULES:
        importlib.import_module(name)
    before = set(sys.modules)
    for name in (*WORKER_MODULES, *(TORCH_MODULES if more else ())):
        importlib.import_module(name)
    WORKERS_OWN.update(set(sys.modules) - before)
    read_types()
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("a module that was imported has started a thread")
    gc.collect()
    gc.freeze()
    run_zygote(socket.socket(fileno=int(fd)))


if __name__ == "__main__":
    sys.modules["tests.warm"] = sys.modules["__main__"]
    main()
