"""What a start tells while models load: a bar on a terminal, lines elsewhere, and then where to ask."""

from __future__ import annotations

import io
import logging
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fastserve.metrics import ModelReadiness, Readiness
from fastserve.net import AddressError
from fastserve.server.banner import advise, banner_text
from fastserve.server.progress import CLEAR, StartProgress
from fastserve.settings import Listener, Settings
from tests.running import WAIT_S
from tests.server.lifecycle.test_opening import SLOW, write_slow
from tests.server.rig import write_model


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bar_on_a_terminal_makes_room_for_the_log(logs_as_before: None) -> None:
    terminal, clock = io.StringIO(), Clock()
    handler = logging.StreamHandler(terminal)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    progress = StartProgress(terminal, lambda: 80, clock)
    progress.begin(["b", "a", "d", "c"])
    clock.now += 12
    progress.settle("a", failed=False)
    progress.settle("d", failed=True)
    root.warning("a line")
    progress.look()
    progress.end()
    root.warning("another")
    first, second, third = (
        f"{CLEAR}loading [{'#' * 6 * n}{'-' * (24 - 6 * n)}] {text}\r"
        for n, text in (
            (0, "0 of 4, 0 s: a, b, c, d"),
            (1, "1 of 4, 12 s: b, c, d"),
            (2, "1 of 4, 1 failed, 12 s: b, c"),
        )
    )
    assert terminal.getvalue() == f"{first}{second}{third}{CLEAR}a line\n{third}{CLEAR}another\n"
    assert handler.filters == []


def test_a_bar_fits_into_the_terminal_and_survives_its_end() -> None:
    terminal = io.StringIO()
    progress = StartProgress(terminal, lambda: 20, Clock())
    progress.begin(["a" * 40])
    assert terminal.getvalue() == f"{CLEAR}loading [----------\r"
    terminal.close()
    progress.look()
    progress.end()


def test_lines_where_there_is_no_terminal_come_more_and_more_seldom(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    progress = StartProgress(None, clock=clock)
    progress.begin([f"m{number}" for number in range(10, 20)])
    progress.settle("m10", failed=False)
    progress.settle("m11", failed=True)
    for _ in range(2 * 200):  # as often as the server looks
        clock.now += 0.5
        progress.look()
    progress.end()
    first, *lines = [record.getMessage() for record in caplog.records]
    assert first == "loading 10 models: m10, m11, m12, m13, m14, m15, m16, m17 and 2 more"
    assert [line.split(" after ")[1].split(";")[0] for line in lines] == [
        "10 s",
        "20 s",
        "40 s",
        "80 s",
        "140 s",
        "200 s",
    ]
    assert lines[0] == "1 of 10 models are loaded after 10 s; not yet: m12, m13, m14, m15, m16, m17, m18, m19"


def test_nothing_is_said_of_no_models(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    terminal = io.StringIO()
    for one in (StartProgress(None), StartProgress(terminal)):
        one.begin([])
        one.look()
        one.end()
    assert (caplog.records, terminal.getvalue()) == ([], "")


class Terminal:
    """A terminal that a process writes to, and what it has written."""

    def __init__(self) -> None:
        self._ours, self.theirs = os.openpty()
        self.text = ""

    def read_until(self, word: str) -> None:
        while word not in self.text:
            assert select.select([self._ours], [], [], WAIT_S)[0], f"never: {word}"
            self.text += os.read(self._ours, 65536).decode()

    def close(self) -> None:
        os.close(self._ours)
        os.close(self.theirs)


def test_a_server_at_a_terminal(tmp_path: Path) -> None:
    write_slow(tmp_path, "slow", SLOW)
    write_model(tmp_path / "models", "quick")
    terminal = Terminal()
    options = ["--http", "127.0.0.1:0", "--grpc", "off", "--drain-delay-s", "0"]
    command = [sys.executable, "-m", "fastserve.cli", "serve", str(tmp_path / "models"), *options]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    streams = {"stdout": terminal.theirs, "stderr": terminal.theirs}
    with subprocess.Popen(command, env=environment, **streams) as server:
        try:
            terminal.read_until("1 of 2, ")
            (tmp_path / "held" / "slow" / "go").touch()
            terminal.read_until("/console")
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(WAIT_S) == 0
    shown = terminal.text.replace("\r\n", "\n")
    assert f"{CLEAR}loading [------------------------] 0 of 2, 0 s: quick, slow\r" in shown
    assert "loading [############------------] 1 of 2, " in shown
    *_, banner = shown.split("fastserve is ready: ")
    address, models, metadata, console, *_ = banner.splitlines()
    assert models == "models: quick, slow"
    assert metadata == f"  curl {address}/v2/models/quick"
    assert console == f"and, in a browser, to see what they do: {address}/console"
    assert f"{CLEAR}2" in shown  # a line of the log, where the bar was
    terminal.close()


def test_the_banner_elsewhere_is_one_line() -> None:
    ready = Readiness(True, models={"m": ModelReadiness(True)})
    place, settings = (Listener("[::]:80"),), Settings(repository="models")
    assert banner_text(settings, place, (), ready) == "fastserve is ready: http://[::]:80"
    shown = banner_text(settings, place, (), ready, at_terminal=True).splitlines()
    assert shown[2] == "  curl http://localhost:80/v2/models/m"
    other = (Listener("[::]:80", ("grps",)),)
    assert banner_text(settings, other, (), ready, at_terminal=True).splitlines()[1:] == ["models: m"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (13, "; ports below 1024 are for root: choose a higher one, --listen HOST:PORT"),
        (
            98,
            "; stop what listens there (`ss -ltnp sport = :80` names it), or choose another: --listen",
        ),
        (99, "; this machine does not have that address: --listen HOST:PORT, where HOST is"),
        (5, ""),
    ],
)
def test_advice_about_an_address_names_its_flag(number: int, words: str) -> None:
    settings = Settings(repository="demo", listen=(Listener(":80"),))
    told = advise(settings, AddressError(number, "no", ":80"))
    assert told.startswith(words)
    assert bool(told) == bool(words)
    assert "another address" in advise(settings, AddressError(98, "no", "a:1"))  # of a dialect's own port
    assert advise(settings, AddressError(98, "no", "unix:/a")) == ""
