"""Clients that let a drop of their answers through at a time keep no row of a model from who waits for it.

Real sockets and a real worker with two rows. A client's windows are its own: HTTP/2's of its stream, over
HTTP/1.1 the receive buffer of its socket.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest

from fastserve.engine.engine import scheduler_of
from fastserve.engine.text_queue import TextScheduler
from fastserve.protos import load
from fastserve.settings import Listener, TextgenOptions
from tests.dialects.text_common.serving import Hosted
from tests.running import until

V2 = load("kserve_v2")
ROWS, TOKENS = 2, 3000
# An answer of 6 MB: more than the kernel keeps of a connection.
MODEL = f"""
class Model:
    info = {{"tokenizer": "words", "slots": {ROWS}, "max_tokens": 100_000, "max_new_tokens": {TOKENS}}}

    def __init__(self, config):
        pass

    def generate(self, request):
        while True:
            yield 7, "x" * 2000
"""


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    folder: Path = tmp_path_factory.mktemp("slow")
    (folder / "m1/1").mkdir(parents=True)
    (folder / "m1/1/model.py").write_text(MODEL)
    text = {"reader_tokens": 16, "max_sequences": ROWS, "max_new_tokens": TOKENS}
    (folder / "m1/model.yaml").write_text(json.dumps({"backend": "text_python", "text": text}))
    grpc = (Listener("127.0.0.1:0", ("kserve_v2",)),)
    dialects = ("textgen", "kserve_v2")
    with Hosted(folder, TextgenOptions(tgi_flavor="tgi"), dialects, grpc=grpc) as opened:
        yield opened


class Dripping:
    """A client of HTTP/2 whose streams have windows of one byte, and who opens them by one at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        first = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1, h2.settings.SettingCodes.ENABLE_PUSH: 0}
        self._h2.local_settings = h2.settings.Settings(client=True, initial_values=first)
        self._h2.initiate_connection()
        self._flush()
        self.taken: dict[int, int] = {}

    def ask(self, path: str, body: bytes, content_type: str) -> int:
        number = self._h2.get_next_available_stream_id()
        head = [(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", path)]
        self._h2.send_headers(number, [*head, ("content-type", content_type), ("te", "trailers")])
        self._h2.send_data(number, body, end_stream=True)
        self._flush()
        self.taken[number] = 0
        return number

    def drip(self, number: int) -> None:
        """Take one byte more; it has come when this returns."""
        before = self.taken[number]
        if before:  # the first has its window from the beginning
            self._h2.increment_flow_control_window(1, number)
            self._flush()
        while self.taken[number] == before:
            for event in self._h2.receive_data(self._socket.recv(65536)):
                if isinstance(event, h2.events.DataReceived):
                    self.taken[event.stream_id] += len(event.data)
                assert not isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated), event
            self._flush()

    def rest(self, number: int) -> bytes:
        """The end of what comes once its windows are wide."""
        for stream in (None, number):
            self._h2.increment_flow_control_window(1 << 30, stream)
        self._flush()
        last, ended = b"", False
        while not ended:
            for event in self._h2.receive_data(self._socket.recv(65536)):
                if isinstance(event, h2.events.DataReceived):
                    last = last[-1000:] + event.data
                assert not isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated), event
                ended = ended or isinstance(event, h2.events.StreamEnded)
            self._flush()
        return last

    def _flush(self) -> None:
        self._socket.sendall(self._h2.data_to_send())

    def close(self) -> None:
        self._socket.close()


def running(at: Hosted) -> list[int]:
    """Sequences that hold a slot."""
    (hosted,) = at.server.host.hosted.values()
    scheduler = scheduler_of(hosted.version)
    assert isinstance(scheduler, TextScheduler)
    ring = scheduler.queue.ring
    return [slot for slot in range(ring.slots) if ring.describe(slot)[0] == "running"]


def written(at: Hosted) -> float:
    """Tokens so far."""
    lines = at.ask("GET", "/metrics").body.decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith("fastserve_text_tokens_total")
    )


def stands(at: Hosted) -> bool:
    """Whether nobody writes."""
    seen = [written(at) for _ in range(5)]
    return len(running(at)) == ROWS and seen[0] > 0 and len(set(seen)) == 1


STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "m1", "prompt": "hi", "max_tokens": TOKENS, "stream": True},
    "/generate_stream": {"inputs": "hi", "parameters": {"max_new_tokens": TOKENS}},
    "/infer": {"inputs": "hi", "stream": True, "parameters": {"max_new_tokens": TOKENS}},
    # V2's own: which dialect a port's first is, has the route.
    "/v2/models/m1/generate_stream": {"text_input": "hi", "stream": True, "max_tokens": TOKENS},
}


def check_others(at: Hosted) -> None:
    """Somebody else is answered, who could have no row before those are through."""
    until(lambda: stands(at), "all rows are readers' who are behind")
    body = {"model": "m1", "prompt": "a", "max_tokens": 3}
    assert at.post("/v1/completions", body).json["choices"][0]["text"] == "x" * 6000


@pytest.mark.parametrize("path", STREAMS)
def test_windows_of_a_byte(at: Hosted, path: str) -> None:
    with contextlib.closing(Dripping(at.port)) as slow:
        numbers = [
            slow.ask(path, json.dumps(STREAMS[path]).encode(), "application/json") for _ in range(ROWS)
        ]
        for number in numbers:
            slow.drip(number)
        check_others(at)
        for number in numbers:
            slow.drip(number)
    until(lambda: not running(at), "they have left")


def test_windows_of_a_byte_over_grpc(at: Hosted) -> None:
    said = json.dumps({"max_tokens": TOKENS}).encode()
    fields = {"text_input": b"hi", "sampling_parameters": said}
    request = V2.ModelInferRequest(model_name="m1")
    for name, value in fields.items():
        request.inputs.add(name=name, datatype="BYTES", shape=[1])
        request.raw_input_contents.append(len(value).to_bytes(4, "little") + value)
    request.inputs.add(name="stream", datatype="BOOL", shape=[1])
    request.raw_input_contents.append(b"\1")
    message = request.SerializeToString()
    framed = b"\0" + len(message).to_bytes(4, "big") + message
    path = "/inference.GRPCInferenceService/ModelStreamInfer"
    port = int(at.deployed.rpc.rpartition(":")[2])
    with contextlib.closing(Dripping(port)) as slow:
        numbers = [slow.ask(path, framed, "application/grpc") for _ in range(ROWS)]
        for number in numbers:
            slow.drip(number)
        check_others(at)
        for number in numbers:
            slow.drip(number)
    until(lambda: not running(at), "they have left")


def test_receive_buffers_of_a_few_bytes(at: Hosted) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(ROWS):
            slow = stack.enter_context(socket.socket())
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.connect(("127.0.0.1", at.port))
            body = json.dumps(STREAMS["/v1/completions"]).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert slow.recv(1) == b"H"
        check_others(at)
    until(lambda: not running(at), "they have left")
