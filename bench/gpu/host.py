"""The parts of the GPU benchmark that need no GPU: what is missing, rows of the table, clients."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_PROCESSES = 8
START_S = 0.5  # until all clients are connected
ANSWER_S = 60.0


class Missing(Exception):
    """Something the benchmark needs is not there."""


def what_is_missing() -> list[str]:
    """In words; nothing where it can run."""
    if importlib.util.find_spec("torch") is None:
        return ["PyTorch: pip install torch"]
    import torch

    if not torch.version.cuda:
        return [f"a PyTorch built with CUDA (this is {torch.__version__})"]
    if not torch.cuda.is_available():
        return ["a GPU that CUDA sees (nvidia-smi, CUDA_VISIBLE_DEVICES)"]
    return []


def row(what: str, measured: str, target: str, good: bool) -> str:
    """One line of the table."""
    return f"| {what} | {measured} | {target} | {'yes' if good else 'NO'} |"


HEAD = ["| what | measured | target | reached |", "|---|---|---|---|"]


def middle(times: Sequence[float]) -> float:
    """The median."""
    return sorted(times)[len(times) // 2] if times else float("nan")


def request_bytes(
    model: str, name: str, datatype: str, shape: Sequence[int], data: bytes, output: str
) -> bytes:
    """A raw V2 request, whole."""
    tensor = {"name": name, "datatype": datatype, "shape": list(shape)}
    asked = {"name": output, "parameters": {"binary_data": True}}
    head = json.dumps(
        {"inputs": [{**tensor, "parameters": {"binary_data_size": len(data)}}], "outputs": [asked]}
    ).encode()
    lines = (
        f"POST /v2/models/{model}/infer HTTP/1.1",
        "Host: bench",
        f"Inference-Header-Content-Length: {len(head)}",
        f"Content-Length: {len(head) + len(data)}",
        "",
        "",
    )
    return "\r\n".join(lines).encode() + head + data


def region_request(model: str, region: str, floats: int) -> bytes:
    """A V2 request for a row of floats at the beginning of a region, answered behind it."""
    there = {"shared_memory_region": region, "shared_memory_byte_size": 4 * floats}
    back = {"shared_memory_region": region, "shared_memory_byte_size": 4, "shared_memory_offset": 4 * floats}
    body = json.dumps(
        {
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, floats], "parameters": there}],
            "outputs": [{"name": "y", "parameters": back}],
        }
    ).encode()
    lines = f"POST /v2/models/{model}/infer HTTP/1.1", "Host: bench", f"Content-Length: {len(body)}", "", ""
    return "\r\n".join(lines).encode() + body


def load(address: str, request: bytes, clients: int, seconds: float) -> list[float]:
    """Seconds each request took that ended in this time, of so many connections that ask one after the other.

    Their processes are new ones, as this one may have a CUDA context. Several, a thread for each connection:
    one is busy with copying 600 KB requests before a server is. Raises Missing for an answer that is none."""
    shares = [len(range(first, clients, _processes(clients))) for first in range(_processes(clients))]
    begins = time.monotonic() + START_S
    command = [sys.executable, "-m", "bench.gpu.host", address, str(begins), str(begins + seconds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT}
    started = [subprocess.Popen([*command, str(share)], **pipes) for share in shares]  # type: ignore[call-overload]
    with ThreadPoolExecutor(len(started)) as pool:
        told = list(pool.map(lambda one: one.communicate(request), started))
    times = array("d")
    for process, (found, words) in zip(started, told, strict=True):
        if process.returncode:
            raise Missing((words.decode().strip().splitlines() or ["a client has died"])[-1])
        times.frombytes(found)
    if not times:
        raise Missing(f"no request was answered within {seconds:g} s")
    return list(times)


def _processes(clients: int) -> int:
    """Half of the machine is the server's."""
    return max(1, min(clients, MOST_PROCESSES, (os.cpu_count() or 2) // 2))


def _client(address: str, request: bytes, begins: float, ends: float, times: array[float]) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=ANSWER_S) as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        replies = wire.makefile("rb")
        time.sleep(max(begins - time.monotonic(), 0))
        while (began := time.monotonic()) < ends:
            wire.sendall(request)
            status, length = replies.readline(), 0
            while (line := replies.readline().lower()) not in (b"\r\n", b""):
                if line.startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            replies.read(length)
            if not status.startswith(b"HTTP/1.1 200"):
                raise Missing(f"the server answered {status.decode().strip() or 'nothing'}")
            ended = time.monotonic()
            if ended <= ends:
                times.append(ended - began)


def main(arguments: list[str]) -> int:
    """One process of clients: the request on stdin, the times on stdout."""
    address, begins, ends, clients = arguments[0], *map(float, arguments[1:3]), int(arguments[3])
    request, times = sys.stdin.buffer.read(), [array("d") for _ in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        asked = [pool.submit(_client, address, request, begins, ends, one) for one in times]
    try:
        for one in asked:
            one.result()
    except (Missing, OSError) as fault:
        print(fault, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(b"".join(one.tobytes() for one in times))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
