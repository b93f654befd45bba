"""Start the installed server with its demo, ask it over HTTP and with its own commands, stop it.

Only the standard library and pytest: in CI this folder is copied out of the tree, and everything
it uses of fastserve comes from the wheel. FASTSERVE_SMOKE=installed says that this is so. CI runs it on the
plain wheel, where a model that needs ONNX Runtime must say so, and again with the extra.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

COMMAND = str(Path(sys.executable).with_name("fastserve"))
INSTALLED = os.environ.get("FASTSERVE_SMOKE") == "installed"
STARTS_PROCESSES = True
START_S = 120
STOP_S = 90
# A held-out zero of the digits data, as grey values.
ZERO = [
    [0, 0, 5, 11, 4, 1, 0, 0],
    [0, 0, 15, 16, 16, 11, 0, 0],
    [0, 2, 16, 9, 2, 12, 4, 0],
    [0, 6, 13, 0, 0, 6, 6, 0],
    [0, 3, 13, 0, 0, 5, 9, 0],
    [0, 3, 16, 0, 0, 6, 8, 0],
    [0, 0, 13, 12, 8, 16, 7, 0],
    [0, 0, 4, 13, 12, 10, 0, 0],
]
IMAGE = [pixel for line in ZERO for pixel in line]


HAS_ONNX = find_spec("onnxruntime") is not None
# y = x + x, float32 [n, 2]
DOUBLE = (
    "CAg6PwoOCgF4CgF4EgF5IgNBZGQSAWdaFAoBeBIPCg0IARIJCgMSAW4KAggCYhQKAXkSDwoNCAESCQoDEgFuCgIIAkIECgAQDQ=="
)


def free_port() -> int:
    """A port that nobody listens on and that the system gives to no connection of another test
    between here and the start of the server."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(lowest // 2, lowest)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=120) as reply:
        body: bytes = reply.read()
        return body


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            get(f"{url}/healthz/ready")
            return
        except OSError:
            assert process.poll() is None, f"the server ended:\n{log.read_text()}"
            time.sleep(0.05)
    pytest.fail(f"not ready in {START_S} s:\n{log.read_text()}")


@contextmanager
def serving(repository: str, folder: Path) -> Iterator[str]:
    """A server's URL. Ending it with SIGTERM and exit code 0 is part of the test."""
    port = free_port()
    arguments = ["serve", repository, "--http", f"127.0.0.1:{port}", "--grpc", f"127.0.0.1:{free_port()}"]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([COMMAND, *arguments], stdout=out, stderr=out, cwd=folder)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, process, log)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo."""
    with serving("demo", tmp_path_factory.mktemp("server")) as url:
        yield url


def command(*arguments: str) -> str:
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not INSTALLED, reason="the checkout is meant to be used here")
def test_it_is_the_installed_package() -> None:
    import fastserve

    assert "site-packages" in (fastserve.__file__ or "")
    suffixes = {Path(str(file)).suffix for file in files("fastserve") or []}
    assert {".so", ".pyi", ".yaml", ".npz"} <= suffixes
    assert not suffixes & {".pyx", ".cpp", ".h"}


def test_digits_over_http(server: str) -> None:
    answer = post(f"{server}/v1/models/digits:predict", {"instances": [IMAGE, IMAGE]})
    assert [row["digit"] for row in answer["predictions"]] == [0, 0]


def test_half_plus_two_over_http(server: str) -> None:
    answer = post(f"{server}/v1/models/half_plus_two:predict", {"instances": [1.0, 2.0, 5.0]})
    assert answer == {"predictions": [2.5, 3.0, 4.5]}


def test_the_demo_streams_text_without_torch(server: str) -> None:
    if INSTALLED:
        assert find_spec("torch") is None
    body = {"inputs": "LAWYER, n.", "stream": True, "parameters": {"max_new_tokens": 5}}
    request = urllib.request.Request(f"{server}/infer", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as reply:
        events = [json.loads(line.removeprefix(b"data: ")) for line in reply if line.strip()]
    assert [event["token"]["text"] for event in events] == [" ", " A", " person", " who", None]
    assert events[-1]["generated_text"] == "  A person who has"


def test_metrics_count_the_requests(server: str) -> None:
    post(f"{server}/v1/models/half_plus_two:predict", {"instances": [1.0]})
    assert b"fastserve_requests_total{" in get(f"{server}/metrics")


def test_commands_ask_the_server(server: str) -> None:
    assert command("infer", "half_plus_two", "[1.0, 2.0]", "--url", server).split() == ["2.5", "3.0"]
    listed = json.loads(command("models", "--json", "--url", server))
    assert {row["state"] for row in listed} == {"AVAILABLE"}
    assert {row["model"] for row in listed} == {"digits", "half_plus_two", "scribe"}


def test_bench_loads_the_server(server: str) -> None:
    options = ["-c", "2", "-d", "0.5", "--warm-up", "0", "--json"]
    report = json.loads(command("bench", "digits", "--url", server, *options))
    assert report["requests"] > 0
    assert list(report["statuses"]) == ["200"]


def test_version() -> None:
    assert command("--version").startswith("fastserve ")


# Modules of a wheel have the C++ library linked in, each for itself: all are loaded when one throws.
THROWS = """
import importlib, pathlib, resource
import fastserve._ext
for file in sorted(pathlib.Path(fastserve._ext.__path__[0]).glob("*.so")):
    importlib.import_module("fastserve._ext." + file.name.partition(".")[0])
from fastserve._ext.sampler import Sampler
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
for slots in (2**31 - 1, 4):
    try:
        print(Sampler(8, slots).slots)
    except MemoryError:
        print("MemoryError")
"""


def test_what_the_c_plus_plus_library_throws_is_pythons_error() -> None:
    """200 GB are asked for where 8 may be had: std::bad_alloc."""
    done = subprocess.run([sys.executable, "-c", THROWS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["MemoryError", "4"]), done.stderr


@pytest.fixture
def double(tmp_path: Path) -> Path:
    """A repository of one ONNX model."""
    (tmp_path / "models/double/1").mkdir(parents=True)
    (tmp_path / "models/double/1/model.onnx").write_bytes(base64.b64decode(DOUBLE))
    return tmp_path / "models"


@pytest.mark.skipif(not HAS_ONNX, reason="ONNX Runtime is not installed")
def test_an_onnx_model_is_served(double: Path, tmp_path: Path) -> None:
    with serving(str(double), tmp_path) as url:
        answer = post(f"{url}/v1/models/double:predict", {"instances": [[1.0, 2.0]]})
    assert answer == {"predictions": [[2.0, 4.0]]}


@pytest.mark.skipif(HAS_ONNX, reason="ONNX Runtime is installed")
@pytest.mark.parametrize("asked", ["serve", "check"])
def test_an_onnx_model_says_what_to_install(double: Path, asked: str) -> None:
    done = subprocess.run([COMMAND, asked, str(double)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "pip install onnxruntime, as" in done.stdout + done.stderr
