"""The units of deploy/systemd: their words fit the server's, and systemd takes them."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fastserve.cli.serve import serve
from fastserve.server.dialect_selection import refuse_open_places
from fastserve.server.server import STOP_S
from fastserve.settings import load_settings
from tests.running import START_S, free_port, until
from tests.server.rig import write_model

UNITS = Path(__file__).resolve().parents[2] / "deploy/systemd"
SERVICES = ("fastserve.service", "fastserve@.service")
INSTANCE = {"Sockets": ["fastserve.socket"], "Conflicts": ["fastserve.service"]}
"""What the unit with instances says besides."""


def read(name: str) -> dict[str, list[str]]:
    """Return each word of a unit with its values, in their order."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text().splitlines():
        if line and line[0] not in "#[":
            key, equals, value = line.partition("=")
            assert equals, line
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("name", SERVICES)
def test_the_command_and_its_times_fit_the_server(name: str) -> None:
    unit, settings = read(name), load_settings(UNITS / "fastserve.yaml")
    (command,) = unit["ExecStart"]
    program, subcommand, *arguments = command.split()
    assert program.endswith("/bin/fastserve")
    assert subcommand == "serve"
    context = serve.make_context("serve", [], resilient_parsing=True)
    values, rest, _ = serve.make_parser(context).parse_args(list(arguments))
    assert (rest, values["config"]) == ([], "/etc/fastserve/fastserve.yaml")
    (stop,) = unit["TimeoutStopSec"]
    assert int(stop.removesuffix("s")) >= settings.drain_delay_s + settings.drain_s + STOP_S + 10
    assert unit["KillMode"] == ["mixed"]  # workers get no SIGTERM before their server has drained


def test_both_services_are_the_same_but_for_the_instance() -> None:
    alone, instance = (read(name) for name in SERVICES)
    for key in INSTANCE:
        assert instance.pop(key) == INSTANCE[key]
    assert instance.pop("ExecStart") == [
        alone.pop("ExecStart")[0].replace("/opt/fastserve", "/opt/fastserve-%i")
    ]
    assert (
        alone.pop("Description")[0].replace("fastserve", "fastserve (%i)", 1)
        == instance.pop("Description")[0]
    )
    assert alone == instance


def test_each_port_of_the_socket_is_a_listener() -> None:
    settings = load_settings(UNITS / "fastserve.yaml")
    refuse_open_places(settings)
    listeners = [listener.address for listener in (*settings.http, *settings.grpc)]
    assert read("fastserve.socket")["ListenStream"] == listeners


def test_every_file_is_tested() -> None:
    assert {path.name for path in UNITS.iterdir()} == {*SERVICES, "fastserve.socket", "fastserve.yaml"}


def need(command: str) -> str:
    found = shutil.which(command)
    if found is None:
        pytest.skip(f"there is no {command}")
    return found


def test_systemd_takes_them(tmp_path: Path) -> None:
    analyze = need("systemd-analyze")
    for path in UNITS.glob("*.s*"):
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", path.read_text(), flags=re.MULTILINE)
        (tmp_path / path.name.replace("@", "@blue")).write_text(text)
    names = ("fastserve.socket", "fastserve.service", "fastserve@blue.service")
    done = subprocess.run(
        [analyze, "verify", *(str(tmp_path / name) for name in names)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    about = [line for line in (done.stdout + done.stderr).splitlines() if "fastserve" in line]
    assert (done.returncode, about) == (0, [])
    for name in names[1:]:
        exposed = subprocess.run(
            [analyze, "security", "--offline=true", "--threshold=20", str(tmp_path / name)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert exposed.returncode == 0, exposed.stdout  # an exposure of 2.0 of 10 at most


def test_systemd_activates_the_server(tmp_path: Path) -> None:
    """The socket is opened by systemd's own program, which starts the server with the first connection."""
    activate = need("systemd-socket-activate")
    write_model(tmp_path / "models")
    port = free_port()
    place = f"127.0.0.1:{port}"
    options = ["serve", str(tmp_path / "models"), "--http", place, "--grpc", "off", "--drain-delay-s", "0"]
    command = [activate, f"--listen={place}", sys.executable, "-m", "fastserve.cli", *options]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: accepts(port), "systemd listens")
        for _ in range(3):
            link = http.client.HTTPConnection(place, timeout=START_S)
            link.request("POST", "/v1/models/twice:predict", json.dumps({"instances": [[1.0, 0.5]]}))
            assert json.loads(link.getresponse().read()) == {"predictions": [[2.0, 1.0]]}
            link.close()
        server.send_signal(signal.SIGTERM)
        assert server.wait(START_S) == 0, (tmp_path / "log").read_text()
    finally:
        server.kill()
        server.wait()


def accepts(port: int) -> bool:
    with socket.socket() as link:
        return link.connect_ex(("127.0.0.1", port)) == 0
