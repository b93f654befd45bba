"""What a service manager is told of a server: that it is ready, that its loop turns, that it stops."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fastserve.server.progress import ServiceManager
from tests.running import START_S
from tests.server.rig import write_model


def bound(place: str) -> socket.socket:
    heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    heard.settimeout(START_S)
    heard.bind(place)
    return heard


def test_it_hears_of_ready_the_loop_and_the_stop(tmp_path: Path) -> None:
    write_model(tmp_path / "models")
    with bound(str(tmp_path / "notify")) as manager:
        told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}
        options = ("--listen", "127.0.0.1:0", "--drain-delay-s", "0")
        command = [sys.executable, "-m", "fastserve.cli", "serve", str(tmp_path / "models"), *options]
        server = subprocess.Popen(command, env={**os.environ, **told}, stdout=subprocess.DEVNULL)
        try:
            messages = [manager.recv(1000).decode()]
            while not messages[-1].startswith("READY"):
                assert messages[-1] == "WATCHDOG=1"  # while models load, too
                messages.append(manager.recv(1000).decode())
            assert messages[-1] == "READY=1\nSTATUS=serving 1 models"
            assert manager.recv(1000) == b"WATCHDOG=1"
            server.send_signal(signal.SIGTERM)
            while (message := manager.recv(1000)) == b"WATCHDOG=1":
                pass
            assert message == b"STOPPING=1\nSTATUS=finishing requests"
            assert server.wait(START_S) == 0
        finally:
            server.kill()
            server.wait()


def test_beats_come_at_half_of_what_is_granted(tmp_path: Path) -> None:
    now = [0.0]
    with bound(f"\0fastserve-test-{os.getpid()}") as manager:
        environment = {
            "NOTIFY_SOCKET": f"@fastserve-test-{os.getpid()}",
            "WATCHDOG_USEC": "4000000",
            "WATCHDOG_PID": str(os.getpid()),
            "HOME": "/",
        }
        told = ServiceManager(environment, lambda: now[0])
        assert environment == {"HOME": "/"}
        manager.setblocking(False)
        times = []
        for tenth in range(60):
            now[0] = tenth / 10
            told.beat()
            try:
                manager.recv(100)
            except BlockingIOError:
                continue
            times.append(tenth)
        assert times == [0, 20, 40]


def test_another_processs_watchdog_is_none_of_it(tmp_path: Path) -> None:
    place = str(tmp_path / "notify")
    with bound(place) as manager:
        manager.setblocking(False)
        ServiceManager({"NOTIFY_SOCKET": place, "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}).beat()
        with pytest.raises(BlockingIOError):
            manager.recv(100)


def test_a_manager_that_is_gone_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    told.ready("x")
    told.stopping()
    assert [record.message for record in caplog.records] == [
        "the service manager cannot be notified: No such file or directory"
    ]


def test_without_one_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", lambda *given: pytest.fail("a socket was opened"))
    told = ServiceManager({})
    told.ready("x")
    told.beat()
    told.stopping()
