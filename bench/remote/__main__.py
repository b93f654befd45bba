"""Remote workers beside local ones, on this machine: the rows of docs/remote-workers.md.

    python -m bench.remote [--seconds 5] [--repeats 3] [--only tiny,one,large,sleep,wait]

Each row starts a server and its workers, and drives it with `fastserve bench`. Local and remote take turns,
so that both see the machine in one state; the medians count. What the processes use of the cores for a
request says more than the rate where other jobs share them. `wait` sends requests at random times to eight
workers that sleep for random times, and needs little of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests import proc
from tests.running import free_port

TWICE = """
class Model:
    def __init__(self, config): pass
    def run(self, inputs): return {"y": inputs["x"] * 2}
"""
SLEEP = """
import time
class Model:
    def __init__(self, config): pass
    def run(self, inputs):
        time.sleep(0.005)
        return {"y": inputs["x"]}
"""
RANDOM_SLEEP = """
import random, time
class Model:
    def __init__(self, config): pass
    def run(self, inputs):
        time.sleep(random.expovariate(10.0))
        return {"y": inputs["x"]}
"""
# Of RANDOM_SLEEP: seconds on average, workers, the share of their time.
SERVICE_S, SERVERS, BUSY = 0.1, 8, 0.8
TICKS = os.sysconf("SC_CLK_TCK")
COMMAND = (sys.executable, "-m", "fastserve.cli")
START_S = 60.0


def write_model(folder: Path, source: str, items: int, max_batch_size: int, **config: Any) -> None:
    """Write the repository of one model."""
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "1" / "model.py").write_text(source)
    tensor = {"dtype": "float32", "shape": [items]}
    whole = {
        "backend": "python",
        "max_batch_size": max_batch_size,
        "inputs": {"x": tensor},
        "outputs": {"y": tensor},
    }
    (folder / "m" / "model.yaml").write_text(yaml.safe_dump({**whole, **config}))


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of fastserve until the block ends."""
    running = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(START_S)


@contextlib.contextmanager
def served(source: str, items: int, max_batch_size: int, workers: int, *, remote: bool) -> Iterator[str]:
    """Serve a model with so many workers; its URL."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        listen, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        placed = {"placement": {"remote": {"listen": listen}}} if remote else {}
        write_model(Path(name) / "models", source, items, max_batch_size, instances=workers, **placed)
        grpc = f"127.0.0.1:{free_port()}"
        stack.enter_context(process("serve", f"{name}/models", "--http", http, "--grpc", grpc))
        if remote:
            cache = f"{name}/cache"
            stack.enter_context(
                process("worker", "--connect", listen, "--workers", str(workers), "--cache", cache)
            )
        await_ready(f"http://{http}")
        yield f"http://{http}"


def await_ready(url: str) -> None:
    """Wait until a server is ready."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/healthz/ready", timeout=1) as reply:
            if reply.status == 200:
                return
        time.sleep(0.05)
    raise SystemExit("the server did not become ready")


def drive(url: str, seconds: float, connections: int, rows: int) -> dict[str, Any]:
    """Drive a server for some seconds; the figures of `fastserve bench`."""
    arguments = ["bench", "m", "--url", url, "--protocol", "v2-binary", "--json", "-d", str(seconds)]
    arguments += ["-c", str(connections), "--rows", str(rows)]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    assert not found["faults"], found
    return found


def processor_us(pid: int) -> dict[str, float]:
    """Microseconds of the cores that the processes below `pid` have used, by name."""
    found: dict[str, float] = {}
    for child in proc.children_of(pid):
        name = {"fastserve": "server", "python": "server"}.get(proc.name_of(child), proc.name_of(child))
        fields = proc.read(child, "stat").rpartition(")")[2].split()
        if fields:
            found[name] = found.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / TICKS * 1e6
        for below, used in processor_us(child).items():
            found[below] = found.get(below, 0.0) + used
    return found


def compare(
    options: Any, source: str, items: int, size: int, connections: int, rows: int
) -> dict[str, list[dict[str, Any]]]:
    """Measure a local and a remote worker in turns; the runs of each."""
    runs: dict[str, list[dict[str, Any]]] = {"local": [], "remote": []}
    for _ in range(options.repeats):
        for kind, measured in runs.items():
            with served(source, items, size, 1, remote=kind == "remote") as url:
                before = processor_us(os.getpid())
                found = drive(url, options.seconds, connections, rows)
                used = processor_us(os.getpid())
            requests = rate_of(found) * options.seconds
            found["cores"] = {name: (us - before.get(name, 0.0)) / requests for name, us in used.items()}
            measured.append(found)
    return runs


def rate_of(found: dict[str, Any]) -> float:
    """Return the requests a second."""
    return float(found["requests_per_s"])


def median_of(runs: Sequence[dict[str, Any]], name: str) -> float:
    """Return the median of one figure."""
    return statistics.median(float(found[name]) for found in runs)


def scale(options: Any, counts: Sequence[int]) -> None:
    """Measure a model that sleeps 5 ms on more and more remote workers."""
    one = 0.0
    for count in counts:
        with served(SLEEP, 4, 1, count, remote=True) as url:
            rate = rate_of(drive(url, options.seconds, 4 * count, 1))
        one = one or rate
        print(
            f"sleeps 5 ms, {count} remote workers: {rate:.0f} requests/s, {rate / one / count:.2f} linear",
            flush=True,
        )


async def send_at_random(url: str, seconds: float) -> list[float]:
    """Send requests of one row at random times, whatever has been answered; the seconds each took."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = b'{"instances": [[1, 2, 3, 4]]}'
    head = b"POST /v1/models/m:predict HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(body)
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask() -> float:
        began = time.monotonic()
        reader, writer = idle.pop() if idle else await asyncio.open_connection(host, int(port))
        writer.write(head + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        length = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        idle.append((reader, writer))
        return time.monotonic() - began

    asked: list[asyncio.Task[float]] = []
    start = due = time.monotonic()
    while due < start + seconds:
        await asyncio.sleep(max(due - time.monotonic(), 0.0))
        asked.append(asyncio.ensure_future(ask()))
        due += random.expovariate(SERVERS * BUSY / SERVICE_S)
    took = await asyncio.gather(*asked)
    for _, writer in idle:
        writer.close()
    return list(took)


def wait(options: Any) -> None:
    """Measure how long requests wait for one of eight workers that are busy for 80 % of the time."""
    for kind in ("local", "remote"):
        with served(RANDOM_SLEEP, 4, 1, SERVERS, remote=kind == "remote") as url:
            took = asyncio.run(send_at_random(url, 6 * options.seconds))
        waited = statistics.mean(took) - SERVICE_S
        print(
            f"wait: {len(took)} requests to {SERVERS} {kind} workers, {waited / SERVICE_S:.2f} service times "
            f"of {SERVICE_S * 1000:.0f} ms, all that is not the model's sleep",
            flush=True,
        )


def main() -> None:
    """Print a line for each row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="tiny,one,large,sleep,wait")
    options = parser.parse_args()
    rows = options.only.split(",")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    table = {"tiny": (4, 32, 16, 32), "one": (4, 32, 1, 1), "large": (150_528, 8, 8, 1)}
    for name, (items, size, connections, count) in table.items():
        if name in rows:
            runs = compare(options, TWICE, items, size, connections, count)
            for kind, measured in runs.items():
                cores = {
                    used: round(statistics.median(found["cores"].get(used, 0.0) for found in measured))
                    for used in measured[0]["cores"]
                }
                print(
                    f"{name} {kind}: {median_of(measured, 'requests_per_s'):.0f} requests/s, "
                    f"p50 {median_of(measured, 'p50_us'):.0f} us; us of a core for each: {cores}",
                    flush=True,
                )
            pairs = zip(runs["local"], runs["remote"], strict=True)
            ratios = sorted(rate_of(remote) / rate_of(local) for local, remote in pairs)
            print(f"{name}: {statistics.median(ratios):.2f} of local ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    if "sleep" in rows:
        scale(options, (1, 2, 4, 8))
    if "wait" in rows:
        wait(options)


if __name__ == "__main__":
    main()
