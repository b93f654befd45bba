"""Only the configured limits of waiting rows and bytes refuse requests, and no single request uses them up.

A server of its own under real clients: batches sealed with a row or two must not exhaust a queue that is far
from its limit of rows, and a split request leaves the others their share.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.running import Running

SOURCE = """
import time

class Model:
    def __init__(self, config):
        self.config = config

    def run(self, inputs):
        time.sleep(0.002)
        return {"OUT": inputs["IN"] * 2}
"""
SHAPES = {"rows": [2], "ragged": [-1]}
BATCHES = (1, 32, 1024)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("room")
    for kind, shape in SHAPES.items():
        for batch in BATCHES:
            tensor = {"dtype": "float32", "shape": shape}
            config: dict[str, Any] = {"backend": "python", "max_batch_size": batch, "instances": 2}
            model = folder / "models" / f"{kind}_{batch}"
            (model / "1").mkdir(parents=True)
            (model / "1" / "model.py").write_text(SOURCE)
            (model / "model.yaml").write_text(
                yaml.safe_dump({**config, "inputs": {"IN": tensor}, "outputs": {"OUT": tensor}})
            )
    with Running(folder / "models", folder / "log") as running:
        yield running


class Client:
    """One connection, over which one protocol's requests go."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, served: Running) -> Client:
        host, _, port = served.http.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=1 << 26))

    async def ask(self, protocol: str, model: str, rows: int, number: float) -> tuple[int, Any]:
        """Status and first column of the answer."""
        line, headers, body = REQUESTS[protocol](model, rows, number)
        head = f"POST {line} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        self._writer.write(head.encode() + body)
        got = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        size = int(got.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        reply = await self._reader.readexactly(size)
        status = int(got.split(b" ", 2)[1])
        return status, ANSWERS[protocol](reply, rows) if status == 200 else reply

    def close(self) -> None:
        self._writer.close()


def _rest(model: str, rows: int, number: float) -> tuple[str, str, bytes]:
    return f"/v1/models/{model}:predict", "", json.dumps({"instances": [[number, 1]] * rows}).encode()


def _v2(model: str, rows: int, number: float) -> tuple[str, str, bytes]:
    tensor = {"name": "IN", "shape": [rows, 2], "datatype": "FP32", "data": [number, 1] * rows}
    return f"/v2/models/{model}/infer", "", json.dumps({"inputs": [tensor]}).encode()


def _v1(model: str, rows: int, number: float) -> tuple[str, str, bytes]:
    import numpy as np

    dims = " dims: 2" if model.startswith("ragged") else ""
    header = f'batch_size: {rows} input {{ name: "IN"{dims} }} output {{ name: "OUT" }}'
    body = np.array([[number, 1]] * rows, np.float32).tobytes()
    return f"/api/infer/{model}?format=binary", f"NV-InferRequest: {header}\r\n", body


def _first_floats(reply: bytes, rows: int) -> list[float]:
    return list(memoryview(reply[: rows * 8]).cast("f"))[::2]


REQUESTS = {"rest": _rest, "v2": _v2, "v1": _v1}
ANSWERS = {
    "rest": lambda reply, rows: [row[0] for row in json.loads(reply)["predictions"]],
    "v2": lambda reply, rows: json.loads(reply)["outputs"][0]["data"][::2],
    "v1": _first_floats,
}


async def ask_on(served: Running, protocol: str, model: str, rows: int, seconds: float) -> list[Any]:
    """One client in a closed loop; whatever was not answered rightly."""
    client, wrong, number = await Client.open(served), [], 0
    until = time.monotonic() + seconds
    try:
        while number == 0 or time.monotonic() < until:
            number += 1
            status, got = await client.ask(protocol, model, rows, float(number))
            if (status, got) != (200, [2.0 * number] * rows):
                wrong.append((status, got))
    finally:
        client.close()
    return wrong


@pytest.mark.parametrize("protocol", ["rest", "v2", "v1"])
@pytest.mark.parametrize(
    ("model", "clients", "rows"),
    [
        ("rows_32", 128, 1),
        ("rows_1024", 64, 1),
        ("rows_1", 400, 1),
        ("rows_32", 24, 20),
        ("ragged_32", 128, 1),
        ("ragged_1", 400, 1),
    ],
)
def test_nobody_is_refused_while_rows_may_wait(
    served: Running, protocol: str, model: str, clients: int, rows: int
) -> None:
    if protocol == "rest" and model.startswith("ragged"):
        rows = 1

    async def work() -> None:
        asking = [ask_on(served, protocol, model, rows, 0.2) for _ in range(clients)]
        wrong = [one for found in await asyncio.gather(*asking) for one in found]
        assert not wrong, (len(wrong), wrong[:2])

    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize("protocol", ["rest", "v2"])
@pytest.mark.parametrize("model", ["rows_32", "rows_1024", "ragged_32"])
def test_requests_that_are_split_leave_the_others_their_part(
    served: Running, protocol: str, model: str
) -> None:
    """Two of up to 640 batches each, while small ones come: none of those is refused, nor waits for all of
    it, also where one batch is as large as the queue."""
    large = 32 * 640

    async def work() -> None:
        first, second = await Client.open(served), await Client.open(served)
        splitting = [
            asyncio.ensure_future(client.ask(protocol, model, large, 3.0)) for client in (first, second)
        ]
        slowest, splits = 0.0, time.monotonic()
        small = await Client.open(served)
        while not all(task.done() for task in splitting):
            began = time.monotonic()
            assert await small.ask(protocol, model, 1, 5.0) == (200, [10.0])
            slowest = max(slowest, time.monotonic() - began)
        splits_s = time.monotonic() - splits
        for status, got in await asyncio.gather(*splitting):
            assert (status, len(got), set(got)) == (200, large, {6.0})
        assert slowest < max(5, splits_s / 2)
        for client in (first, second, small):
            client.close()

    asyncio.run(asyncio.wait_for(work(), 60))
