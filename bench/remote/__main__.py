"""Remote workers beside local ones, on this machine: the rows of docs/remote-workers.md.

    python -m bench.remote [--seconds 5] [--repeats 2] [--only tiny,one,large,sleep]

Each row starts a server and its workers, and drives it with `fastserve bench`. Local and remote take turns,
so that both see the machine in one state; the best run of each counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

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


def compare(
    options: Any, source: str, items: int, size: int, connections: int, rows: int
) -> dict[str, dict[str, Any]]:
    """Measure a local and a remote worker in turns; the best run of each."""
    best: dict[str, dict[str, Any]] = {}
    for _ in range(options.repeats):
        for kind in ("local", "remote"):
            with served(source, items, size, 1, remote=kind == "remote") as url:
                found = drive(url, options.seconds, connections, rows)
            if kind not in best or rate_of(found) > rate_of(best[kind]):
                best[kind] = found
    return best


def rate_of(found: dict[str, Any]) -> float:
    """Return the requests a second."""
    return float(found["requests_per_s"])


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


def main() -> None:
    """Print a line for each row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", default="tiny,one,large,sleep")
    options = parser.parse_args()
    rows = options.only.split(",")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    table = {"tiny": (4, 32, 16, 32), "one": (4, 32, 1, 1), "large": (150_528, 8, 8, 1)}
    for name, (items, size, connections, count) in table.items():
        if name in rows:
            best = compare(options, TWICE, items, size, connections, count)
            local, remote = best["local"], best["remote"]
            print(
                f"{name}: local {rate_of(local):.0f} requests/s, p50 {local['p50_us']:.0f} us; "
                f"remote {rate_of(remote):.0f} requests/s, p50 {remote['p50_us']:.0f} us; "
                f"{rate_of(remote) / rate_of(local):.2f}",
                flush=True,
            )
    if "sleep" in rows:
        scale(options, (1, 2, 4, 8))


if __name__ == "__main__":
    main()
