"""Workers that Ray places beside Ray Serve, on one cluster of this machine, in turns: docs/remote-workers.md.

    pip install 'ray[serve]' pyzmq
    python -m bench.remote.ray_serve [--seconds 5] [--repeats 2] [--only one,rows,sleep]

Both get the same raw floats over HTTP/1.1 from the same client, and answer as many; answers are checked. Ray
Serve batches with `serve.batch`. The best run of each counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import uvloop

from bench.remote.__main__ import SLEEP, START_S, TWICE, await_ready, process, write_model
from tests.running import free_port
from tests.workers.remote.cluster import RayNodes

SHARE = 0.1  # of a CPU, for a worker and a replica alike
ITEMS = 4
APP = """
import asyncio, sys, time
import numpy as np
import ray
from ray import serve
from starlette.responses import Response

address, port, replicas, sleep_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])

@serve.deployment(num_replicas=replicas, max_ongoing_requests=64,
                  ray_actor_options={"num_cpus": SHARE})
class Twice:
    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.0)
    async def run(self, arrays):
        found, at = np.concatenate(arrays) * 2, np.cumsum([len(one) for one in arrays])[:-1]
        return np.split(found, at)

    async def __call__(self, request):
        x = np.frombuffer(await request.body(), np.float32).reshape(-1, ITEMS)
        if sleep_s:
            time.sleep(sleep_s)
            return Response((x * 2).tobytes())
        return Response((await self.run(x)).tobytes())

ray.init(address=address, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(Twice.bind(), route_prefix="/twice")
print("ready", flush=True)
sys.stdin.read()
serve.shutdown()
"""
APP = APP.replace("SHARE", str(SHARE)).replace("ITEMS", str(ITEMS))


@contextlib.contextmanager
def ours(cluster: str, workers: int, *, sleeps: bool) -> Iterator[tuple[int, str]]:
    """Serve a model with so many workers on the cluster; the port and the path of its requests."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        source = SLEEP.replace('inputs["x"]}', 'inputs["x"] * 2}') if sleeps else TWICE
        placement = {"ray": {"num_cpus": SHARE}}
        size = 1 if sleeps else 256
        write_model(Path(name), source, ITEMS, size, instances=workers, placement=placement)
        port = free_port()
        listen = ("--http", f"127.0.0.1:{port}", "--grpc", "off")
        stack.enter_context(process("serve", name, "--ray", cluster, *listen))
        await_ready(f"http://127.0.0.1:{port}")
        yield port, "/v2/models/m/infer"


@contextlib.contextmanager
def theirs(cluster: str, replicas: int, *, sleeps: bool) -> Iterator[tuple[int, str]]:
    """Serve the same with Ray Serve."""
    port = free_port()
    arguments = [cluster, str(port), str(replicas), "0.005" if sleeps else "0"]
    running = subprocess.Popen(
        [sys.executable, "-c", APP, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert running.stdout is not None
        if "ready" not in running.stdout.readline():
            raise SystemExit("Ray Serve did not start")
        url, until = f"http://127.0.0.1:{port}/twice", time.monotonic() + START_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, bytes(16), timeout=5):
                break
        yield port, "/twice"
    finally:
        running.communicate("", timeout=START_S)


class Caller(asyncio.Protocol):
    """One connection, which asks anew as soon as it is answered."""

    def __init__(self, request: bytes, wanted: bytes, until_s: float, done: asyncio.Future[int]) -> None:
        self._request, self._wanted, self._until_s, self._done = request, wanted, until_s, done
        self._data, self._answers = b"", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end:
            return
        fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
        if len(body) < int(fields[b"content-length"]):
            return
        if not head.startswith(b"HTTP/1.1 200") or not body.endswith(self._wanted):
            self._done.set_exception(RuntimeError(f"a wrong answer: {self._data[:200]!r}"))
            self._transport.close()
            return
        self._data, self._answers = b"", self._answers + 1
        if time.monotonic() < self._until_s:
            self._transport.write(self._request)
        else:
            self._done.set_result(self._answers)
            self._transport.close()


def drive(port: int, path: str, seconds: float, connections: int, rows: int) -> float:
    """Drive a server for some seconds; requests a second."""
    x = np.arange(1, rows * ITEMS + 1, dtype=np.float32)
    raw, fields = x.tobytes(), ""
    if path.startswith("/v2"):
        head = (
            f'{{"inputs":[{{"name":"x","shape":[{rows},{ITEMS}],"datatype":"FP32","parameters":'
            f'{{"binary_data_size":{len(raw)}}}}}],"parameters":{{"binary_data_output":true}}}}'
        ).encode()
        raw, fields = head + raw, f"Inference-Header-Content-Length: {len(head)}\r\n"
    request = f"POST {path} HTTP/1.1\r\nHost: b\r\n{fields}Content-Length: {len(raw)}\r\n\r\n".encode() + raw

    async def work() -> float:
        loop, began = asyncio.get_running_loop(), time.monotonic()
        answers = [loop.create_future() for _ in range(connections)]
        for done in answers:
            wanted, until_s = (x * 2).tobytes(), began + seconds
            await loop.create_connection(
                lambda d=done, w=wanted, u=until_s: Caller(request, w, u, d), "127.0.0.1", port
            )
        found = sum(await asyncio.gather(*answers))
        return found / (time.monotonic() - began)

    return uvloop.run(work())


def compare(cluster: str, options: argparse.Namespace, count: int, connections: int, rows: int) -> None:
    """Measure both in turns, and print a line. Without `rows`, a model that sleeps 5 ms for one row."""
    best = {"fastserve": 0.0, "Ray Serve": 0.0}
    for _ in range(options.repeats):
        for name, served in (("fastserve", ours), ("Ray Serve", theirs)):
            with served(cluster, count, sleeps=not rows) as (port, path):
                drive(port, path, 1.0, connections, max(rows, 1))
                best[name] = max(best[name], drive(port, path, options.seconds, connections, max(rows, 1)))
    one, other = best.values()
    what = f"{rows} rows a request" if rows else f"sleeps 5 ms, {count} workers"
    print(
        f"{what}, {connections} connections: fastserve {one:.0f} requests/s, Ray Serve {other:.0f}; "
        f"{one / other:.1f} x; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    """Print a line for each row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", default="one,rows,sleep")
    options = parser.parse_args()
    asked = options.only.split(",")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with RayNodes() as nodes:
        for rows in ((1,) if "one" in asked else ()) + ((32,) if "rows" in asked else ()):
            compare(nodes.address, options, 1, 16, rows)
        for count in (1, 2, 4) if "sleep" in asked else ():
            compare(nodes.address, options, count, 4 * count, 0)


if __name__ == "__main__":
    main()
