"""A server as its users run it: `fastserve serve` in a process of its own, on ports of its own.

Tests inspect it from outside: whether it lives, its workers, descriptors and memory, and its log.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from tests import proc, warm

START_S, STOP_S = 120.0, 90.0  # stopping may take drain_s and half a minute more
WAIT_S = 60.0
FREE = "127.0.0.1:0"
CLI = "fastserve.cli"
WITH_SIMULATED_DEVICES = "tests.devices.simulated_server"
"""Servers whose models may say `devices: simulated`."""
QUICK_DEMO = ("--load-model", "half_plus_two")
"""Options for servers of the demo that are asked for nothing else: torch takes seconds to load, ONNX Runtime
half of one."""


def until(true: Callable[[], object], what: str, limit_s: float = WAIT_S) -> None:
    """Look again and again until something is so: the less often, the longer it takes."""
    began = time.monotonic()
    while not true():
        waited_s = time.monotonic() - began
        assert waited_s < limit_s, f"never: {what}"
        time.sleep(min(0.002 + waited_s / 20, 0.1))


def free_port() -> int:
    """A port that nobody listens on and that the system gives to no connection of another test
    between here and the start of the server."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(lowest // 2, lowest)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


Started = subprocess.Popen[bytes] | warm.WarmProcess


def start(
    command: list[str], stderr: int, *, torch: bool = False, more: Mapping[str, str] | None = None
) -> Started:
    """Start a server, warm where it can be, with `more` variables; its standard output is a pipe."""
    interpreter, option, *rest = command
    environment = {**os.environ, **(more or {})}
    zygote = None
    if (interpreter, option) == (sys.executable, "-m"):
        zygote = warm.ZYGOTES.find(environment, torch=torch)
    if zygote is not None:
        return warm.start_server(zygote, rest[0], rest[1:], environment, stderr)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment)


@contextlib.contextmanager
def started(*arguments: str, stderr: int | None = None) -> Iterator[Started]:
    """`fastserve ARGUMENTS`, started warm where it can be; its standard error is lost unless it is given."""
    with open(os.devnull, "wb") as null:
        process = start([sys.executable, "-m", CLI, *arguments], null.fileno() if stderr is None else stderr)
    assert process.stdout is not None
    with process.stdout:
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `fastserve ARGUMENTS` to its end, warm where it can be."""
    zygote = warm.ZYGOTES.find(os.environ)
    if zygote is not None:
        return warm.run_to_end(zygote, CLI, arguments, START_S)
    command = [sys.executable, "-m", CLI, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)


class Running:
    """One server. `http` and `grpc` are HOST:PORT of its first listeners, on ports the system chooses unless
    others are asked for. `module` is what is run: the command, or a test's entry point that ends in it. The
    server and its workers start warm (tests.warm); `torch`: they have imported it."""

    def __init__(
        self,
        repository: Path | str,
        log: Path,
        *options: str,
        http: str = FREE,
        grpc: str = FREE,
        ends: int = 0,
        module: str = CLI,
        torch: bool = False,
    ) -> None:
        quick = ("--drain-delay-s", "0")  # first: a test that looks at it names it again
        self._command = [sys.executable, "-m", module, "serve", str(repository), *quick, *options]
        self._torch = torch or module == WITH_SIMULATED_DEVICES
        self._more: dict[str, str] = {}  # variables of its environment
        self.log = log
        self._ends = ends  # the exit status
        self.http, self.grpc = http, grpc

    def __enter__(self) -> Running:
        listeners = ["--http", self.http, "--grpc", self.grpc]
        with self.log.open("wb") as log:
            command = [*self._command, *listeners]
            self._process = self._start(command, log.fileno())
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        found = re.findall(r"(http|grpc)s?://(\S+)", line)
        if "ready" not in line:
            self.__exit__(None, None, None)
            raise AssertionError(f"the server did not start:\n{self.log.read_text()}")
        places = dict(reversed(found))
        self.http, self.grpc = places["http"], places["grpc"]
        return self

    def _start(self, command: list[str], stderr: int) -> Started:
        return start(command, stderr, torch=self._torch, more=self._more)

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(STOP_S)
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
        if kind is None:
            assert status == self._ends, self.log.read_text()

    def kill(self) -> None:
        """The end that no process can do anything about."""
        self._process.kill()
        self._ends = -signal.SIGKILL

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, limit_s: float) -> None:
        """Until it has ended by itself."""
        self._process.wait(limit_s)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def workers(self) -> list[int]:
        """Its child processes."""
        return proc.children_of(self.pid)

    def holds(self) -> tuple[int, int, int]:
        """How many workers and descriptors it has, and how many errors it has logged."""
        errors = self.log.read_text().count(" ERROR ")
        descriptors = proc.targets(self.pid, os.listdir(f"/proc/{self.pid}/fd"))
        return len(self.workers), len(descriptors), errors

    def settles(self, holds: tuple[int, int, int], *, errors: bool = False) -> None:
        """Waits until it holds no more than it did, and fails when it never does; `errors` in its log may be
        more."""

        def so() -> bool:
            workers, descriptors, logged = self.holds()
            return workers == holds[0] and descriptors <= holds[1] and (errors or logged == holds[2])

        try:
            until(so, "")
        except AssertionError:
            told = f"workers, descriptors, errors: {holds} before, {self.holds()} now"
            raise AssertionError(f"{told}:\n{self.log.read_text()[-3000:]}") from None

    @property
    def rss_bytes(self) -> int:
        """Its resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
