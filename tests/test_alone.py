"""Tests that run beside each other when the suite runs in several processes."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.alone import Room

WAIT_S = 60.0


class Guests:
    """Each comes in a thread of its own, with its own way in, and stays until it is sent away."""

    def __init__(self, folder: Path) -> None:
        self._files = (folder / "door", folder / "room")
        for file in self._files:
            file.touch()
        self.came: queue.Queue[str] = queue.Queue()
        self._sent: dict[str, threading.Event] = {}
        self._threads: dict[str, threading.Thread] = {}

    def invite(self, name: str, *, alone: bool) -> None:
        self._sent[name] = threading.Event()
        self._threads[name] = threading.Thread(target=self._visit, args=(name, alone))
        self._threads[name].start()

    def _visit(self, name: str, alone: bool) -> None:
        with contextlib.closing(Room(*self._files)) as room, room.place(alone=alone):
            self.came.put(name)
            self._sent[name].wait(WAIT_S)

    def send_away(self, name: str) -> None:
        self._sent[name].set()
        self._threads[name].join()

    def until_waiting(self, count: int) -> None:
        """Until so many wait for one of the two locks, as the kernel says."""
        inodes = {file.stat().st_ino for file in self._files}

        def waits(line: str) -> bool:
            fields = line.split()
            return fields[1] == "->" and int(fields[6].rpartition(":")[2]) in inodes

        end = time.monotonic() + WAIT_S
        while sum(map(waits, Path("/proc/locks").read_text().splitlines())) < count:
            assert time.monotonic() < end, "nobody waits"
            time.sleep(0.001)

    def close(self) -> None:
        for name in self._threads:
            self.send_away(name)


@pytest.fixture
def guests(tmp_path: Path) -> Iterator[Guests]:
    with contextlib.closing(Guests(tmp_path)) as made:
        yield made


def test_one_who_is_alone_waits_for_the_others_and_newcomers_for_it(guests: Guests) -> None:
    for name in ("first", "second"):
        guests.invite(name, alone=False)
    assert {guests.came.get(timeout=WAIT_S) for _ in range(2)} == {"first", "second"}
    guests.invite("measuring", alone=True)
    guests.until_waiting(1)
    guests.invite("late", alone=False)
    guests.until_waiting(2)
    guests.send_away("first")
    assert guests.came.empty()
    guests.send_away("second")
    assert guests.came.get(timeout=WAIT_S) == "measuring"
    guests.until_waiting(1)
    assert guests.came.empty()
    guests.send_away("measuring")
    assert guests.came.get(timeout=WAIT_S) == "late"


def test_a_place_is_given_back_after_a_failure(guests: Guests) -> None:
    room = Room(*guests._files)
    with contextlib.closing(room), pytest.raises(ZeroDivisionError), room.place(alone=True):
        raise ZeroDivisionError
    guests.invite("next", alone=True)
    assert guests.came.get(timeout=WAIT_S) == "next"
