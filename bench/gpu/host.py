"""The parts of the GPU benchmark that need no GPU: what is missing, rows of the table, clients."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections.abc import Sequence


class Missing(Exception):
    """Something the benchmark needs is not there."""


def what_is_missing() -> list[str]:
    """In words; nothing where it can run."""
    if importlib.util.find_spec("torch") is None:
        return ["PyTorch: pip install 'fastserve[torch]'"]
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


async def _client(address: str, request: bytes, until: float, times: list[float]) -> None:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        while time.monotonic() < until:
            began = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise Missing(f"the server answered {head.splitlines()[0].decode()}")
            length = next(
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            )
            await reader.readexactly(length)
            times.append(time.perf_counter() - began)
    finally:
        writer.close()


def load(address: str, request: bytes, clients: int, seconds: float) -> list[float]:
    """Seconds each request took, of so many connections that ask one after the other."""
    times: list[float] = []

    async def work() -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(_client(address, request, until, times) for _ in range(clients)))

    asyncio.run(work())
    return times
