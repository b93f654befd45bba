"""A worker that lies (hardening I4): whatever it says, the owner lives, kills it, and is not held up."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

from fastserve.errors import ServeError
from fastserve.workers.group import WorkerGroup
from tests.workers.rig import CONFIG, FakeArena, run

SPECS = b'{"x": {"dtype": "float32", "shape": [2]}}'
LOADED = b'{"op": "loaded", "inputs": ' + SPECS + b', "outputs": ' + SPECS + b"}"
# Says its lines, whatever it is told, then waits to be stopped.
LIAR = """
import socket, sys, select
line = socket.socket(fileno=int(sys.argv[-1]))
for data in {lines!r}:
    line.send(data)
while b'"stop"' not in (line.recv(100000) or b'"stop"'): pass
"""


def outcome(tmp_path: Path, *lines: bytes) -> str:
    """Return the outcome of `start` for a worker that sends these datagrams; "started" when it is content."""
    found = []

    async def scenario() -> None:
        arena = FakeArena()
        group = WorkerGroup(
            tmp_path / "demo" / "1",
            {**CONFIG, "load_timeout_s": 5},
            arena.make,
            lambda worker: None,
            lambda worker: None,
            entry=(sys.executable, "-c", LIAR.format(lines=lines)),
        )
        try:
            await group.start()
            found.append("started")
        except ServeError as error:
            found.append(error.message)
        await group.stop(5)
        arena.close()

    run(scenario())
    return found[0]


DIED = "worker 0 died while it was loading: killed: it sent "


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"rubbish", "a message that is not JSON"),
        (b'{"no": "op"}', "a message without an op"),
        (b'{"op": "ready"}', "'ready' while it was loading"),
        (b'{"op": "serve"}', "a message that is none of loaded, ready, failed"),
        (b'{"op": "loaded", "inputs": 3, "outputs": {}}', "a message that is none of loaded, ready, failed"),
        (b'{"op": "failed", "message": 3}', "a message that is none of loaded, ready, failed"),
        (b'{"op": "failed", "message": "x", "kind": "y"}', "a message that is none of loaded, ready, failed"),
    ],
)
def test_a_wrong_word_ends_the_worker(tmp_path: Path, line: bytes, words: str) -> None:
    assert outcome(tmp_path, line) == DIED + words


def test_a_wrong_description_fails_the_load(tmp_path: Path) -> None:
    line = LOADED.replace(b"float32", b"float31")
    assert outcome(tmp_path, line).startswith("the backend describes its tensors wrongly: tensor 'x': dtype")


def test_the_words_of_a_failure_are_cleaned_again(tmp_path: Path) -> None:
    line = (
        b'{"op": "failed", "message": "at 0x7f00deadbeef in /srv/models/secret.py\\n\\u001b[31m", "kind": 99}'
    )
    assert outcome(tmp_path, line) == "at 0x… in secret.py  [31m"


def test_one_word_too_many_ends_the_worker(tmp_path: Path) -> None:
    assert outcome(tmp_path, LOADED, LOADED) != "started"


def test_a_flood_ends_with_its_first_datagram(tmp_path: Path) -> None:
    assert outcome(tmp_path, *[b'{"op": "ready"}'] * 2000) == DIED + "'ready' while it was loading"


def test_random_bytes_never_reach_further_than_the_line(tmp_path: Path) -> None:
    random_ = random.Random(5)
    for _ in range(20):
        lines = [LOADED] if random_.random() < 0.5 else []
        for _ in range(random_.randrange(1, 4)):
            mutated = bytearray(
                random_.choice((LOADED, b'{"op": "ready"}', b'{"op": "failed", "message": "m"}'))
            )
            for _ in range(random_.randrange(0, 4)):
                mutated[random_.randrange(len(mutated))] = random_.randrange(256)
            lines.append(bytes(mutated))
        outcome(tmp_path, *lines)  # any answer will do; leftovers, hangs and exceptions will not


def test_a_worker_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        arena = FakeArena()
        group = WorkerGroup(
            tmp_path / "demo" / "1",
            {**CONFIG, "load_timeout_s": 0.3, "instances": 2},
            arena.make,
            lambda worker: None,
            lambda worker: None,
            entry=(sys.executable, "-c", LIAR.format(lines=())),
        )
        with pytest.raises(ServeError, match=r"was still loading after 0\.3 s"):
            await asyncio.wait_for(group.start(), 30)

    run(scenario())
