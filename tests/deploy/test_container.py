"""The Containerfile, its context and health check, and the compose file."""

from __future__ import annotations

import http.server
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastserve.errors import ConfigError
from fastserve.server.dialect_selection import refuse_open_places
from fastserve.server.server import STOP_S
from fastserve.settings import load_settings
from fastserve.settings.sources import OTHER_VARIABLES, list_variables, read_environment

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/container"


def instructions() -> list[tuple[str, str]]:
    """Return the Containerfile's instructions, lines that are continued as one."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Containerfile").read_text(), flags=re.MULTILINE).replace(
        "\\\n", " "
    )
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)
    ]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


def test_the_final_stage_has_no_tools_and_no_rights() -> None:
    build, final = stages()
    assert build[0] == ("FROM", "${BASE} AS build")
    words = dict(final)
    assert words["USER"] == "10001:10001"
    assert words["STOPSIGNAL"] == "SIGTERM"
    (run,) = (rest for word, rest in final if word == "RUN")
    assert not re.search(r"\b(gcc|g\+\+|pip|make|python3-dev|python3-venv)\b", run)
    assert "groupadd --gid 10001 " in run
    assert "useradd --uid 10001 --gid 10001 " in run
    assert "-perm /6000 -type f -exec chmod a-s {} +" in run  # no program gains rights
    assert [rest for word, rest in final if word == "COPY"] == [
        "--from=build /opt/fastserve /opt/fastserve",
        "deploy/container/healthcheck.py /opt/fastserve/healthcheck.py",
    ]


def test_its_settings_and_ports_are_the_servers() -> None:
    final = dict(stages()[1])
    variables = dict(item.split("=", 1) for item in shlex.split(final["ENV"]))
    ours = {name: value for name, value in variables.items() if name.startswith("FASTSERVE_")}
    assert set(ours) <= {*list_variables(), *OTHER_VARIABLES}
    read = read_environment(ours)
    ports = [read[name][0].rpartition(":")[2] for name in ("http", "grpc")]  # type: ignore[index]
    assert final["EXPOSE"].split() == ports


def test_what_is_copied_exists_and_is_in_the_context() -> None:
    ignore = [
        line for line in (ROOT / ".containerignore").read_text().splitlines() if line and line[0] != "#"
    ]
    assert ignore[0] == "*"
    kept = [line[1:] for line in ignore if line.startswith("!")]
    copied = [
        name
        for stage in stages()
        for word, rest in stage
        if word == "COPY" and "--from" not in rest
        for name in rest.split()[:-1]
    ]
    for name in copied:
        assert (ROOT / name).exists(), name
        assert any(name == one or name.startswith(f"{one}/") for one in kept), name
    for name in kept:
        assert (ROOT / name).exists(), name


@pytest.fixture
def live() -> Iterator[http.server.ThreadingHTTPServer]:
    class Live(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = self.server.status  # type: ignore[attr-defined]
            self.send_response(status if self.path == "/healthz/live" else 404)
            self.end_headers()

        def log_message(self, *given: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Live) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def check(**variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTSERVE_")}
    command = [sys.executable, str(FOLDER / "healthcheck.py")]
    return subprocess.run(
        command, env={**environment, **variables}, capture_output=True, timeout=60
    ).returncode


def test_the_health_check_asks_the_first_listener(live: http.server.ThreadingHTTPServer) -> None:
    port = live.server_address[1]
    live.status = 200  # type: ignore[attr-defined]
    assert check(FASTSERVE_HTTP=f"0.0.0.0:{port}") == 0
    assert check(FASTSERVE_HTTP=f"0.0.0.0:{port}=ops 0.0.0.0:1") == 0
    assert check(FASTSERVE_LISTEN=f"[::]:{port}", FASTSERVE_HTTP="0.0.0.0:1") == 0
    live.status = 503  # type: ignore[attr-defined]
    assert check(FASTSERVE_HTTP=f"0.0.0.0:{port}") == 1
    assert check(FASTSERVE_HTTP="0.0.0.0:1") == 1


def test_compose_holds_servers_as_the_chart_does() -> None:
    whole = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    services = whole["services"]
    proxied = (ROOT / "deploy/proxies/nginx.conf").read_text()
    servers = {name: one for name, one in services.items() if name != "proxy"}
    assert (
        set(re.findall(r"server (fastserve-\d+):8000", proxied))
        == set(servers)
        == set(services["proxy"]["depends_on"])
    )
    for one in servers.values():
        assert one["read_only"]
        assert one["cap_drop"] == ["ALL"]
        assert one["user"] == "10001:10001"
        settings = one["environment"]
        assert set(settings) <= set(list_variables())
        final = dict(stages()[1])
        image = dict(item.split("=", 1) for item in shlex.split(final["ENV"]))
        refuse_open_places(load_settings(None, None, read_environment({**image, **settings})))
        with pytest.raises(ConfigError, match="nobody needs a key"):
            refuse_open_places(load_settings(None, None, read_environment(image)))
        least = float(settings["FASTSERVE_DRAIN_DELAY_S"]) + float(settings["FASTSERVE_DRAIN_S"]) + STOP_S
        assert int(one["stop_grace_period"].removesuffix("s")) >= least + 5
        built = (FOLDER / one["build"]["context"]).resolve()
        assert (built, (built / one["build"]["dockerfile"]).is_file()) == (ROOT, True)
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source == "./models" or (FOLDER / source).is_file()


def test_every_file_is_tested() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"Containerfile", "healthcheck.py", "compose.yaml"}
