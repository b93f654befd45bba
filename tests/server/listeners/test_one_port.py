"""HTTP/1.1, HTTP/2 and gRPC on one port, told apart by what a connection begins with."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from fastserve.settings import Listener, Settings, load_settings
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


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"


@pytest.mark.parametrize("settings", [b"AAMAAABkAAQAoAAAAAIAAAAA", b"AAMAAAA", b"", b"*"])
def test_an_offer_to_upgrade_is_ignored(server: Running, settings: bytes) -> None:
    """Every request of a connection is answered over HTTP/1.1, whatever it offers."""
    offer = OFFER.replace(b"AAMAAABkAAQAoAAAAAIAAAAA", settings)
    with connected(server) as link:
        for _ in range(3):
            assert json.loads(asked(link, "POST", PREDICT, offer, BODY)) == HALVES


def test_an_offer_to_upgrade_is_nothing_to_other_clients(server: Running) -> None:
    """An offer in a second request was remembered with its target, and new clients got it: 101, or 500."""
    for target in ("/v2/health/ready", "/metrics", PREDICT):
        method, body = ("POST", BODY) if target == PREDICT else ("GET", b"")
        with connected(server) as link:
            asked(link, "GET", "/v2")
            asked(link, method, target, OFFER, body)
        for _ in range(3):  # with several front processes: whoever accepts it
            with connected(server) as link:
                asked(link, method, target, b"", body)
        base = f"http://{server.http}"
        with httpx.Client(http1=False, http2=True, base_url=base, trust_env=False) as client:
            reply = client.request(method, target, content=body)
            assert (reply.status_code, reply.http_version) == (200, "HTTP/2")


@pytest.mark.parametrize("http2", [False, True])
@pytest.mark.parametrize("lengths", [("9", "10"), ("9", "9")])
def test_a_length_of_json_that_is_told_twice_is_refused(
    server: Running, http2: bool, lengths: tuple[str, str]
) -> None:
    """Two readers could see two requests."""
    body = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]}).encode()
    fields = [("Inference-Header-Content-Length", length) for length in lengths]
    client = httpx.Client(http1=not http2, http2=http2, base_url=f"http://{server.http}", trust_env=False)
    with client:
        for _ in range(2):
            reply = client.post("/v2/models/half_plus_two/infer", content=body, headers=fields)
            assert reply.status_code == 400
            assert reply.json()["error"].endswith("More than one Inference-Header-Content-Length header")


def connected(server: Running) -> socket.socket:
    host, _, port = server.http.rpartition(":")
    return socket.create_connection((host, int(port)), 60)


def asked(link: socket.socket, method: str, target: str, fields: bytes = b"", body: bytes = b"") -> bytes:
    """The body of a reply of HTTP/1.1 with the status 200."""
    head = b"%b %b HTTP/1.1\r\nHost: a\r\n%b" % (method.encode(), target.encode(), fields)
    link.sendall(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
    reply = http.client.HTTPResponse(link)
    reply.begin()
    assert (reply.status, reply.version) == (200, 11)
    return reply.read()


@pytest.mark.parametrize(
    "command",
    [
        ["curl", "-sS", "--http2-prior-knowledge", "-d", "@-", "-w", "%{http_version}"],
        ["curl", "-sS", "--http2", "-d", "@-", "-w", "%{http_version}"],
        ["curl", "-sS", "--http1.1", "-d", "@-", "-w", "%{http_version}"],
        ["nghttp", "--no-dep", "-d", "-"],
    ],
    ids=["curl, prior knowledge", "curl, an offer to upgrade", "curl, HTTP/1.1", "nghttp"],
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
        assert version == ("2" if "--http2-prior-knowledge" in command else "1.1")
    assert json.loads(text) == HALVES


def test_grpc(server: Running) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert live(b"", timeout=60) == b"\x08\x01"
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert health(b"", timeout=60) == b"\x08\x01"
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
