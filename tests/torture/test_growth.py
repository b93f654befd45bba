"""A million requests leave the front process as large as they found it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.load.servers import Server, fastserve, healthy, wait_ready
from tests.running import until

pytestmark = [pytest.mark.torture, pytest.mark.alone]
COMMAND = str(Path(sys.executable).with_name("fastserve"))
REQUESTS = 1_000_000
GROWTH_MB = 1.0


@pytest.fixture
def server() -> Iterator[Server]:
    with fastserve("demo", [0, 1]) as found:
        wait_ready(found, lambda: healthy(found))
        yield found


def load(server: Server, seconds: float) -> int:
    """Requests answered, all of them well."""
    options = ["--url", server.origin, "-c", "32", "-d", str(seconds), "--warm-up", "0", "--json"]
    done = subprocess.run([COMMAND, "bench", "half_plus_two", *options], capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert list(report["statuses"]) == ["200"]
    assert report["faults"] == {}
    return int(report["requests"])


def test_no_growth_over_a_million_requests(server: Server) -> None:
    sent = load(server, 15)
    before = server.rss_mb()
    while sent < REQUESTS:
        sent += load(server, 15)
    assert server.rss_mb() - before < GROWTH_MB


def test_errors_leave_nothing_either(server: Server) -> None:
    def refuse(count: int) -> None:
        for _ in range(count):
            body = b'{"instances": [[1, 2], [3]]}'
            request = urllib.request.Request(f"{server.origin}/v1/models/digits:predict", body)
            with pytest.raises(urllib.error.HTTPError, match="400"):
                urllib.request.urlopen(request, timeout=10)

    refuse(3000)
    before = server.rss_mb()
    refuse(30000)
    assert server.rss_mb() - before < GROWTH_MB


def answers(server: Server) -> bool:
    """Whether it has answered requests to the model."""
    with urllib.request.urlopen(f"{server.origin}/metrics", timeout=30) as page:
        text = page.read().decode()
    return re.search(r"^fastserve_requests_total{.*half_plus_two.*} [1-9]", text, re.MULTILINE) is not None


def test_stops_under_load_lose_nothing_but_connections() -> None:
    """Every stop exits 0 while a load runs; what was answered was answered well."""
    for _ in range(20):
        with fastserve("demo", [0, 1]) as server:
            wait_ready(server, lambda server=server: healthy(server))
            options = ["--url", server.origin, "-d", "2", "--warm-up", "0", "--json"]
            running = subprocess.Popen([COMMAND, "bench", "half_plus_two", *options], stdout=subprocess.PIPE)
            until(lambda server=server: answers(server), "the load has begun", 60)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) == 0
            out, _ = running.communicate(timeout=60)
            report = json.loads(out)
            assert set(report["statuses"]) <= {"200", "503"}
            assert "timed out" not in report["faults"]
