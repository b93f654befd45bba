"""HTTP/1.1, HTTP/2, `Upgrade: h2c` and gRPC on one port, told apart by what a connection begins with."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import h2.connection
import h2.events
import httpx
import pytest

from fastserve.config import Listener, Settings, load_settings
from tests.running import QUICK_DEMO, Running, free_port

PREDICT = "/v1/models/half_plus_two:predict"
BODY = json.dumps({"instances": [1.0, 2.0, 5.0]}).encode()
HALVES = {"predictions": [2.5, 3.0, 4.5]}


@pytest.fixture(scope="module", params=["listen", "both flags", "two fronts"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("one_port") / "log"
    if request.param == "both flags":
        place = f"127.0.0.1:{free_port()}"
        running = Running(Path("demo"), log, *QUICK_DEMO, http=place, grpc=place)
    else:
        more = ("--frontends", "2") if request.param == "two fronts" else ()
        running = Running(
            Path("demo"), log, *QUICK_DEMO, "--listen", "127.0.0.1:0", *more, http="off", grpc="off"
        )
    with running:
        assert running.http == running.grpc
        yield running


def test_http_1(server: Running) -> None:
    link = http.client.HTTPConnection(server.http)
    for _ in range(3):
        link.request("POST", PREDICT, BODY)
        assert json.loads(link.getresponse().read()) == HALVES
    link.close()


def test_http_2(server: Running) -> None:
    with httpx.Client(http1=False, http2=True, base_url=f"http://{server.http}", trust_env=False) as client:
        for _ in range(3):
            reply = client.post(PREDICT, content=BODY)
            assert (reply.http_version, reply.json()) == ("HTTP/2", HALVES)
        for path in (
            "/v2",
            "/v2/models/half_plus_two",
            "/metrics",
            "/v1/models/half_plus_two",
            "/health/ready",
        ):
            over_1 = httpx.get(f"http://{server.http}{path}", trust_env=False)
            over_2 = client.get(path)
            assert (over_2.status_code, over_2.http_version) == (over_1.status_code, "HTTP/2")
            assert over_2.headers.get("content-type") == over_1.headers.get("content-type")


def test_upgrade(server: Running) -> None:
    """The reply to the request of HTTP/1.1 comes on stream 1; the next request is one of HTTP/2."""
    client = h2.connection.H2Connection()
    settings = client.initiate_upgrade_connection()
    host, _, port = server.http.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as link:
        link.sendall(
            b"POST %b HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            b"HTTP2-Settings: %b\r\nContent-Length: %d\r\n\r\n%b"
            % (PREDICT.encode(), settings, len(BODY), BODY)
        )
        received = b""
        while b"\r\n\r\n" not in received:
            received += link.recv(4096)
        head, _, rest = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        assert answer(client, link, 1, rest) == HALVES
        fields = [(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", PREDICT)]
        client.send_headers(3, fields)
        client.send_data(3, BODY, end_stream=True)
        assert answer(client, link, 3, b"") == HALVES


def answer(client: h2.connection.H2Connection, link: socket.socket, number: int, data: bytes) -> object:
    body = b""
    link.sendall(client.data_to_send())
    while True:
        for event in client.receive_data(data):
            if isinstance(event, h2.events.DataReceived) and event.stream_id == number:
                body += event.data
            if isinstance(event, h2.events.StreamEnded) and event.stream_id == number:
                return json.loads(body)
        link.sendall(client.data_to_send())
        data = link.recv(65536)
        assert data, "the server hung up"


@pytest.mark.parametrize(
    "command",
    [
        ["curl", "-sS", "--http2-prior-knowledge", "-d", "@-", "-w", "%{http_version}"],
        ["curl", "-sS", "--http2", "-d", "@-", "-w", "%{http_version}"],
        ["curl", "-sS", "--http1.1", "-d", "@-", "-w", "%{http_version}"],
        ["nghttp", "--no-dep", "-d", "-"],
    ],
    ids=["curl, prior knowledge", "curl, upgrade", "curl, HTTP/1.1", "nghttp"],
)
def test_commands(server: Running, command: list[str], tmp_path: Path) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    body = tmp_path / "body"
    body.write_bytes(BODY)
    command = [str(body) if word == "-" else f"@{body}" if word == "@-" else word for word in command]
    command.append(f"http://{server.http}{PREDICT}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text, version = done.stdout, ""
    if command[0] == "curl":
        text, version = text.rpartition("}")[0] + "}", text.rpartition("}")[2].strip()
        assert version == ("1.1" if "--http1.1" in command else "2")
    assert json.loads(text) == HALVES


def test_grpc(server: Running) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert live(b"", timeout=10) == b"\x08\x01"
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert health(b"", timeout=10) == b"\x08\x01"
        with pytest.raises(grpc.RpcError) as fault:
            channel.unary_unary("/nobody.Service/Call")(b"", timeout=60)
        assert fault.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_listen_is_in_place_of_the_ports_that_go_without_saying(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("listen: 127.0.0.1:9000\n")
    both = load_settings(file)
    assert (both.listen, both.http, both.grpc) == ((Listener("127.0.0.1:9000"),), (), ())
    more = load_settings(file, {"http": ["127.0.0.1:9001=ops"]})
    assert (more.listen, more.http, more.grpc) == (both.listen, (Listener("127.0.0.1:9001", ("ops",)),), ())
    assert (load_settings().http, load_settings().listen) == (Settings().http, ())
