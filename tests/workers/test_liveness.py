"""How long a process that does not answer is waited for, by what the kernel says of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from fastserve.workers import liveness
from fastserve.workers.liveness import ProcessActivity, Silence, look_at


class Kernel:
    """Contents of /proc, look by look, and the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: str, cpu_share: float = 0.0) -> None:
        self.now, self.cpu_s, self.state, self._share = 100.0, 5.0, state, cpu_share
        monkeypatch.setattr(liveness, "_read_stat", lambda path: (self.state, self.cpu_s))
        self.silence = Silence(lambda: self.now)
        self.silence.look(os.getpid(), answered=True, owes=True)

    def seconds(self, *, owes: bool = True, most: float = 600.0) -> float:
        """How long until it is ended; `most`: it is not."""
        began = self.now
        while not self.silence.over and self.now - began < most:
            self.now += 2.0
            self.cpu_s += 2.0 * self._share
            self.silence.look(os.getpid(), answered=False, owes=owes)
        return self.now - began


@pytest.mark.parametrize(
    ("state", "share", "wanted"),
    [
        ("T", 0.0, 8.0),
        ("S", 0.0, 8.0),
        ("R", 0.9, 30.0),
        ("S", 0.9, 30.0),
        ("R", 0.05, 60.0),
        ("D", 0.0, 60.0),
    ],
)
def test_silence_is_judged_by_what_the_process_does(
    monkeypatch: pytest.MonkeyPatch, state: str, share: float, wanted: float
) -> None:
    seconds = Kernel(monkeypatch, state, share).seconds()
    assert wanted - 8 <= seconds <= wanted + 2, seconds


@pytest.mark.parametrize(("state", "wanted"), [("T", 8.0), ("S", 600.0), ("R", 600.0), ("t", 600.0)])
def test_who_owes_nothing_is_ended_only_when_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch, state: str, wanted: float
) -> None:
    assert Kernel(monkeypatch, state).seconds(owes=False) == wanted


def test_time_in_which_the_owner_did_not_run_is_nobodys_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, "S")
    kernel.now += 3600
    kernel.silence.look(os.getpid(), answered=False, owes=True)
    assert not kernel.silence.long


def test_an_answer_ends_the_silence_and_another_process_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, "S")
    kernel.seconds()
    assert kernel.silence.look(os.getpid() + 1, answered=False, owes=True) == 0
    kernel.seconds()
    assert kernel.silence.look(os.getpid(), answered=True, owes=True) == 0


def test_a_process_is_seen_to_be_stopped_and_to_wait() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            while look_at(child.pid, -1.0, 2.0)[0] is not ProcessActivity.WAITING:
                continue
            os.kill(child.pid, signal.SIGSTOP)
            while look_at(child.pid, -1.0, 2.0)[0] is not ProcessActivity.STOPPED:
                continue
        finally:
            child.kill()
