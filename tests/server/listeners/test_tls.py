"""A whole server with a certificate: both of gRPC's transports, real clients, fronts, new certificates."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.certificates import authority, issue, root_file, trusting
from tests.running import QUICK_DEMO, Running, free_port, run_command, started, until

PREDICT = "/v1/models/half_plus_two:predict"
BODY = json.dumps({"instances": [1.0, 2.0, 5.0]}).encode()
HALVES = {"predictions": [2.5, 3.0, 4.5]}
KINDS = {
    "one port": ["--listen", "127.0.0.1:0"],
    "two fronts": ["--listen", "127.0.0.1:0", "--frontends", "2"],
    "two ports": ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"],
}


def serving(folder: Path, kind: str, *options: str) -> Running:
    mine = issue(folder)
    flags = ["--tls-cert", mine.cert, "--tls-key", mine.key, "--log-access", *options, *KINDS[kind]]
    off = "off" if "--listen" in flags else "127.0.0.1:0"
    return Running(Path("demo"), folder / "log", *QUICK_DEMO, *flags, http=off, grpc=off)


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("tls"), request.param) as running:
        yield running


def predict(server: Running, context: ssl.SSLContext | None = None) -> object:
    with closing(http.client.HTTPSConnection(server.http, context=context or trusting())) as link:
        link.request("POST", PREDICT, BODY)
        return json.loads(link.getresponse().read())


def certificate_of(server: Running) -> str:
    """The common name that new connections are shown."""
    host, _, port = server.http.rpartition(":")
    link = socket.create_connection((host, int(port)), 60)
    with trusting().wrap_socket(link, server_hostname=host) as secured:
        shown: Any = secured.getpeercert()
        return str(dict(field for part in shown["subject"] for field in part)["commonName"])


def channel_credentials(client: tuple[bytes, bytes] | None = None) -> grpc.ChannelCredentials:
    key, cert = client or (None, None)
    return grpc.ssl_channel_credentials(authority().cert_pem.bytes(), key, cert)


READY = "/inference.GRPCInferenceService/ServerReady"


def test_http_1(server: Running) -> None:
    assert predict(server) == HALVES


def test_when_the_certificate_ends_is_told(server: Running) -> None:
    with closing(http.client.HTTPSConnection(server.http, context=trusting())) as link:
        link.connect()
        shown: Any = link.sock.getpeercert()
        ends = ssl.cert_time_to_seconds(shown["notAfter"])

        def told(path: str) -> str:
            link.request("GET", path)
            return link.getresponse().read().decode()

        until(lambda: "fastserve_tls_certificate_expires_seconds " in told("/metrics"), "it is told")
        lines = told("/metrics").splitlines()
        name = "fastserve_tls_certificate_expires_seconds "
        (value,) = (line.removeprefix(name) for line in lines if line.startswith(name))
        assert float(value) == json.loads(told("/console/numbers"))["certificate_expires"] == ends


def test_http_2(server: Running) -> None:
    with httpx.Client(
        http2=True, verify=trusting(), base_url=f"https://{server.http}", trust_env=False
    ) as client:
        for _ in range(3):
            reply = client.post(PREDICT, content=BODY)
            assert (reply.http_version, reply.json()) == ("HTTP/2", HALVES)


def test_grpc(server: Running) -> None:
    with grpc.secure_channel(server.grpc, channel_credentials()) as channel:
        assert channel.unary_unary(READY)(b"", timeout=60) == b"\x08\x01"

    async def main() -> None:
        async with grpc.aio.secure_channel(server.grpc, channel_credentials()) as channel:
            assert await channel.unary_unary(READY)(b"", timeout=60) == b"\x08\x01"

    asyncio.run(main())


def test_grpc_in_plain_text_is_refused(server: Running) -> None:
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as fault:
        channel.unary_unary(READY)(b"", timeout=60)
    assert fault.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.lingers  # the first client of gevent's opens a loop, for good
def test_tritonclient(server: Running, tmp_path: Path) -> None:
    given = np.array([[1.0], [2.0]], np.float32)
    root = str(root_file(tmp_path))
    over_http = tritonclient.http.InferenceServerClient(
        server.http, ssl=True, ssl_options={"ca_certs": root}, ssl_context_factory=trusting
    )
    over_grpc = tritonclient.grpc.InferenceServerClient(server.grpc, ssl=True, root_certificates=root)
    for kind, client in ((tritonclient.http, over_http), (tritonclient.grpc, over_grpc)):
        name = client.get_model_metadata("half_plus_two")
        inputs = name["inputs"] if isinstance(name, dict) else name.inputs
        first = inputs[0]["name"] if isinstance(name, dict) else inputs[0].name
        tensor = kind.InferInput(first, list(given.shape[:1]), "FP32")
        tensor.set_data_from_numpy(given[:, 0])
        answer = client.infer("half_plus_two", [tensor])
        outputs = answer.get_response()
        output = outputs["outputs"][0]["name"] if isinstance(outputs, dict) else outputs.outputs[0].name
        assert answer.as_numpy(output).tolist() == [2.5, 3.0]
        client.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("flag", "version"), [("--http1.1", "1.1"), ("--http2", "2")])
def test_curl(server: Running, tmp_path: Path, flag: str, version: str) -> None:
    said = ["-w", "\n%{http_version}", "-d", BODY.decode(), f"https://{server.http}{PREDICT}"]
    command = ["curl", "-sS", flag, "--noproxy", "*", "--cacert", str(root_file(tmp_path)), *said]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    body, _, told = done.stdout.rpartition("\n")
    assert (json.loads(body), told) == (HALVES, version), done.stderr


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-alpn", "h2"), "ALPN protocol: h2"),
        (("-alpn", "http/1.1"), "ALPN protocol: http/1.1"),
        (("-alpn", "imap"), "no application protocol"),
        (("-tls1_2",), "Protocol  : TLSv1.2"),
        (("-tls1_3",), "TLSv1.3"),
        (("-tls1_1", "-cipher", "ALL:@SECLEVEL=0"), "alert protocol version"),
    ],
)
def test_openssl(server: Running, flags: tuple[str, ...], said: str) -> None:
    command = ["openssl", "s_client", "-connect", server.http, *flags]
    done = subprocess.run(command, input=b"", capture_output=True, timeout=120)
    assert said in (done.stdout + done.stderr).decode("utf-8", "replace")


# ---- new certificates


def replace(folder: Path, name: str) -> None:
    """The pair that the server reads is another one from now on, first its certificate and then its key."""
    other = issue(folder, name)
    shutil.copyfile(other.cert, folder / "server.pem")
    shutil.copyfile(other.key, folder / "server.key")


@pytest.mark.parametrize("kind", ["two fronts", "two ports"])
def test_new_certificates_are_noticed(tmp_path: Path, kind: str) -> None:
    with serving(tmp_path, kind, "--tls-poll-s", "0.05") as server:
        held = http.client.HTTPSConnection(server.http, context=trusting())
        channel = grpc.secure_channel(server.grpc, channel_credentials())
        held.request("POST", PREDICT, BODY)
        assert json.loads(held.getresponse().read()) == HALVES
        assert channel.unary_unary(READY)(b"", timeout=60) == b"\x08\x01"
        assert certificate_of(server) == "server"
        replace(tmp_path, "second")
        until(lambda: [certificate_of(server) for _ in range(8)] == ["second"] * 8, "a new certificate")
        held.request("POST", PREDICT, BODY)  # connections that run stay as they were
        assert json.loads(held.getresponse().read()) == HALVES
        assert channel.unary_unary(READY)(b"", timeout=60) == b"\x08\x01"
        with grpc.secure_channel(server.grpc, channel_credentials()) as fresh:
            assert fresh.unary_unary(READY)(b"", timeout=60) == b"\x08\x01"
        held.close(), channel.close()


def test_a_signal_is_enough_and_a_broken_pair_changes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, "two fronts", "--tls-poll-s", "3600") as server:
        (tmp_path / "server.key").write_text(
            "-----BEGIN PRIVATE KEY-----\nnonsense\n-----END PRIVATE KEY-----\n"
        )
        server.signal(signal.SIGHUP)
        until(lambda: server.log.read_text().count("stay as they were") == 2, "a line of each front")
        assert {certificate_of(server) for _ in range(8)} == {"server"}
        replace(tmp_path, "second")
        server.signal(signal.SIGHUP)
        until(lambda: [certificate_of(server) for _ in range(8)] == ["second"] * 8, "a new certificate")
        assert "nonsense" not in server.log.read_text()


@pytest.mark.parametrize("kind", ["one port", "two ports"])
def test_clients_show_their_certificates(tmp_path: Path, kind: str) -> None:
    alice = issue(tmp_path, "alice", ca="clients")
    root = str(root_file(tmp_path, "clients"))
    with serving(tmp_path, kind, "--tls-client-ca", root) as server:
        with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
            predict(server)
        context = trusting()
        context.load_cert_chain(alice.cert, alice.key)
        assert predict(server, context) == HALVES
        pair = Path(alice.key).read_bytes(), Path(alice.cert).read_bytes()
        with grpc.secure_channel(server.grpc, channel_credentials(pair)) as channel:
            assert channel.unary_unary(READY)(b"", timeout=60) == b"\x08\x01"
        with grpc.secure_channel(server.grpc, channel_credentials()) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(READY)(b"", timeout=60)
        until(lambda: server.log.read_text().count("CN=alice") == 2, "her name in the access log")


def test_some_ports_may_stay_plain(tmp_path: Path) -> None:
    mine = issue(tmp_path)
    flags = ["--tls-cert", mine.cert, "--tls-key", mine.key]
    with Running(
        Path("demo"), tmp_path / "log", *QUICK_DEMO, *flags, http="tcp://127.0.0.1:0", grpc="127.0.0.1:0"
    ) as server:
        link = http.client.HTTPConnection(server.http)
        link.request("POST", PREDICT, BODY)
        assert json.loads(link.getresponse().read()) == HALVES
        link.close()
        with grpc.secure_channel(server.grpc, channel_credentials()) as channel:
            assert channel.unary_unary(READY)(b"", timeout=60) == b"\x08\x01"


def test_a_server_does_not_start_with_a_pair_that_does_not_fit(tmp_path: Path) -> None:
    one, other = issue(tmp_path, "one"), issue(tmp_path, "other")
    flags = ["--tls-cert", one.cert, "--tls-key", other.key]
    server = Running(Path("demo"), tmp_path / "log", *QUICK_DEMO, *flags, ends=1)
    with pytest.raises(AssertionError, match="the key is not that of the certificate"):
        server.__enter__()


# ---- the commands that ask, and TensorFlow Serving's flags


def test_commands(server: Running, tmp_path: Path) -> None:
    at = ["--url", f"https://{server.http}"]
    trusted = [*at, "--cacert", str(root_file(tmp_path))]
    for trust in (trusted, [*at, "--insecure"]):
        assert run_command("infer", "half_plus_two", "[1.0, 2.0]", *trust).stdout.split() == ["2.5", "3.0"]
    assert "AVAILABLE" in run_command("models", *trusted).stdout
    stranger = run_command("models", *at)
    assert stranger.returncode == 1
    assert "certificate verify failed" in stranger.stderr
    load = ["-d", "0.3", "--warm-up", "0", "-c", "4", "--json", "--grpc", f"https://{server.grpc}"]
    for protocol in ("tfserving", "v2-binary", "v2-grpc"):
        done = run_command("bench", "half_plus_two", "--protocol", protocol, *load, *trusted)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["requests"] > 0


def test_a_client_without_a_certificate_hears_why(tmp_path: Path) -> None:
    alice = issue(tmp_path, "alice", ca="clients")
    root = ["--cacert", str(root_file(tmp_path))]
    with serving(tmp_path, "one port", "--tls-client-ca", str(root_file(tmp_path, "clients"))) as server:
        at = ["--url", f"https://{server.http}", *root]
        assert "certificate required" in run_command("models", *at).stderr
        assert run_command("models", *at, "--cert", alice.cert, "--key", alice.key).returncode == 0


def test_tensorflow_servings_ssl_config(tmp_path: Path) -> None:
    """Its REST port stays plain text, as there; texts, not paths, stand in the file."""
    mine, alice = issue(tmp_path), issue(tmp_path, "alice", ca="clients")
    texts = [
        f"{name}: {json.dumps(Path(path).read_text())}"
        for name, path in (
            ("server_key", mine.key),
            ("server_cert", mine.cert),
            ("custom_ca", str(root_file(tmp_path, "clients"))),
        )
    ]
    config, grpc_port, rest_port = tmp_path / "ssl.cfg", free_port(), free_port()
    config.write_text("\n".join([*texts, "client_verify: true"]))
    model = Path("fastserve/demo/half_plus_two").absolute()
    flags = [f"--port={grpc_port}", f"--rest_api_port={rest_port}", f"--ssl_config_file={config}"]
    flags += [f"--model_base_path={model}", "--model_name=halves"]
    with started("tensorflow-model-server", *flags) as server:
        assert server.stdout is not None
        assert b"ready" in server.stdout.readline()
        asked = f"http://127.0.0.1:{rest_port}/v1/models/halves"
        assert httpx.get(asked, trust_env=False).status_code == 200
        check = "/tensorflow.serving.ModelService/GetModelStatus"
        message = b"\x0a\x08\x0a\x06halves"
        pair = Path(alice.key).read_bytes(), Path(alice.cert).read_bytes()
        place = f"127.0.0.1:{grpc_port}"
        with grpc.secure_channel(place, channel_credentials(pair)) as channel:
            assert channel.unary_unary(check)(message, timeout=60)
        with grpc.secure_channel(place, channel_credentials()) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(check)(message, timeout=60)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("server_key: nonsense", "Invalid protobuf file"),
        ('server_key: "/etc/key.pem" server_cert: "/etc/cert.pem"', "server_key: not a PEM text"),
    ],
)
def test_an_ssl_config_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "ssl.cfg").write_text(text)
    flags = [f"--ssl_config_file={tmp_path}/ssl.cfg", f"--model_base_path={tmp_path}"]
    done = run_command("tensorflow-model-server", *flags)
    assert done.returncode == 1
    assert said in done.stdout
