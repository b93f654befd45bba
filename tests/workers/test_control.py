"""The control line: messages and descriptors across, and everything a hostile worker could put on it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from fastserve.workers.control import MESSAGE_BYTES, ControlChannel, ControlFault, PeerGone
from tests.workers.rig import run

Line = tuple[ControlChannel, ControlChannel]


@pytest.fixture
def line() -> Iterator[Line]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner, worker = ControlChannel(ours, owner=True), ControlChannel(theirs, owner=False)
    yield owner, worker
    owner.close()
    worker.close()


def test_messages_arrive_whole_and_in_order(line: Line) -> None:
    owner, worker = line
    owner.send({"op": "load", "parameters": {"a": [1, None, "ä"]}})
    owner.send({"op": "stop"})
    assert worker.receive() == ({"op": "load", "parameters": {"a": [1, None, "ä"]}}, [])
    assert worker.receive().message == {"op": "stop"}
    worker.send({"op": "ready"})
    assert owner.receive().message == {"op": "ready"}


def test_descriptors_arrive_closed_on_exec(line: Line) -> None:
    owner, worker = line
    given = [os.memfd_create("one"), os.memfd_create("two")]
    os.write(given[1], b"hello")
    owner.send({"op": "serve"}, given)
    _, fds = worker.receive()
    assert os.pread(fds[1], 10, 0) == b"hello"
    assert not any(map(os.get_inheritable, fds))
    for fd in given + fds:
        os.close(fd)


def test_a_long_message_reaches_the_worker_with_its_descriptors(line: Line) -> None:
    owner, worker = line
    labels = [f"label {n}" for n in range(50_000)]
    given = os.memfd_create("arena")
    owner.send({"op": "load", "labels": labels}, [given])
    message, fds = worker.receive()
    assert message == {"op": "load", "labels": labels}
    assert os.fstat(fds[0]).st_ino == os.fstat(given).st_ino
    os.close(given)
    os.close(fds[0])


def test_a_trusted_process_sends_long_messages_too() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner, front = (ControlChannel(s, owner=s is ours, trusted=True) for s in (ours, theirs))
    front.send({"op": "ask", "files": "x" * 3 * MESSAGE_BYTES})
    assert owner.receive() == ({"op": "ask", "files": "x" * 3 * MESSAGE_BYTES}, [])
    owner.close()
    front.close()


def test_a_worker_cannot_send_a_long_message(line: Line) -> None:
    _, worker = line
    with pytest.raises(ControlFault, match="at most 65536 are carried"):
        worker.send({"op": "failed", "message": "x" * MESSAGE_BYTES})


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b"null",
        b'"op"',
        b"{}",
        b'{"op": 1}',
        b'{"op": "ready"} trailing',
        b"\xff\xfe",
        b'{"op": "\xff"}',
        b"[" * 60_000,
        b'{"op":"x","a":' * 4000,
        bytes(MESSAGE_BYTES),
        b'{"op": "ready", "pad": "' + b"x" * MESSAGE_BYTES + b'"}',
    ],
    ids=lambda data: repr(data[:20]),
)
def test_a_malformed_datagram_is_a_fault(line: Line, data: bytes) -> None:
    owner, worker = line
    os.write(worker.fileno(), data)
    with pytest.raises(ControlFault):
        owner.receive()


def test_descriptors_from_a_worker_are_refused_and_closed(line: Line) -> None:
    owner, worker = line
    reader, writer = os.pipe()
    worker.send({"op": "ready"}, [writer])
    os.close(writer)
    with pytest.raises(ControlFault, match="descriptors"):
        owner.receive()
    assert os.read(reader, 1) == b""  # nobody holds the writing end any more
    os.close(reader)


def test_a_spilled_message_from_a_worker_is_not_believed(line: Line) -> None:
    owner, worker = line
    os.write(worker.fileno(), b'{"op": "spilled"}')
    assert owner.receive().message == {"op": "spilled"}  # a word the owner does not know, no more


def test_eof_is_peer_gone(line: Line) -> None:
    owner, worker = line
    worker.close()
    with pytest.raises(PeerGone):
        owner.receive()
    with pytest.raises(PeerGone):
        owner.send({"op": "stop"})


def test_unread_messages_at_the_end_are_still_peer_gone(line: Line) -> None:
    owner, worker = line
    owner.send({"op": "stop"})
    worker.close()  # with a message unread: the kernel says "reset" instead of EOF
    with pytest.raises(PeerGone):
        owner.receive()


def test_a_deaf_worker_does_not_block_the_owner(line: Line) -> None:
    owner, _ = line

    def send_forever() -> None:
        for _ in range(10_000):
            owner.send({"op": "load", "pad": "x" * 60_000})

    async def scenario() -> None:
        owner.watch(lambda message: None, lambda reason: None)
        with pytest.raises(ControlFault, match="could not be sent"):
            send_forever()
        owner.close()

    run(scenario())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_watched_messages_then_the_end(line: Line, loop: str) -> None:
    owner, worker = line
    heard: list[Any] = []

    async def scenario() -> None:
        gone = asyncio.get_running_loop().create_future()
        owner.watch(heard.append, gone.set_result)
        for number in range(100):
            worker.send({"op": "ready", "n": number})
        worker.close()
        assert await gone == ""
        owner.close()

    run(scenario(), loop)
    assert heard == [{"op": "ready", "n": number} for number in range(100)]


def test_a_fault_ends_the_watch_with_its_reason(line: Line) -> None:
    owner, worker = line

    async def scenario() -> None:
        gone = asyncio.get_running_loop().create_future()
        owner.watch(lambda message: None, gone.set_result)
        os.write(worker.fileno(), b"rubbish")
        assert await gone == "a message that is not JSON"
        owner.close()

    run(scenario())


def test_drain_delivers_the_last_words(line: Line) -> None:
    owner, worker = line
    heard: list[Any] = []

    async def scenario() -> None:
        owner.watch(heard.append, lambda reason: None)
        worker.send({"op": "failed", "message": "last words"})
        worker.close()
        owner.drain(heard.append)

    run(scenario())
    assert heard == [{"op": "failed", "message": "last words"}]


def test_messages_are_plain_json(line: Line) -> None:
    owner, worker = line
    owner.send({"op": "stop", "n": 1})
    data = worker._sock.recv(MESSAGE_BYTES)
    assert msgspec.json.decode(data) == {"op": "stop", "n": 1}
