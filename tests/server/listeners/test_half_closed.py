"""Clients that shut down their writing side behind a request, as `nc -N` and some load balancers do: every
dialect's answer reaches them, and one that then turns out to be gone frees its place."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from fastserve.settings import Listener
from tests.server.rig import HOLD, WAIT_S, release, run, seen, serving, write_model

EVERY = (Listener("127.0.0.1:0", dialects=("tfserving", "kserve_v2", "triton_v1", "grps")),)
ROW = [HOLD, 0.5]
JSON = "Content-Type: application/json\r\n"
RAW = np.array(ROW, np.float32).tobytes()
V1 = 'batch_size: 1 input { name: "x" } output { name: "y" }'
V2 = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": ROW}]}
REQUESTS = {
    "tfserving": ("/v1/models/twice:predict", "", json.dumps({"instances": [ROW]}).encode(), b"-6.0"),
    "kserve_v2": ("/v2/models/twice/infer", "", json.dumps(V2).encode(), b"-6.0"),
    "grps": ("/grps/v1/infer/predict?model=twice-1", JSON, json.dumps({"ndarray": [ROW]}).encode(), b"-6"),
    "triton_v1": ("/api/infer/twice", f"NV-InferRequest: {V1}\r\n", RAW, (np.array(ROW, "f4") * 2).tobytes()),
}


def request(dialect: str) -> bytes:
    target, lines, body, _ = REQUESTS[dialect]
    return f"POST {target} HTTP/1.1\r\nHost: a\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_the_answer_of_every_dialect(tmp_path):
    write_model(tmp_path, max_batch_size=1)

    async def work() -> None:
        async with serving(tmp_path, http=EVERY) as served:
            clients = [await served.client() for _ in REQUESTS]
            for client, dialect in zip(clients, REQUESTS, strict=True):
                client.writer.write(request(dialect))
                client.writer.write_eof()
            (listener,) = served.server.front.http
            queue = next(iter(served.server.host.hosted.values())).queue
            await served.until(
                lambda: queue.waiting == len(REQUESTS) and all(c._half for c in listener.connections)
            )
            release(tmp_path)
            for client, (dialect, (*_, answer)) in zip(clients, REQUESTS.items(), strict=True):
                reply = await asyncio.wait_for(client.reader.read(), WAIT_S)
                assert reply.startswith(b"HTTP/1.1 200 OK\r\n"), (dialect, reply)
                assert answer in reply

    run(work())


@pytest.mark.parametrize("dialect", REQUESTS)
def test_a_place_in_the_queue_is_freed_when_the_client_has_closed_both_halves(tmp_path, dialect):
    write_model(tmp_path, max_batch_size=1)

    async def work() -> None:
        async with serving(tmp_path, http=EVERY) as served:
            running = served.asking(HOLD)
            await served.until(lambda: seen(tmp_path))
            queue = next(iter(served.server.host.hosted.values())).queue
            client = await served.client()
            client.writer.write(request(dialect))
            await served.until(lambda: queue.waiting == 2)
            client.close()
            await served.until(lambda: queue.waiting == 1)
            release(tmp_path)
            assert await running == (200, [2 * HOLD])
            assert len(seen(tmp_path)) == 1

    run(work())
