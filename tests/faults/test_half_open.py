"""Calls that are begun over gRPC and never sent, many on few connections: nobody else's are ended."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.dialects.kserve import client_models
from tests.faults.rig import SERVICE, Grpc, Http, ints, message
from tests.running import Running

CONNECTIONS, STREAMS = 4, 1000  # beyond 1000 calls waiting in it, grpcio refuses by itself
HEADERS, SETTINGS, END_HEADERS = 1, 4, 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header field without indexing (RFC 7541 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def begin_calls(place: str, path: bytes) -> socket.socket:
    """A connection with calls of which only the headers are sent."""
    host, _, port = place.rpartition(":")
    made = socket.create_connection((host, int(port)), 60)
    fields = [(b":path", path), (b":authority", b"t"), (b"te", b"trailers")]
    head = b"\x83\x86" + b"".join(literal(*field) for field in fields)  # POST, http
    head += literal(b"content-type", b"application/grpc")
    calls = [frame(HEADERS, END_HEADERS, 1 + 2 * number, head) for number in range(STREAMS)]
    made.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b"") + b"".join(calls))
    return made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("half_open") / "models"
    folder.mkdir()
    client_models.write_sums(folder)
    with Running(folder, folder.parent / "log") as running:
        yield running


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_calls_that_are_only_begun(server: Running, method: str) -> None:
    rows = (ints(*range(16)), ints(*[1] * 16))
    made = message("sums", *((f"INPUT{n}", "INT32", [1, 16], row) for n, row in enumerate(rows)))
    path = f"{SERVICE}{method}".encode()
    with Grpc(server) as grpc, ThreadPoolExecutor(4) as others:
        assert grpc.infer(made).status == 200
        asked = [others.submit(grpc.infer, made) for _ in range(8)]
        begun = list(others.map(lambda _: begin_calls(server.grpc, path), range(CONNECTIONS)))
        asked += [others.submit(grpc.infer, made) for _ in range(8)]
        answers = [one.result(60) for one in asked]
        for connection in begun:
            connection.close()
        ended = [answer for answer in answers if answer.status not in (200, 4)]  # 4: slow neighbours
        assert not ended
        assert any(answer.status == 200 for answer in answers)
    with Http(server) as http:
        assert http.ask("GET", "/v2/health/live").status == 200
    assert Path(server.log).read_text().count(" ERROR ") == 0
