"""What loads on demand cost models that stay in memory: 200 models, a budget for ten, requests by Zipf's law.

    python -m bench.memory_budget                                        16 clients, 20 s, one front process
    python -m bench.memory_budget --clients 4 --fronts 3 --parallel-loads 1

One client asks two pinned models 100 times a second, in a process of its own; the times of its answers count.
The others, in a second process, draw their models and ask as fast as they are answered. Three runs are
compared: the one client alone; beside clients that ask ten models, all of them in memory; beside clients
that ask all 200. Each is measured `--turns` times in turns, and the medians are printed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import random
import re
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.load.servers import Server, fastserve, wait_ready
from fastserve.repository.residency import LOOK_S

MODELS, ROOM, PINNED, SKEW = 200, 10, 2, 1.1
SETTLE_S = 2.0
LOADS = "fastserve_model_loads_total"
RATE = 100
"""Requests a second of the client whose answers are timed."""
SOURCE = """
import os

class Model:
    def __init__(self, config):
        self.add = config["parameters"]["add"]
        self.ballast = bytearray(os.urandom(1 << 20)) * 8

    def run(self, inputs):
        return {"y": inputs["x"] + self.add}
"""
CONFIG = """
backend: python
max_batch_size: 4
inputs: {{x: {{dtype: float32, shape: [2]}}}}
outputs: {{y: {{dtype: float32, shape: [2]}}}}
parameters: {{add: {add}}}
pin: {pin}
"""


def write_models(root: Path) -> None:
    for number in range(MODELS):
        folder = root / f"m{number}"
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.py").write_text(SOURCE)
        pin = "true" if number < PINNED else "false"
        (folder / "model.yaml").write_text(CONFIG.format(add=number, pin=pin))


class Client:
    """One connection, whose answers are checked."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, number: int) -> float | None:
        """Return the seconds of an answer, None where the server had no room for the model in time."""
        x = float(random.randrange(1000))
        began_s = time.perf_counter()
        self._connection.request("POST", f"/v1/models/m{number}:predict", json.dumps({"instances": [[x, x]]}))
        reply = self._connection.getresponse()
        told, took_s = json.loads(reply.read()), time.perf_counter() - began_s
        if reply.status == 503 and reply.getheader("Retry-After"):
            return None
        if told != {"predictions": [[x + number, x + number]]}:
            raise SystemExit(f"m{number}: {reply.status} {told}")
        return took_s


def check_ready(server: Server) -> None:
    """Raise OSError unless the start has loaded all that there is room for."""
    with urllib.request.urlopen(server.origin + "/healthz/ready", timeout=20):
        pass


def ask_pinned(port: int, seconds: float, found: Any) -> None:
    client, times, end_s = Client(port), list[float](), time.monotonic() + seconds
    while (began_s := time.monotonic()) < end_s:
        took_s = client.ask(random.randrange(PINNED))
        if took_s is None:
            raise SystemExit("a pinned model was refused")
        times.append(took_s)
        time.sleep(max(0.0, began_s + 1 / RATE - time.monotonic()))
    found.put(times)


def ask_drawn(port: int, clients: int, models: int, over: Any) -> None:
    weights = [1 / (rank + 1) ** SKEW for rank in range(models)]

    def work() -> None:
        client = Client(port)
        while not over.is_set():
            client.ask(random.choices(range(models), weights)[0])

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def drawing(port: int, clients: int, models: int) -> Iterator[None]:
    """Clients that ask so many models until the block ends; none for 0."""
    over = multiprocessing.Event()
    process = multiprocessing.Process(target=ask_drawn, args=(port, clients, models, over))
    if models:
        process.start()
    try:
        yield
    finally:
        over.set()
        if models:
            process.join()


def percentile_ms(times: list[float], part: float) -> float:
    return sorted(times)[int(len(times) * part)] * 1e3


def read_page(server: Server, name: str) -> float:
    """Return the sum of a metric's samples."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    return sum(float(one) for one in re.findall(rf"^{re.escape(name)}\S* (\S+)$", page, re.MULTILINE))


def measure(port: int, seconds: float) -> list[float]:
    found: Any = multiprocessing.Queue()
    process = multiprocessing.Process(target=ask_pinned, args=(port, seconds, found))
    process.start()
    times: list[float] = found.get(timeout=seconds + 60)
    process.join()
    return times


def bytes_of_a_model(root: Path, cores: Sequence[int]) -> int:
    """Return what a model takes here, as the server counts it."""
    names = [f"m{number}" for number in range(PINNED)]
    chosen = [word for name in names for word in ("--load-model", name)]
    used = 'fastserve_models_memory_bytes{state="used"}'
    with fastserve(
        str(root), cores, "--memory-budget", "1GB", "--keep-loaded", ",".join(names), *chosen
    ) as server:
        wait_ready(server, partial(check_ready, server))
        time.sleep(LOOK_S + 1.0)  # until then it may be an estimate
        return int(read_page(server, used) / PINNED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in {"clients": 16, "fronts": 1, "turns": 3, "parallel-loads": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="fastserve-bench-") as folder:
        root = Path(folder)
        write_models(root)
        options = ["--memory-budget", str(ROOM * bytes_of_a_model(root, cores)), "--keep-alive-s", "0.5"]
        options += ["--frontends", str(given.fronts)]
        if given.parallel_loads:
            options += ["--parallel-loads", str(given.parallel_loads)]
        with fastserve(str(root), cores, *options) as server:
            wait_ready(server, partial(check_ready, server))
            compare(server, given.clients, given.seconds, given.turns)


def compare(server: Server, clients: int, seconds: float, turns: int) -> None:
    """Print the times of pinned models in each of the three runs, and the ratios to the first."""
    runs = {"alone": 0, "beside models in memory": ROOM, "beside loads": MODELS}
    found: dict[str, list[list[float]]] = {name: [] for name in runs}
    loads = 0.0
    for _ in range(turns):
        for name, models in runs.items():
            before = read_page(server, LOADS)
            with drawing(server.port, clients, models):
                time.sleep(SETTLE_S)
                found[name].append(measure(server.port, seconds))
            if models == MODELS:
                loads += read_page(server, LOADS) - before
    first: list[float] = []
    for name, times in found.items():
        median, last = ([percentile_ms(one, part) for one in times] for part in (0.5, 0.99))
        first = first or last
        ratios = [after / before for after, before in zip(last, first, strict=True)]
        print(
            f"{name:24} p50 {statistics.median(median):6.2f} ms   p99 {statistics.median(last):6.2f} ms   "
            f"{statistics.median(ratios):5.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(f"{loads / turns / (seconds + SETTLE_S):.1f} loads a second")


if __name__ == "__main__":
    main()
