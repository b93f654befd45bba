"""The two servers under test as processes: started pinned, waited for, checked, and surely stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.workloads import REPOSITORY, Workload, expected

START_SECONDS = 60.0
STOP_SECONDS = 10.0
_REQUESTS = re.compile(r'^fastserve_requests_total\{.*status="(\w+)".*\} (\S+)$', re.MULTILINE)


class Server:
    """A started server: where it listens and which process answers."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.name, self.process, self.port, self.log = name, process, port, log

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rss_mb(self) -> float:
        """Resident memory of the front process (the one that was started), in 10^6 bytes."""
        with open(f"/proc/{self.process.pid}/status") as status:
            for line in status:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024 / 1e6
        raise RuntimeError(f"{self.name} is gone")

    def cpu_s(self) -> float:
        """CPU time that it and its children have had so far."""
        return sum(cpu_ns(pid) for pid in tree(self.process.pid)) / 1e9

    def stop(self) -> None:
        """Asks politely, then ends the whole process group: nothing stays behind."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def fail(self, message: str) -> RuntimeError:
        tail = self.log.read_text(errors="replace")[-2000:]
        return RuntimeError(f"{self.name}: {message}\n{tail}")


def tree(pid: int) -> list[int]:
    """A process and all that come of it."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text()
                found += map(int, children.split())
    return found


def cpu_ns(pid: int) -> int:
    """CPU time of a process's threads; those that have ended are not in it."""
    total = 0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
    return total


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(name: str, command: Sequence[str], port: int, cores: Sequence[int]) -> Iterator[Server]:
    """`command` in a process group of its own, every process of it on `cores`."""
    with tempfile.TemporaryDirectory(prefix="fastserve-bench-") as folder:
        log = Path(folder) / "log"
        pinned = ["taskset", "-c", ",".join(map(str, cores)), *command]
        with log.open("wb") as out:
            process = subprocess.Popen(pinned, stdout=out, stderr=out, start_new_session=True)
        server = Server(name, process, port, log)
        try:
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def reference(workload: str, cores: Sequence[int]) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "bench.reference", workload, "--port", str(port)]
    with started("reference", command, port, cores) as server:
        yield server


@contextlib.contextmanager
def fastserve(folder: str, cores: Sequence[int], *extra: str) -> Iterator[Server]:
    """`fastserve serve folder`; `folder` may be `demo`."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("fastserve")), "serve", folder]
    command += ["--http", f"127.0.0.1:{port}", "--grpc", f"127.0.0.1:{free_port()}", *extra]
    with started("fastserve", command, port, cores) as server:
        yield server


@contextlib.contextmanager
def fastserve_model(model: str, cores: Sequence[int], *extra: str) -> Iterator[Server]:
    """One model of bench/repository, alone."""
    with tempfile.TemporaryDirectory(prefix="fastserve-bench-") as folder:
        shutil.copytree(REPOSITORY / model, Path(folder) / model)
        with fastserve(folder, cores, *extra) as server:
            yield server


@contextlib.contextmanager
def listening_model(model: str, cores: Sequence[int], *extra: str) -> Iterator[Server]:
    """The same on one port for HTTP/1.1, HTTP/2 and gRPC."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="fastserve-bench-") as folder:
        shutil.copytree(REPOSITORY / model, Path(folder) / model)
        command = [str(Path(sys.executable).with_name("fastserve")), "serve", folder]
        command += ["--listen", f"127.0.0.1:{port}", *extra]
        with started("fastserve", command, port, cores) as server:
            yield server


def count_answers(server: Server) -> tuple[int, int]:
    """(requests answered well, requests that failed) so far, of all models, as the server counts them."""
    with urllib.request.urlopen(server.origin + "/metrics", timeout=20) as page:
        lines = _REQUESTS.findall(page.read().decode())
    counts = [(status == "OK", round(float(count))) for status, count in lines]
    return sum(n for well, n in counts if well), sum(n for well, n in counts if not well)


def post(url: str, body: bytes, content_type: str) -> bytes:
    request = urllib.request.Request(url, body, {"Content-Type": content_type})
    with urllib.request.urlopen(request, timeout=20) as reply:
        return bytes(reply.read())


def wait_ready(server: Server, probe: Callable[[], object], limit_s: float = START_SECONDS) -> None:
    """Calls `probe` until it does not raise OSError; raises RuntimeError with the end of the server's log."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            probe()
            return
        except OSError as fault:
            if server.process.poll() is not None:
                raise server.fail(f"ended with exit code {server.process.returncode}") from None
            if time.monotonic() > deadline:
                raise server.fail(f"not ready in {limit_s:.0f} s: {fault}") from None
        time.sleep(0.05)


def healthy(server: Server) -> None:
    with urllib.request.urlopen(server.origin + "/healthz/ready", timeout=5):
        return


def verify(server: Server, workload: Workload, body: bytes) -> None:
    """One reply against the model's own answer; raises RuntimeError when they differ, OSError unanswered."""
    try:
        text = post(server.origin + workload.path, body, workload.content_type)
    except urllib.error.HTTPError as fault:
        if fault.code == 503:  # it listens first and loads then
            raise
        raise server.fail(f"{workload.name}: {fault.code} {fault.read()[:300]!r}") from None
    got = np.array(json.loads(text)["predictions"], np.float32).reshape(-1)
    want = expected(workload.model).reshape(-1)
    if got.shape != want.shape or not np.allclose(got, want, rtol=1e-4, atol=1e-5):
        raise server.fail(f"{workload.name}: answered {got[:4]}, the model says {want[:4]}")
