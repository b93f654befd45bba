"""`python -m bench.reference WORKLOAD --port N` serves one workload until it is stopped.

`hello` answers a constant: what framing alone costs. `batch` collects rows and runs the model in
one thread. The others parse, run the model on the loop and answer.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httptools
import numpy as np
import orjson
import uvloop

from bench.workloads import BATCH_DELAY_S, MAX_BATCH_ROWS, WORKLOADS, load_model
from fastserve.util.memory import keep_freed_memory

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
HELLO = b'{"predictions":[[1,2,3.5]]}'
Answer = Callable[[bytes, asyncio.Transport], None]


def reply(predictions: np.ndarray) -> bytes:
    body = orjson.dumps({"predictions": predictions}, option=orjson.OPT_SERIALIZE_NUMPY)
    return HEAD % (len(body), body)


def answer_hello() -> Answer:
    constant = HEAD % (len(HELLO), HELLO)
    return lambda body, transport: transport.write(constant)


def answer_rows(model: str) -> Answer:
    apply = load_model(model).apply

    def answer(body: bytes, transport: asyncio.Transport) -> None:
        transport.write(reply(apply(np.array(orjson.loads(body)["instances"], np.float32))))

    return answer


def answer_raw(model: str) -> Answer:
    apply = load_model(model).apply
    return lambda body, transport: transport.write(reply(apply(np.frombuffer(body, "<f4")[None])))


class Batcher:
    """At most MAX_BATCH_ROWS rows or BATCH_DELAY_S; one batch in the model at a time."""

    def __init__(self, model: str) -> None:
        self.apply = load_model(model).apply
        self.loop = asyncio.get_running_loop()
        self.waiting: list[tuple[list[float], asyncio.Transport]] = []
        self.busy = False
        self.timer: asyncio.TimerHandle | None = None
        self.pool = ThreadPoolExecutor(1)

    def answer(self, body: bytes, transport: asyncio.Transport) -> None:
        self.waiting.append((orjson.loads(body)["instances"][0], transport))
        if len(self.waiting) >= MAX_BATCH_ROWS:
            self.fire()
        elif self.timer is None:
            self.timer = self.loop.call_later(BATCH_DELAY_S, self.fire)

    def fire(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.busy or not self.waiting:
            return
        batch, self.waiting = self.waiting[:MAX_BATCH_ROWS], self.waiting[MAX_BATCH_ROWS:]
        self.busy = True
        rows = np.array([row for row, _ in batch], np.float32)
        job = self.loop.run_in_executor(self.pool, self.apply, rows)
        job.add_done_callback(lambda done: self.finish(done.result(), batch))

    def finish(self, out: np.ndarray, batch: list[tuple[list[float], asyncio.Transport]]) -> None:
        self.busy = False
        for i, (_, transport) in enumerate(batch):
            transport.write(reply(out[i : i + 1]))
        if self.waiting:  # these have waited for the model already
            self.fire()


class Connection(asyncio.Protocol):
    """One keep-alive connection; the body is handed to `answer` as one bytes object."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.chunks: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.chunks.append(body)

    def on_message_complete(self) -> None:
        chunks, self.chunks = self.chunks, []
        self.answer(chunks[0] if len(chunks) == 1 else b"".join(chunks), self.transport)


def choose(name: str) -> Answer:
    if name == "hello":
        return answer_hello()
    workload = WORKLOADS[name]
    if workload.bound:
        return Batcher(workload.model).answer
    return answer_raw(workload.model) if workload.raw else answer_rows(workload.model)


async def serve(workload: str, port: int) -> None:
    answer = choose(workload)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answer), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.reference", description=__doc__)
    parser.add_argument("workload", choices=["hello", *WORKLOADS])
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    keep_freed_memory()  # without it the C library's page faults decide the raw bodies, 3 times over
    uvloop.run(serve(options.workload, options.port))


if __name__ == "__main__":
    main()
